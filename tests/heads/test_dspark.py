"""DSpark: its passes against blocks written out, drafts against the bias written out, the objective, the confidence, losslessness, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.dspark import DSpark
from draftsmith.heads.registry import new_head
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.dflash import sample_anchors
from draftsmith.train.objectives.dspark import DSparkObjective

from .parallel import (
    CHAIN,
    TREE,
    check_in_place,
    check_lossless,
    feed,
    make,
    over_fit,
    tau,
)
from .test_dflash import block_alone
from .tiny import check_folder, documents, features, ragged, random_ids, tiny_target, whole


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def make_head(target: Target, seed: int = 0, **settings: Any) -> DSpark:
    head = make("dspark", target, seed=seed, **{"markov_rank": 5, **settings})
    assert isinstance(head, DSpark)
    with torch.no_grad():
        head.markov_head.markov_w2.weight.normal_()  # a bias that matters
    return head


def plain_logits(head: DSpark, target: Target, hidden: torch.Tensor, before: int) -> torch.Tensor:
    """[V] of one position: output rows, and W2 W1 of the token before."""
    rows = target.lm_head.weight[head.draft_ids]  # type: ignore[index]
    return rows @ hidden + head.markov_head.markov_w2.weight @ head.markov_head.markov_w1.weight[before]


def plain_confidence(head: DSpark, hidden: torch.Tensor, before: int) -> torch.Tensor:
    proj = head.confidence_head.proj
    return proj.weight[0] @ torch.cat([hidden, head.markov_head.markov_w1.weight[before]]) + proj.bias[0]


@pytest.mark.parametrize("counts", [[[7, 7], [3, 3]], [[7, 2], [3, 1], [1, 4]]], ids=["even", "ragged"])
def test_chains_follow_the_training_pass_and_the_bias(target: Target, counts: list[list[int]]) -> None:
    head, ids = make_head(target), random_ids(2, 20)
    taps = features(target, head, whole(ids))
    proposer = head.proposer(depth=6)  # all positions predict, the anchor's too
    with torch.no_grad():
        ends = feed(proposer, ids, taps, counts)
        batch, anchors = whole(ids), torch.tensor(ends).unsqueeze(1)
        outputs = head.training_outputs(taps, ids, batch.position_BT, batch.document_BT, anchors)[:, 0]
        noise = torch.randn(2, 7, target.vocab_size)
        temperatures = (1.0, 0.5)
        sampler = Sampler([SamplingParams(temperature=t, seed=1) for t in temperatures], "cpu")
        tree = proposer.propose(ids.gather(1, anchors).squeeze(1), sampler, noise)
        confidence = proposer.confidence()
        for row in range(2):
            alone = block_alone(head, target, taps[row, : ends[row]], int(ids[row, ends[row]]), ends[row], 6)
            torch.testing.assert_close(outputs[row], alone, atol=2e-5, rtol=1e-4)
            before = int(ids[row, ends[row]])
            for k in range(6):
                expected = plain_confidence(head, outputs[row, k], before).sigmoid()
                torch.testing.assert_close(confidence[row, k], expected, atol=1e-5, rtol=1e-4)
                scores = plain_logits(head, target, outputs[row, k], before) / temperatures[row] + noise[row, k, head.draft_ids]
                before = int(head.draft_ids[scores.argmax()])
                assert before == int(tree.tokens_BN[row, k + 1])


def test_trees_hold_what_the_bias_makes_likely(target: Target) -> None:
    """The beam written out: the best 3 of each depth get 3 children, and of all candidates the 10 likeliest are kept."""
    head, ids = make_head(target), random_ids(1, 20)
    taps = features(target, head, whole(ids))
    proposer = head.proposer(tree="dynamic", depth=4, topk=3, nodes=10)
    with torch.no_grad():
        feed(proposer, ids, taps, [[8]])
        tree = proposer.propose(ids[:, 8], Sampler([SamplingParams()], "cpu"), None)
        hidden = head.training_outputs(taps, ids, whole(ids).position_BT, torch.zeros_like(ids), torch.tensor([[8]]), size=4)[0, 0]
        values: dict[tuple[int, ...], float] = {}
        level: dict[tuple[int, ...], float] = {(): 0.0}
        for depth in range(4):
            candidates: dict[tuple[int, ...], float] = {}
            for path, value in level.items():
                log_p = plain_logits(head, target, hidden[depth], path[-1] if path else int(ids[0, 8])).log_softmax(-1)
                best, index = log_p.topk(3)
                candidates |= {(*path, int(head.draft_ids[i])): value + float(b) for b, i in zip(best, index, strict=True)}
            values |= candidates
            level = dict(sorted(candidates.items(), key=lambda item: -item[1])[:3])
    tree.check_integrity()
    tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
    drafted: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, 11):
        drafted[node] = (*drafted[parents[node]], tokens[node])
    assert set(drafted.values()) - {()} == set(sorted(values, key=lambda path: -values[path])[:10])
    with pytest.raises(ValueError, match="confidence is of chains"):
        proposer.confidence()


def test_sampled_drafts_say_what_they_were_drawn_from(target: Target) -> None:
    head, ids = make_head(target), random_ids(1, 20)
    taps = features(target, head, whole(ids))
    proposer = head.proposer(tree="dynamic", depth=3, topk=2, kind="iid")
    with torch.no_grad():
        feed(proposer, ids, taps, [[8]])
        tree = proposer.propose(ids[:, 8], Sampler([SamplingParams(temperature=1.0, seed=4)], "cpu"), None)
        hidden = head.training_outputs(taps, ids, whole(ids).position_BT, torch.zeros_like(ids), torch.tensor([[8]]), size=3)[0, 0]
        assert tree.q_BNV is not None and tree.kind == "iid" and tree.num_nodes == 7
        for node in range(5):  # those of depth 3 have no children
            q = torch.zeros(target.vocab_size)
            q[head.draft_ids] = plain_logits(head, target, hidden[int(tree.depth_BN[0, node])], int(tree.tokens_BN[0, node])).softmax(-1)
            torch.testing.assert_close(tree.q_BNV[0, node], q, atol=1e-5, rtol=1e-4)


def plain_loss(head: DSpark, target: Target, batch: Batch, anchors: torch.Tensor, valid: torch.Tensor, decay: float) -> torch.Tensor:
    """The objective written out: every position of every block on its own, full tensors, per-sequence means."""
    step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    assert step.taps_BNF is not None
    outputs = head.training_outputs(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, anchors)
    judges = target.logits(step.hidden_BNH).float()
    total, weights = torch.zeros(()), [decay**s for s in range(outputs.shape[2])]
    for s, weight in enumerate(weights):
        means: dict[str, list[torch.Tensor]] = {"draft": [], "confidence": []}
        for row, document in documents(batch):
            losses: dict[str, list[torch.Tensor]] = {"draft": [], "confidence": []}
            for a, anchor in enumerate(anchors[row].tolist()):
                between = range(anchor + 1, anchor + s + 2)
                if not valid[row, a] or batch.document_BT[row, anchor] != document or between[-1] >= batch.ids_BT.shape[1]:
                    continue
                if all(batch.loss_BT[row, t] and batch.document_BT[row, t] == batch.document_BT[row, anchor] for t in between):
                    hidden, before, judge = outputs[row, a, s], int(batch.ids_BT[row, anchor + s]), judges[row, anchor + s]
                    q = plain_logits(head, target, hidden, before).softmax(-1)
                    p = judge[head.draft_ids].softmax(-1)
                    if head.t2d[judge.argmax()]:
                        losses["draft"].append(-0.1 * (p * q.log()).sum() + 0.9 * (p - q).abs().sum() / 2)
                    accepted = torch.minimum(judge.softmax(-1)[head.draft_ids], q).sum().detach()
                    c = plain_confidence(head, hidden, before).sigmoid()
                    losses["confidence"].append(-accepted * c.log() - (1 - accepted) * (1 - c).log())
            for name, values in losses.items():
                if values:
                    means[name].append(torch.stack(values).mean())
        for values in means.values():
            if values:
                total = total + weight * torch.stack(values).mean()
    return total / sum(weights)


def test_the_objective_equals_the_formula_in_value_and_gradient(target: Target) -> None:
    batch, values, grads = ragged(), [], []
    for chunked in (True, False):
        head = make_head(target)
        target.set_taps(head.taps)
        torch.manual_seed(7)
        if chunked:
            value, metrics = DSparkObjective(step_decay=0.8, chunk_tokens=7, anchors=15)(head, head, target, batch)
            assert all(0 <= metrics[name] <= 1 for name in ("accuracy_0", "overlap", "confidence"))
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
@pytest.mark.parametrize("settings", [CHAIN, TREE, {**CHAIN, "min_confidence": 0.3}], ids=["chain", "dynamic", "confident"])
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, settings: dict[str, Any], temperature: float) -> None:
    check_lossless(target, make_head(target), settings, temperature)


def test_chains_end_where_confidence_falls(target: Target) -> None:
    head, ids = make_head(target), random_ids(2, 20)
    taps = features(target, head, whole(ids))
    sampler = Sampler([SamplingParams()] * 2, "cpu")

    def chain(least: float | None) -> tuple[Any, torch.Tensor]:
        proposer = head.proposer(depth=6, min_confidence=least)
        assert proposer.asynchronous == (least is None)
        ends = feed(proposer, ids, taps, [[7, 4]])
        return proposer.propose(ids.gather(1, torch.tensor(ends).unsqueeze(1)).squeeze(1), sampler, None), proposer.confidence()

    with torch.no_grad():
        whole_chain, confidence = chain(None)
        path = confidence.cumprod(1)
        for least in (0.0, float(path[0, 2]) - 1e-6, float(path[0, 2]) + 1e-6, 1.0):
            tree, _ = chain(least)
            lengths = [max(1, int((path[row] >= least).sum())) for row in range(2)]
            assert tree.num_nodes == 1 + max(lengths) and tree.valid_BN.sum(1).tolist() == [1 + n for n in lengths]
            assert torch.equal(tree.tokens_BN, whole_chain.tokens_BN[:, : tree.num_nodes])
    assert head.proposer(depth=6, min_confidence=0.0).num_nodes == 7


def test_the_cache_stays_in_place(target: Target) -> None:
    check_in_place(target, make_head(target), CHAIN)


def test_a_text_that_was_learned_is_drafted_and_the_confidence_is_right(target: Target) -> None:
    head = make("dspark", target, draft_vocab_size=97, noise=0.0, num_layers=1, markov_rank=8)
    assert isinstance(head, DSpark)
    objective = DSparkObjective(anchors=32, step_decay=1.0)
    prompt, params, text = over_fit(target, head, objective, steps=120, lr=6e-3)
    assert tau(target, head.proposer(depth=6), prompt, params, text) > 3.0
    assert tau(target, head.proposer(tree="dynamic", depth=6, topk=3, nodes=16), prompt, params, text) > 3.0
    target.set_taps(head.taps)
    _, metrics = objective(head, head, target, whole(torch.tensor([prompt + text])))
    assert metrics["overlap"] > 0.5 and abs(metrics["overlap"] - metrics["confidence"]) < 0.05


def test_folder_round_trip_and_refusals(target: Target, tmp_path: Path) -> None:
    head = make_head(target)
    check_folder(head, target, tmp_path)
    with pytest.raises(UserError, match=r"decode.depth: wanted 1 \.\. 6 \(drafter.block_size is 6\), got 7"):
        head.proposer(depth=7)
    with pytest.raises(UserError, match="min_confidence: wanted a probability, got 2"):
        head.proposer(depth=2, min_confidence=2.0)
    sampled: dict[str, Any] = {"kind": "iid"}
    for more in (TREE, CHAIN | sampled):
        with pytest.raises(UserError, match="min_confidence: wanted a chain that is not sampled"):
            head.proposer(**more, min_confidence=0.5)
    with pytest.raises(UserError, match="wanted at least 1, got 0; for none use the method dflash"):
        new_head("dspark", target, {"markov_rank": 0})


def test_a_new_head_has_no_bias_and_the_published_names(target: Target) -> None:
    head = make("dspark", target, noise=0.0)
    assert isinstance(head, DSpark)
    state = head.state_dict()
    assert state["markov_head.markov_w1.weight"].shape == (97, 256) and not state["markov_head.markov_w2.weight"].any()
    assert state["confidence_head.proj.weight"].shape == (1, 32 + 256) and state["confidence_head.proj.bias"].shape == (1,)
