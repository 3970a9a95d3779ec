"""The EAGLE-3 head on the built-in target: training pass against cached drafting, losslessness, folders, and planted faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.proposer import Accepted
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config, default_taps
from draftsmith.heads.recurrent import RecurrentHead
from draftsmith.heads.registry import load_drafter, new_head, save_drafter
from draftsmith.recipes.schema import TargetRef
from draftsmith.train.losses import chunked_soft_cross_entropy, soft_cross_entropy
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.eagle3 import Eagle3Objective

from .recurrent import (
    CHAIN,
    TREE,
    Weights,
    check_cache,
    check_decoding,
    check_objective,
    check_over_fit,
    check_training_pass,
    layer,
    make,
    plain_cross_entropy,
    rms,
    step_means,
)
from .tiny import check_folder, documents, tiny_target

SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "one layer": {"num_layers": 1},
    "norms": {"norm_features": True},
    "two layers": {"num_layers": 2},
    "norms, three layers": {"norm_features": True, "num_layers": 3},
}
switches = pytest.mark.parametrize("settings", SWITCHES.values(), ids=SWITCHES)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetRef().location)


def make_head(target: Target, seed: int = 0) -> Eagle3:
    torch.manual_seed(seed)
    head = Eagle3(Eagle3Config.for_target(target, draft_vocab_size=700)).bind(target)
    head.set_draft_vocabulary(torch.randperm(target.vocab_size)[:700], target)
    return head


def random_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 2048, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_the_training_pass_equals_step_by_step_drafting_with_the_cache(target: Target) -> None:
    head = make_head(target)
    ids, position = random_ids(1, 30), torch.arange(30)[None]
    target.set_taps(head.config.taps)
    taps = target.features(ids, position, torch.zeros_like(ids)).taps_BNF
    assert taps is not None
    with torch.no_grad():
        outputs = head.training_outputs(taps, ids, position, torch.zeros_like(ids), 4)
        for pairs in (1, 9, 20):
            proposer = head.proposer(depth=4)
            proposer.reset(1, 64)
            proposer.observe(
                Accepted(ids[:, :pairs], ids[:, 1 : pairs + 1], taps[:, :pairs], torch.zeros(1, dtype=torch.int64), torch.tensor([pairs]))
            )
            hidden = proposer._hidden_BH.unsqueeze(1)
            torch.testing.assert_close(hidden[:, 0], outputs[0][:, pairs - 1], atol=1e-5, rtol=1e-4)
            for k in range(1, 4):  # true tokens are fed, as in training
                slot = torch.tensor([[pairs + k - 1]])
                hidden = proposer._run(hidden, ids[:, pairs + k : pairs + k + 1], slot, slot, (torch.arange(pairs + k) <= slot)[None])
                torch.testing.assert_close(hidden[:, 0], outputs[k][:, pairs - 1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings", [{"tree": "chain", "depth": 4}, {"tree": "dynamic", "depth": 3, "topk": 3, "nodes": 12}], ids=["chain", "dynamic"]
)
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, settings: dict[str, int], temperature: float) -> None:
    head = make_head(target).eval()
    prompts = [random_ids(1, n, seed=n)[0].tolist() for n in (4, 11, 7, 1)]
    params = [SamplingParams(temperature=temperature, seed=n) for n in range(4)]
    plain = Engine(target).generate(prompts, params, 20).tokens
    out = Engine(target, head.proposer(**settings)).generate(prompts, params, 20)  # type: ignore[arg-type]
    assert out.tokens == plain
    alone = [Engine(target, head.proposer(**settings)).generate([p], s, 20) for p, s in zip(prompts, params, strict=True)]  # type: ignore[arg-type]
    assert [g.rounds[0] for g in alone] == out.rounds  # padding rows change no draft either


def plain_loss(head: Eagle3, target: Target, batch: Batch, steps: int, decay: float) -> torch.Tensor:
    """The objective written out: every step, row and position on its own, full tensors, per-sequence means."""
    step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    assert step.taps_BNF is not None
    outputs = head.training_outputs(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, steps)
    logits = target.logits(step.hidden_BNH).float()
    total = torch.zeros(())
    for k, hidden in enumerate(outputs):
        rows = []
        for row, document in documents(batch):
            losses = []
            for t in range(batch.ids_BT.shape[1] - 2 - k):
                real = batch.document_BT[row, t] == document and batch.document_BT[row, t] == batch.document_BT[row, t + 2 + k]
                judge = logits[row, t + 1 + k]
                if real and batch.loss_BT[row, t + 2 + k] and head.t2d[judge.argmax()]:
                    losses.append(soft_cross_entropy(head.logits(hidden[row, t]), judge[head.draft_ids].softmax(-1)))
            if losses:
                rows.append(torch.stack(losses).mean())
        total = total + decay**k * torch.stack(rows).mean()
    return total / sum(decay**k for k in range(steps))


def test_the_objective_equals_the_formula_in_value_and_gradient(target: Target) -> None:
    ids = random_ids(2, 24)
    loss_mask, document = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    loss_mask[0, :9] = False
    document[1, 15:] = -1  # padding
    loss_mask[1, 15:] = False
    batch = Batch(ids, loss_mask, torch.arange(24).expand(2, 24), document)
    grads, values = [], []
    for chunked in (True, False):
        head = make_head(target)
        target.set_taps(head.config.taps)
        if chunked:
            value, metrics = Eagle3Objective(steps=3, step_decay=0.8, chunk_tokens=7)(head, head, target, batch)
            assert 0 <= metrics["accuracy_0"] <= 1
        else:
            value = plain_loss(head, target, batch, 3, 0.8)
        value.backward()  # type: ignore[no-untyped-call]
        values.append(value.detach())
        grads.append({name: p.grad for name, p in head.named_parameters()})
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-5)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-5, rtol=1e-3)


def test_padding_does_not_change_the_loss(target: Target) -> None:
    ids = random_ids(1, 20)
    head = make_head(target)
    target.set_taps(head.config.taps)
    objective = Eagle3Objective(steps=3)
    short = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(20)[None], torch.zeros_like(ids))
    pad = torch.nn.functional.pad
    wide = Batch(pad(ids, (0, 9), value=77), pad(short.loss_BT, (0, 9)), torch.arange(29)[None], pad(short.document_BT, (0, 9), value=-1))
    torch.testing.assert_close(objective(head, head, target, short)[0], objective(head, head, target, wide)[0])


def test_chunked_loss_equals_the_formula_in_double() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 10, 6, dtype=torch.float64, requires_grad=True), torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    weights, probs = torch.rand(3, 10), torch.randn(10, 17).softmax(-1)
    fast = chunked_soft_cross_entropy(hidden, weight, weights, lambda a, b: probs[a:b], 4)
    slow = sum((weights[s] * soft_cross_entropy(hidden[s] @ weight.t(), probs)).sum() for s in range(3))
    assert isinstance(slow, torch.Tensor)
    torch.testing.assert_close(fast, slow, check_dtype=False)
    for a, b in zip(torch.autograd.grad(fast, (hidden, weight)), torch.autograd.grad(slow, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, check_dtype=False, atol=1e-5, rtol=1e-4)


def test_a_head_that_knows_the_text_is_accepted_and_a_shifted_vocabulary_is_not(target: Target) -> None:
    """Over-fitted on one text that the target sampled, the head drafts it; with every d2t off by one the same head drafts nothing.

    Sampled, since greedy text soon is a loop, which can be drafted without looking.
    """
    prompt, params = random_ids(1, 6, seed=5)[0].tolist(), SamplingParams(temperature=1.0, seed=3)
    text = Engine(target).generate([prompt], params, 40).tokens[0]
    ids = torch.tensor([prompt + text])
    torch.manual_seed(0)
    head = Eagle3(Eagle3Config.for_target(target, draft_vocab_size=700)).bind(target)
    known = torch.unique(ids)
    head.set_draft_vocabulary(torch.cat([known, torch.tensor([i for i in range(2047) if i not in set(known.tolist())])])[:700], target)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(ids.shape[1])[None], torch.zeros_like(ids))
    optimizer, objective = torch.optim.AdamW(head.parameters(), lr=3e-3), Eagle3Objective(steps=3)
    for _ in range(60):
        target.set_taps(head.config.taps)
        loss, _metrics = objective(head, head, target, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def tau() -> float:
        out = Engine(target, head.proposer(depth=3)).generate([prompt], params, 40)
        assert out.tokens[0] == text
        return (len(text) - 1) / len(out.rounds[0])

    good = tau()
    head.d2t += 1
    assert good > 2 and tau() < 0.6 * good
    head.d2t -= 1
    # Layers far off: neighbours of this target, trained with dropped layers, are much alike. test_taps_are_hugging_face_hidden_states is exact.
    object.__setattr__(head.config, "taps", (0, 1, 12))
    assert tau() < good


def test_folder_round_trip_and_refusals(target: Target, tmp_path: Path) -> None:
    head = make_head(target)
    contract = {"target": {"name": "builtin:quickstart", "fingerprint": target.fingerprint()}}
    save_drafter(head, tmp_path / "d", contract)
    loaded, read = load_drafter(tmp_path / "d", target)
    assert read == contract and loaded.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    with pytest.raises(UserError, match="belongs to another target \\(weights"):
        other = {**target.fingerprint(), "weights": "0"}
        save_drafter(head, tmp_path / "other", {"target": {"name": "x", "fingerprint": other}})
        load_drafter(tmp_path / "other", target)
    weights = tmp_path / "d" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        load_drafter(tmp_path / "d", target)
    (tmp_path / "d" / "contract.json").unlink()
    with pytest.raises(UserError, match=r"got none of contract\.json"):
        load_drafter(tmp_path / "d", target)


def test_config_is_checked(target: Target) -> None:
    with pytest.raises(UserError, match=r"wanted ascending layers in 0 \.\. 12"):
        Eagle3Config.for_target(target, taps=[2, 25])
    with pytest.raises(UserError, match=r"draft_vocab_size: wanted 1 \.\. 2048"):
        Eagle3Config.for_target(target, draft_vocab_size=4000)
    assert default_taps(32) == (2, 16, 29) and default_taps(2) == (1, 2)
    assert json.loads(json.dumps(Eagle3Config.for_target(target).taps)) == [2, 6, 9]


@pytest.fixture(scope="module")
def tiny() -> Target:
    return tiny_target()


def plain(head: RecurrentHead, w: Weights, embedded: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
    """The states of a sequence, by tensor names."""
    first = torch.cat([rms(embedded, w["midlayer.input_layernorm.weight"]), rms(fed, w["midlayer.hidden_norm.weight"])], dim=-1)
    hidden = layer(w, "midlayer", head, first, fed)
    for index in range(1, 4):
        if f"layers.{index}.input_layernorm.weight" in w:
            hidden = layer(w, f"layers.{index}", head, rms(hidden, w[f"layers.{index}.input_layernorm.weight"]), hidden)
    return rms(hidden, w["norm.weight"]) if "fc_norm.0.weight" in w else hidden


def combined(w: Weights, taps: torch.Tensor) -> torch.Tensor:
    """What step 0 is fed, by tensor names."""
    parts = taps.chunk(w["fc.weight"].shape[1] // 32, dim=-1)
    if "fc_norm.0.weight" in w:
        parts = tuple(rms(part, w[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts))
    return torch.cat(parts, dim=-1) @ w["fc.weight"].t()


@switches
def test_with_each_switch_the_training_pass_equals_the_arithmetic_written_out(tiny: Target, settings: dict[str, Any]) -> None:
    check_training_pass(make("eagle3", tiny, **settings), plain, combined, tiny)


@switches
def test_with_each_switch_the_training_pass_equals_drafting_with_the_cache(tiny: Target, settings: dict[str, Any]) -> None:
    check_cache(make("eagle3", tiny, **settings), tiny)


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_norms_and_layers_decoding_is_token_identical(tiny: Target, how: dict[str, Any], temperature: float) -> None:
    check_decoding(make("eagle3", tiny, **SWITCHES["norms, three layers"]), tiny, how, temperature)


@pytest.mark.parametrize("settings", [SWITCHES["norms"], SWITCHES["two layers"]], ids=["norms", "two layers"])
def test_with_each_switch_the_objective_equals_the_formula(tiny: Target, settings: dict[str, Any]) -> None:
    head = make("eagle3", tiny, **settings)

    def written_out(batch: Batch) -> torch.Tensor:
        step = tiny.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None
        outputs = head.training_outputs(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, 2)
        logits = tiny.logits(step.hidden_BNH).float()
        first, second = (step_means(head, batch, k, plain_cross_entropy(head, outputs, logits, k)) for k in range(2))
        return (first + 0.5 * second) / 1.5

    check_objective(head, tiny, Eagle3Objective(steps=2, step_decay=0.5, chunk_tokens=7), written_out)


def test_with_norms_and_layers_a_head_that_knows_the_text_is_accepted(tiny: Target) -> None:
    check_over_fit("eagle3", tiny, Eagle3Objective(steps=3), steps=60, least=3.0, norm_features=True, num_layers=2)


def test_the_switches_add_the_tensors_that_engines_name_so_and_nothing_else(tiny: Target, tmp_path: Path) -> None:
    names = {name: set(make("eagle3", tiny, **settings).state_dict()) for name, settings in SWITCHES.items()}
    assert names["default"] == names["one layer"] and len(names["default"]) == 15
    assert names["norms"] - names["default"] == {f"fc_norm.{index}.weight" for index in range(len(default_taps(4)))}
    added = names["two layers"] - names["default"]
    assert len(added) == 9 and all(name.startswith("layers.1.") for name in added) and "layers.1.input_layernorm.weight" in added
    check_folder(make("eagle3", tiny, **SWITCHES["norms, three layers"]), tiny, tmp_path)


def test_no_layer_is_refused(tiny: Target) -> None:
    with pytest.raises(UserError, match=r"drafter\.num_layers: wanted at least 1, got 0"):
        new_head("eagle3", tiny, {"num_layers": 0})
