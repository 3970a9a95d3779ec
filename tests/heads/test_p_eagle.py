"""P-EAGLE: mask entries of the training pass against EAGLE-3's pairs and drafting with the cache, the objective, losslessness, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.p_eagle import PEagle
from draftsmith.heads.registry import new_head
from draftsmith.train.losses import soft_cross_entropy
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.dflash import sample_anchors
from draftsmith.train.objectives.p_eagle import PEagleObjective

from .parallel import (
    CHAIN,
    TREE,
    check_in_place,
    check_lossless,
    feed,
    make,
    over_fit,
    rms,
    tau,
    turn,
)
from .tiny import check_folder, documents, features, ragged, random_ids, tiny_target, whole


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def make_head(target: Target, **settings: Any) -> PEagle:
    head = make("p_eagle", target, **settings)
    assert isinstance(head, PEagle)
    return head


def entries_alone(head: PEagle, target: Target, taps_TF: torch.Tensor, following: list[int], masks: int, first: int = 0) -> torch.Tensor:
    """States of pairs at positions first, first + 1 ... and of mask entries behind the last, as one causal sequence written out head by head."""
    config = head.config
    count = len(taps_TF)
    fed = torch.cat([taps_TF, head.mask_hidden[0].expand(masks, -1)]) @ head.fc.weight.t()
    table = target.embeddings.weight
    assert isinstance(table, torch.Tensor)
    embedded = table[torch.tensor(following + [config.mask_token_id] * masks)]
    where = [first + i for i in range(count + masks)]
    causal = torch.ones(count + masks, count + masks, dtype=torch.bool).tril()
    group, width, h = config.num_heads // config.num_kv_heads, config.head_dim, fed
    for index, layer in enumerate(head.decoder_layers()):
        attention = layer.self_attn
        x = rms(h, layer.input_layernorm.weight)
        if index == 0:
            x = torch.cat([rms(embedded, head.midlayer.input_layernorm.weight), rms(fed, head.midlayer.hidden_norm.weight)], dim=-1)
        mixed = []
        for one in range(config.num_heads):
            rows, kv_rows = slice(one * width, (one + 1) * width), slice(one // group * width, (one // group + 1) * width)
            query, key = (turn(x @ weight.t(), where) for weight in (attention.q_proj.weight[rows], attention.k_proj.weight[kv_rows]))
            scores = (query @ key.t() / width**0.5).masked_fill(~causal, -torch.inf)
            mixed.append(scores.softmax(-1) @ (x @ attention.v_proj.weight[kv_rows].t()))
        h = h + torch.cat(mixed, dim=1) @ attention.o_proj.weight.t()
        y = rms(h, layer.post_attention_layernorm.weight)
        gate = y @ layer.mlp.gate_proj.weight.t()
        h = h + (gate * gate.sigmoid() * (y @ layer.mlp.up_proj.weight.t())) @ layer.mlp.down_proj.weight.t()
    return h


def test_mask_entries_of_many_anchors_equal_one_sequence_each_in_value_and_gradient(target: Target) -> None:
    head, batch = make_head(target), ragged()
    taps = features(target, head, batch)
    anchors, starts = torch.tensor([[0, 3, 18], [2, 8, 15]]), [[0, 0, 0], [0, 8, 8]]
    torch.manual_seed(1)
    pull = torch.randn(2, 3, 6, head.config.hidden_size)
    grads = []
    for many in (True, False):
        head.zero_grad()
        if many:
            pairs, masks = head.training_outputs(taps, batch.ids_BT, batch.position_BT, batch.document_BT, anchors)
            at = anchors.unsqueeze(-1).expand(-1, -1, pairs.shape[-1])
            outputs = torch.cat([pairs.gather(1, at).unsqueeze(2), masks], dim=2)
        else:
            alone = [
                entries_alone(head, target, taps[row, start : t + 1], batch.ids_BT[row, start + 1 : t + 2].tolist(), 5, start)[-6:]
                for row in range(2)
                for t, start in zip(anchors[row].tolist(), starts[row], strict=True)
            ]
            torch.testing.assert_close(outputs, torch.stack(alone).view_as(outputs), atol=5e-5, rtol=1e-4)
            outputs = torch.stack(alone).view(2, 3, 6, -1)
        (outputs * pull).sum().backward()  # type: ignore[no-untyped-call]
        grads.append({name: p.grad for name, p in head.named_parameters() if p.grad is not None})
    assert set(grads[0]) == set(grads[1])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("counts", [[[7, 7], [3, 3]], [[7, 2], [3, 1], [1, 4]]], ids=["even", "ragged"])
@pytest.mark.parametrize("depth", [6, 3, 1])
def test_the_training_pass_equals_drafting_with_the_cache(target: Target, counts: list[list[int]], depth: int) -> None:
    head, ids = make_head(target), random_ids(2, 20)
    taps = features(target, head, whole(ids))
    proposer = head.proposer(depth=depth)
    with torch.no_grad():
        ends = torch.tensor(feed(proposer, ids, taps, counts)).unsqueeze(1)
        batch = whole(ids)
        pairs, masks = head.training_outputs(taps, ids, batch.position_BT, batch.document_BT, ends - 1)
        last = pairs.gather(1, (ends - 1).unsqueeze(-1).expand(-1, -1, pairs.shape[-1]))
        states = torch.cat([last, masks[:, 0, : depth - 1]], dim=1)
        torch.testing.assert_close(proposer._state_BDH, states, atol=2e-5, rtol=1e-4)
        noise = torch.randn(2, depth + 1, target.vocab_size)
        sampler = Sampler([SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.5, seed=2)], "cpu")
        root = ids.gather(1, ends).squeeze(1)
        tree = proposer.propose(root, sampler, noise)
        scores = head.lm_head(head.norm(states)) / torch.tensor([1.0, 0.5]).view(2, 1, 1) + noise[:, :depth][..., head.draft_ids]
        assert tree.is_chain and torch.equal(tree.tokens_BN, torch.cat([root.unsqueeze(1), head.draft_ids[scores.argmax(-1)]], dim=1))


def plain_loss(head: PEagle, target: Target, batch: Batch, anchors: torch.Tensor, valid: torch.Tensor, decay: float) -> torch.Tensor:
    """The objective written out: every prediction on its own, full tensors, per-sequence means."""
    step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    assert step.taps_BNF is not None
    pairs, masks = head.training_outputs(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, anchors)
    judges = target.logits(step.hidden_BNH).float()
    total, weights = torch.zeros(()), [decay**s for s in range(1 + masks.shape[2])]
    for s, weight in enumerate(weights):
        means = []
        for row, document in documents(batch):
            places = [(t, pairs[row, t], range(t + 2, t + 3)) for t in range(batch.ids_BT.shape[1])]
            if s:
                chosen = [(a, t) for a, t in enumerate(anchors[row].tolist()) if valid[row, a]]
                places = [(t, masks[row, a, s - 1], range(t + 1, t + 3 + s)) for a, t in chosen]
            losses = []
            for t, state, between in places:
                if between[-1] >= batch.ids_BT.shape[1] or batch.document_BT[row, t] != document:
                    continue
                if all(batch.loss_BT[row, u] and batch.document_BT[row, u] == batch.document_BT[row, t] for u in between):
                    judge = judges[row, t + 1 + s]
                    if head.t2d[judge.argmax()]:
                        losses.append(soft_cross_entropy(head.lm_head(head.norm(state)), judge[head.draft_ids].softmax(-1)))
            if losses:
                means.append(torch.stack(losses).mean())
        if means:
            total = total + weight * torch.stack(means).mean()
    return total / sum(weights)


def test_the_objective_equals_the_formula_in_value_and_gradient(target: Target) -> None:
    batch, values, grads = ragged(), [], []
    for chunked in (True, False):
        head = make_head(target)
        target.set_taps(head.taps)
        torch.manual_seed(7)
        if chunked:
            value, metrics = PEagleObjective(step_decay=0.8, chunk_tokens=7, anchors=15)(head, head, target, batch)
            assert 0 <= metrics["accuracy_0"] <= 1
        else:
            value = plain_loss(head, target, batch, *sample_anchors(batch, 15), 0.8)
        value.backward()  # type: ignore[no-untyped-call]
        values.append(value.detach())
        grads.append({name: p.grad for name, p in head.named_parameters()})
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-5)
    assert set(grads[0]) == set(grads[1]) and all(grad is not None for grad in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "dynamic"])
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, settings: dict[str, Any], temperature: float) -> None:
    check_lossless(target, make_head(target), settings, temperature)


def test_the_cache_stays_in_place(target: Target) -> None:
    check_in_place(target, make_head(target), CHAIN)


def test_a_text_that_was_learned_is_drafted(target: Target) -> None:
    head = make_head(target, draft_vocab_size=97, noise=0.0, num_layers=1)
    prompt, params, text = over_fit(target, head, PEagleObjective(anchors=32, step_decay=1.0), steps=100, lr=6e-3)
    assert tau(target, head.proposer(depth=5), prompt, params, text) > 3.0
    assert tau(target, head.proposer(tree="dynamic", depth=5, topk=3, nodes=15), prompt, params, text) > 3.0


def test_folder_round_trip_and_refusals(target: Target, tmp_path: Path) -> None:
    head = make_head(target)
    check_folder(head, target, tmp_path)
    with pytest.raises(UserError, match=r"decode.depth: wanted 1 \.\. 6 \(drafter.block_size is 6\), got 7"):
        head.proposer(depth=7)
    for settings, message in (
        ({"taps": [1, 5]}, r"drafter.taps: wanted ascending layers in 0 \.\. 4"),
        ({"block_size": 1}, "drafter.block_size: wanted at least 2 positions, got 1"),
        ({"mask_token_id": 97}, r"drafter.mask_token_id: wanted 0 \.\. 96"),
        ({"num_layers": 0}, "drafter.num_layers: wanted at least 1, got 0"),
    ):
        with pytest.raises(UserError, match=message):
            new_head("p_eagle", target, settings)


def test_names_are_those_of_eagle3_and_a_learned_hidden_state(target: Target) -> None:
    head = make_head(target)
    other = new_head("eagle3", target, {"num_layers": 2, "draft_vocab_size": 60})
    assert set(head.state_dict()) == {*other.state_dict(), "mask_hidden"}
    assert head.mask_hidden.shape == (1, 1, len(head.taps) * 32) and head.config.mask_token_id == 0
