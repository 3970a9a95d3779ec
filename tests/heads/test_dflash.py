"""DFlash: blocks of the training pass against blocks written out and against drafting with the cache; the objective; losslessness; folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.dflash import DFlash, DFlashConfig, mask_token, spread_taps
from draftsmith.heads.registry import new_head
from draftsmith.train.losses import soft_cross_entropy
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.dflash import DFlashObjective, sample_anchors

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


def make_head(target: Target, **settings: Any) -> DFlash:
    head = make("dflash", target, **settings)
    assert isinstance(head, DFlash)
    return head


def block_alone(head: DFlash, target: Target, taps_TF: torch.Tensor, token: int, position: int, size: int, first: int = 0) -> torch.Tensor:
    """A block after the features of positions first .. position - 1, written out head by head: [size, H], normed."""
    config = head.config
    group, width = config.num_heads // config.num_kv_heads, config.head_dim
    context = rms(taps_TF @ head.fc.weight.t(), head.hidden_norm.weight)
    x = torch.stack([target.embeddings.weight[token if s == 0 else config.mask_token_id] for s in range(size)])  # type: ignore[index]
    for layer in head.block_layers():
        attention = layer.self_attn
        inside = rms(x, layer.input_layernorm.weight)
        read = torch.cat([context, inside])
        where = [first + t for t in range(len(context))] + [position + s for s in range(size)]
        mixed = []
        for h in range(config.num_heads):
            rows = slice(h * width, (h + 1) * width)
            kv_rows = slice(h // group * width, (h // group + 1) * width)
            query = turn(rms(inside @ attention.q_proj.weight[rows].t(), attention.q_norm.weight), where[len(context) :])
            keys = turn(rms(read @ attention.k_proj.weight[kv_rows].t(), attention.k_norm.weight), where)
            mixed.append((query @ keys.t() / width**0.5).softmax(-1) @ (read @ attention.v_proj.weight[kv_rows].t()))
        x = x + torch.cat(mixed, dim=1) @ attention.o_proj.weight.t()
        y = rms(x, layer.post_attention_layernorm.weight)
        gate = y @ layer.mlp.gate_proj.weight.t()
        x = x + (gate * gate.sigmoid() * (y @ layer.mlp.up_proj.weight.t())) @ layer.mlp.down_proj.weight.t()
    return rms(x, head.norm.weight)


def test_blocks_at_many_anchors_equal_blocks_written_out_in_value_and_gradient(target: Target) -> None:
    head, batch = make_head(target), ragged()
    taps = features(target, head, batch)
    anchors = torch.tensor([[0, 1, 9, 20], [3, 8, 12, 16]])  # row 1: two documents, 0 .. 7 and 8 .. 16
    starts = [[0, 0, 0, 0], [0, 8, 8, 8]]
    torch.manual_seed(1)
    pull = torch.randn(2, 4, 5, head.config.hidden_size)
    grads = []
    for many in (True, False):
        head.zero_grad()
        if many:
            outputs = head.training_outputs(taps, batch.ids_BT, batch.position_BT, batch.document_BT, anchors)
        else:
            alone = [
                block_alone(head, target, taps[row, start:anchor], int(batch.ids_BT[row, anchor]), anchor, 6, start)[1:]
                for row in range(2)
                for anchor, start in zip(anchors[row].tolist(), starts[row], strict=True)
            ]
            torch.testing.assert_close(outputs, torch.stack(alone).view_as(outputs), atol=2e-5, rtol=1e-4)
            outputs = torch.stack(alone).view(2, 4, 5, -1)
        (outputs * pull).sum().backward()  # type: ignore[no-untyped-call]
        grads.append({name: p.grad for name, p in head.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("counts", [[[7, 7], [3, 3]], [[7, 2], [3, 1], [1, 4]]], ids=["even", "ragged"])
@pytest.mark.parametrize("depth", [5, 2])
def test_the_training_pass_equals_drafting_with_the_cache(target: Target, counts: list[list[int]], depth: int) -> None:
    """A shorter block than the trained one is a block of the training pass of that size."""
    head, ids = make_head(target), random_ids(2, 20)
    taps = features(target, head, whole(ids))
    proposer = head.proposer(depth=depth)
    with torch.no_grad():
        anchors = torch.tensor(feed(proposer, ids, taps, counts)).unsqueeze(1)
        root = ids.gather(1, anchors).squeeze(1)
        batch = whole(ids)
        outputs = head.training_outputs(taps, ids, batch.position_BT, batch.document_BT, anchors, size=depth + 1)[:, 0]
        torch.testing.assert_close(proposer._block(root), outputs, atol=1e-5, rtol=1e-4)
        sampler = Sampler([SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.5, seed=2)], "cpu")
        noise = torch.randn(2, depth + 1, target.vocab_size)
        tree = proposer.propose(root, sampler, noise)
        scores = outputs @ target.lm_head.weight[head.draft_ids].t() / torch.tensor([1.0, 0.5]).view(2, 1, 1)  # type: ignore[index]
        want = head.draft_ids[(scores + noise[:, :depth][..., head.draft_ids]).argmax(-1)]
        assert tree.is_chain and torch.equal(tree.tokens_BN, torch.cat([root.unsqueeze(1), want], dim=1))


def test_a_tree_holds_the_likeliest_paths(target: Target) -> None:
    head, ids = make_head(target), random_ids(1, 20)
    taps = features(target, head, whole(ids))
    with torch.no_grad():
        head.norm.weight.mul_(4)  # so that some depths are much surer than others
    proposer = head.proposer(tree="dynamic", depth=3, topk=3, nodes=9)
    with torch.no_grad():
        feed(proposer, ids, taps, [[8]])
        tree = proposer.propose(ids[:, 8], Sampler([SamplingParams()], "cpu"), None)
        log_p = (proposer._block(ids[:, 8]) @ target.lm_head.weight[head.draft_ids].t()).log_softmax(-1)[0]  # type: ignore[index]
    tree.check_integrity()
    values, index = log_p.topk(3, dim=-1)
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(3):
        longer = {
            (*path, int(head.draft_ids[index[depth, k]])): value + float(values[depth, k])
            for path, value in paths.items()
            if len(path) == depth
            for k in range(3)
        }
        paths |= longer
    best = sorted((path for path in paths if path), key=lambda path: -paths[path])[:9]
    tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
    drafted: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, 10):
        drafted[node] = (*drafted[parents[node]], tokens[node])
    assert {path for node, path in drafted.items() if node} == set(best)


def plain_loss(head: DFlash, target: Target, batch: Batch, anchors: torch.Tensor, valid: torch.Tensor, decay: float) -> torch.Tensor:
    """The objective written out: every position of every block on its own, full tensors, per-sequence means."""
    step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    assert step.taps_BNF is not None
    outputs = head.training_outputs(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, anchors)
    judges = target.logits(step.hidden_BNH).float()
    rows = target.lm_head.weight[head.draft_ids]  # type: ignore[index]
    total, weights = torch.zeros(()), [decay**s for s in range(outputs.shape[2])]
    for s, weight in enumerate(weights):
        means = []
        for row, document in documents(batch):
            losses = []
            for a, anchor in enumerate(anchors[row].tolist()):
                between = range(anchor + 1, anchor + s + 2)
                if not valid[row, a] or batch.document_BT[row, anchor] != document or between[-1] >= batch.ids_BT.shape[1]:
                    continue
                if all(batch.loss_BT[row, t] and batch.document_BT[row, t] == batch.document_BT[row, anchor] for t in between):
                    judge = judges[row, anchor + s]
                    if head.t2d[judge.argmax()]:
                        losses.append(soft_cross_entropy(rows @ outputs[row, a, s], judge[head.draft_ids].softmax(-1)))
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
            value, metrics = DFlashObjective(step_decay=0.8, chunk_tokens=7, anchors=15)(head, head, target, batch)
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


def test_a_batch_without_a_token_to_learn_costs_nothing(target: Target) -> None:
    head, batch = make_head(target), ragged()
    batch.loss_BT[:] = False
    target.set_taps(head.taps)
    loss, _ = DFlashObjective(anchors=4)(head, head, target, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0 and not any(p.grad.any() for p in head.parameters() if p.grad is not None)


def test_anchors_are_drawn_from_tokens_before_one_to_learn() -> None:
    batch = ragged()
    wanted = [{*range(8, 14), *range(16, 23)}, {*range(7), *range(8, 16)}]  # the last of a document, and all of what is not learnt, is none
    seen: list[set[int]] = [set(), set()]
    for _ in range(40):
        anchors, valid = sample_anchors(batch, 6)
        assert valid.sum(1).tolist() == [6, 12]  # of one sequence, and of two
        for row in range(2):
            found = anchors[row, valid[row]]
            assert (found.diff() > 0).all()
            seen[row] |= set(found.tolist())
    assert seen == wanted
    anchors, valid = sample_anchors(batch, 1000)
    assert [set(anchors[row, valid[row]].tolist()) for row in range(2)] == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "dynamic"])
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, settings: dict[str, Any], temperature: float) -> None:
    check_lossless(target, make_head(target), settings, temperature)


def test_the_cache_stays_in_place(target: Target) -> None:
    check_in_place(target, make_head(target), CHAIN)


def test_a_text_that_was_learned_is_drafted_in_whole_blocks(target: Target) -> None:
    head = make_head(target, draft_vocab_size=97, noise=0.0, num_layers=1)
    prompt, params, text = over_fit(target, head, DFlashObjective(anchors=32, step_decay=1.0), steps=100, lr=6e-3)
    assert tau(target, head.proposer(depth=5), prompt, params, text) > 3.0
    assert tau(target, head.proposer(tree="dynamic", depth=5, topk=3, nodes=15), prompt, params, text) > 3.0


def test_folder_round_trip_and_refusals(target: Target, tmp_path: Path) -> None:
    head = make_head(target)
    check_folder(head, target, tmp_path)
    with pytest.raises(UserError, match=r"decode.depth: wanted 1 \.\. 5 \(drafter.block_size is 6\), got 6"):
        head.proposer(depth=6)
    for settings, message in (
        ({"taps": [1, 5]}, r"drafter.taps: wanted ascending layers in 0 \.\. 4"),
        ({"block_size": 1}, "drafter.block_size: wanted at least 2 positions, got 1"),
        ({"mask_token_id": 97}, r"drafter.mask_token_id: wanted 0 \.\. 96"),
        ({"num_layers": 0}, "drafter.num_layers: wanted at least 1, got 0"),
        ({"markov_rank": 4}, "drafter.markov_rank: wanted null"),
    ):
        with pytest.raises(UserError, match=message):
            new_head("dflash", target, settings)


def test_sizes_follow_the_target(target: Target) -> None:
    config = DFlashConfig.for_target(target)
    assert (config.taps, config.mask_token_id, config.num_layers, config.block_size) == ((1, 2, 3, 4), 0, 2, 8)
    assert spread_taps(36) == (2, 10, 18, 26, 34)  # the reference's [1, 9, 17, 25, 33], which are outputs counted from 0
    assert spread_taps(6) == (2, 3, 4) and mask_token(target) == 0
    names = set(make_head(target).state_dict())
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight", "layers.0.mlp.up_proj.weight"} < names
    assert not any("embed" in name or "lm_head" in name for name in names)
