"""An adapter of the target beside a drafter (Medusa-2): what is trained, what is saved, what decoding with it is lossless with respect to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.adapter import Joint, TunableTarget, load_in_four_bits
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.registry import copy_drafter, load_drafter, open_drafter, save_drafter, tunes_target
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.medusa2 import Medusa2Objective
from torch.nn import functional

from .stepwise import PROMPTS, make
from .tiny import ragged, tiny_target


def tunable(settled: bool = True) -> tuple[TunableTarget, Medusa]:
    """A target in float64 whose adapter has left its initial value, at which it does nothing; heads for it."""
    plain = tiny_target()
    target = TunableTarget(Target(plain.model.double(), None, "tiny"), rank=3)
    if settled:
        generator = torch.Generator().manual_seed(4)
        for parameter in target.parameters():
            with torch.no_grad():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    head = make("medusa", target)
    assert isinstance(head, Medusa)
    return target, head.double()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TunableTarget, Medusa]:
    target, head = tunable()
    folder = tmp_path_factory.mktemp("medusa2") / "d"
    save_drafter(head, folder, {"target": {"name": "tiny", "fingerprint": target.fingerprint()}, "taps": list(head.taps)})
    return folder, target, head


def fresh(dtype: torch.dtype = torch.float64, seed: int = 0) -> Target:
    return Target(tiny_target(seed).model.to(dtype), None, "tiny")


def plain_loss(target: TunableTarget, head: Medusa, batch: Batch, objective: Medusa2Objective) -> torch.Tensor:
    """The paper's sum, place by place, through transformers' own forward pass of each document; the adapter's weights written into copies."""
    tuned, original, total = _with_adapter(target), fresh().model, torch.zeros((), dtype=torch.float64)
    own = dict(head.named_parameters())
    terms: list[list[torch.Tensor]] = [[] for _ in range(head.heads + 2)]  # text, original, heads; a mean a document
    for row in range(len(batch.ids_BT)):
        for document in sorted({int(d) for d in batch.document_BT[row] if d >= 0}):
            found: list[list[torch.Tensor]] = [[] for _ in terms]
            at = (batch.document_BT[row] == document).nonzero().flatten().tolist()
            ids = batch.ids_BT[row, at]
            hidden = torch.func.functional_call(original.model, tuned, (), {"input_ids": ids[None], "use_cache": False}).last_hidden_state[0]
            logits, before = hidden @ original.lm_head.weight.t(), original(input_ids=ids[None], use_cache=False).logits[0].detach()
            for t in range(len(at)):
                log_p, log_o = logits[t].log_softmax(-1), before[t].log_softmax(-1)
                if t + 1 < len(at) and batch.loss_BT[row, at[t + 1]]:
                    found[0].append(-log_p[ids[t + 1]])
                    found[1].append((log_o.exp() * (log_o - log_p)).sum())
                for k in range(head.heads):
                    token = int(ids[t + 2 + k]) if t + 2 + k < len(at) and batch.loss_BT[row, at[t + 2 + k]] else -1
                    if token in head.draft_ids.tolist():
                        x = hidden[t]
                        for layer in range(head.config.num_layers):
                            weight, bias = (own[f"blocks.{k}.layers.{layer}.linear.{part}"] for part in ("weight", "bias"))
                            x = x + functional.silu(weight @ x + bias)
                        found[2 + k].append(-(head.lm_head(k).weight @ x).log_softmax(-1)[head.draft_ids.tolist().index(token)])
            for means_of, places in zip(terms, found, strict=True):
                if places:
                    means_of.append(torch.stack(places).mean())
    means = [torch.stack(rows).mean() for rows in terms]
    for k in range(head.heads):
        total = total + objective.heads_weight * objective.step_decay ** (k + 1) * means[2 + k]
    return total + objective.text_weight * means[0] + objective.original_weight * means[1]


def _with_adapter(target: TunableTarget) -> dict[str, torch.Tensor]:
    """The decoder's weights W + (alpha / rank) B A, differentiable in A and B."""
    weights: dict[str, torch.Tensor] = {}
    parameters = dict(target.decoder.named_parameters())
    for name, parameter in parameters.items():
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            change = 2 * parameters[f"{stem}.lora_B.default.weight"] @ parameters[f"{stem}.lora_A.default.weight"]
            weights[f"{stem}.weight"] = parameter.detach() + change
        elif ".lora_" not in name:
            weights[name] = parameter
    return weights


def test_the_objective_equals_the_formula_in_value_and_gradient() -> None:
    target, head = tunable()
    batch, objective = ragged(), Medusa2Objective(chunk_tokens=5, text_weight=0.7, original_weight=0.4)
    assert (objective.heads_weight, objective.step_decay, objective.labels) == (0.2, 0.8, "hard")
    trained = dict(Joint(head, target.parameters()).named_parameters())
    values, gradients = [], []
    for written_out in (False, True):
        target.set_taps(head.taps)
        value = plain_loss(target, head, batch, objective) if written_out else objective(head, head, target, batch)[0]
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, list(trained.values())))
    torch.testing.assert_close(values[0].double(), values[1])
    for name, ours, theirs in zip(trained, *gradients, strict=True):
        assert float(theirs.abs().max()) > 0, name
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def test_only_the_adapter_and_the_heads_are_trained_each_by_its_own_losses() -> None:
    target, head = tunable(settled=False)
    frozen = {name: p.detach().clone() for name, p in target.model.named_parameters() if ".lora_" not in name}
    batch = ragged()
    target.set_taps(head.taps)
    loss, metrics = Medusa2Objective(text_weight=1.0, original_weight=0.0)(head, head, target, batch)
    assert metrics["original_kl"] == pytest.approx(0, abs=1e-6)  # an adapter that is new does nothing
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for name, p in target.model.named_parameters() if ".lora_" not in name)
    assert all(p.grad is not None for p in head.parameters()) and all(p.grad is not None for p in target.parameters())
    with_heads = [p.grad.clone() for p in target.parameters() if p.grad is not None]
    for p in [*head.parameters(), *target.parameters()]:
        p.grad = None
    loss, _ = Medusa2Objective(text_weight=1.0, original_weight=0.0, heads_weight=1e-12)(head, head, target, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert max(float(p.grad.abs().max()) for p in head.parameters() if p.grad is not None) < 1e-9
    assert any(not torch.allclose(p.grad, other) for p, other in zip(target.parameters(), with_heads, strict=True) if p.grad is not None)
    torch.optim.SGD([*head.parameters(), *target.parameters()], lr=0.1).step()
    assert all(torch.equal(p, frozen[name]) for name, p in target.model.named_parameters() if name in frozen)


def test_a_loaded_drafter_brings_its_target_with_the_same_logits(saved: tuple[Path, TunableTarget, Medusa]) -> None:
    folder, trained, head = saved
    batch, target = ragged(), fresh()
    target.set_taps(head.taps)
    original = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    loaded, contract = load_drafter(folder, target)
    want = trained.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    got = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    assert target._fused is not None
    assert all(type(layer.get_submodule("self_attn.q_proj")) is torch.nn.Linear for layer in target.layers)  # decoding is fast again
    real = batch.document_BT >= 0
    torch.testing.assert_close(got.hidden_BNH[real], want.hidden_BNH[real])
    assert float((got.hidden_BNH - original.hidden_BNH)[real].abs().max()) > 0.1
    with trained.original():
        before = trained.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    torch.testing.assert_close(before.hidden_BNH[real], original.hidden_BNH[real])
    assert isinstance(loaded, Medusa)
    torch.testing.assert_close(loaded.logits(got.hidden_BNH, 4)[real], head.logits(want.hidden_BNH, 4)[real])
    ids = torch.tensor([PROMPTS[0]])
    plain = _with_adapter(trained)
    hidden = torch.func.functional_call(fresh().decoder, plain, (), {"input_ids": ids, "use_cache": False}).last_hidden_state
    torch.testing.assert_close(target.model(input_ids=ids, use_cache=False).logits, trained.logits(hidden))  # transformers' generate
    assert contract["adapter"] == "adapter" and contract["target"]["fingerprint"] == target.fingerprint()
    assert target.fingerprint().keys() == {"config", "weights", "adapter"}
    assert {**fresh().fingerprint(), "adapter": target.fingerprint()["adapter"]} == target.fingerprint()  # both: the original's, and the adapter's
    again, _ = load_drafter(folder, target)  # it is not merged twice
    torch.testing.assert_close(target.features(batch.ids_BT, batch.position_BT, batch.document_BT).hidden_BNH[real], got.hidden_BNH[real])
    assert again.target is target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_is_lossless_with_respect_to_the_tuned_target(saved: tuple[Path, TunableTarget, Medusa], temperature: float) -> None:
    folder, trained, _ = saved
    params, target = [SamplingParams(temperature=temperature, seed=n) for n in range(len(PROMPTS))], fresh()
    original = Engine(target).generate(PROMPTS, params, 14).tokens
    head, _ = load_drafter(folder, target)
    tuned = Engine(target).generate(PROMPTS, params, 14).tokens
    assert tuned != original
    assert tuned == Engine(trained).generate(PROMPTS, params, 14).tokens  # as measured in training, the adapter not merged
    for tree in ("chain", "dynamic"):
        assert Engine(target, head.proposer(tree=tree, depth=3, nodes=8)).generate(PROMPTS, params, 14).tokens == tuned


def test_whatever_does_not_belong_together_is_refused(saved: tuple[Path, TunableTarget, Medusa], tmp_path: Path) -> None:
    folder, _, _ = saved
    assert tunes_target(folder) and tunes_target(f"hybrid:prompt_lookup+{folder}") and not tunes_target("prompt_lookup")
    with pytest.raises(UserError, match="belongs to another target"):
        load_drafter(folder, fresh(seed=1))
    target = fresh()
    other = make("medusa", target)
    save_drafter(other, tmp_path / "other", {"target": {"name": "tiny", "fingerprint": target.fingerprint()}})
    assert not tunes_target(tmp_path / "other")
    with pytest.raises(UserError, match="wanted a target without drafters of other weights"):
        load_drafter(folder, target)
    target = fresh()
    load_drafter(folder, target)
    with pytest.raises(UserError, match=r"belongs to another target \(adapter \w{16} is not none\)"):
        open_drafter(tmp_path / "other", target)
    copy_drafter(folder, tmp_path / "copy")
    contract = json.loads((tmp_path / "copy" / "contract.json").read_text())
    contract["target"]["fingerprint"]["adapter"] = "0" * 16
    (tmp_path / "copy" / "contract.json").write_text(json.dumps(contract))
    with pytest.raises(UserError, match="wanted the one of the drafter's contract"):
        load_drafter(tmp_path / "copy", fresh())
    (tmp_path / "copy" / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"wanted adapter_model\.safetensors in it"):
        load_drafter(tmp_path / "copy", fresh())
    with pytest.raises(UserError, match=r"adapter\.modules: .*wanted names of the target's layers, such as q_proj"):
        TunableTarget(fresh(), rank=2, modules=["nonesuch"])


def test_four_bits_without_their_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"adapter\.quantise: wanted bitsandbytes, .*draftsmith\[qlora\]"):
        load_in_four_bits("nowhere", dtype=torch.float32, device="cpu", revision=None, like=fresh())
