"""Medusa on a tiny target: training pass against drafting, objective against its formula, trees of all kinds, over-fit, folders."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.decode.trees import likeliest_paths
from draftsmith.heads.medusa import Medusa, StaticMedusaProposer, rank_acceptance
from draftsmith.heads.registry import new_head
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.medusa import MedusaObjective

from .stepwise import (
    CHAIN,
    TREE,
    acquainted,
    check_lossless,
    check_objective,
    check_refusals,
    greedy,
    learnt,
    make,
    observed,
    tau,
)
from .tiny import VOCAB, check_folder, features, random_ids, tiny_target, whole

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def known(target: Target) -> Medusa:
    head = acquainted("medusa", target, MedusaObjective())
    assert isinstance(head, Medusa)
    return head


def medusa(target: Target, **settings: int) -> Medusa:
    head = make("medusa", target, **settings)
    assert isinstance(head, Medusa)
    return head


def plain_outputs(head: Medusa, taps: torch.Tensor) -> list[torch.Tensor]:
    """The paper's formula with the parameters named."""
    parameters, outputs = dict(head.named_parameters()), []
    for k in range(head.heads):
        x = taps
        for layer in range(head.config.num_layers):
            z = x @ parameters[f"blocks.{k}.layers.{layer}.linear.weight"].t() + parameters[f"blocks.{k}.layers.{layer}.linear.bias"]
            x = x + z * torch.sigmoid(z)
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_the_objective_equals_the_formula_in_value_and_gradient(target: Target, labels: str) -> None:
    head = medusa(target, num_layers=2)

    def outputs(taps: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        return plain_outputs(head, taps)

    check_objective(head, outputs, target, MedusaObjective(labels=labels, chunk_tokens=5))  # type: ignore[arg-type]


def test_a_round_drafts_what_the_training_pass_predicts_after_the_root(target: Target) -> None:
    """Head k, trained at position t to predict token t + 2 + k, drafts depth k + 1 when t is the last accepted token and t + 1 the root."""
    head, ids = medusa(target), random_ids(1, 20)
    taps = features(target, head, whole(ids))
    outputs = head.training_outputs(taps, ids, torch.arange(20)[None], torch.zeros_like(ids))
    for pieces in ([1], [9], [9, 1, 3]):
        t = sum(pieces) - 1
        proposer = head.proposer()
        observed(proposer, ids, taps, pieces)
        tree = proposer.propose(ids[:, t + 1], greedy(), None)
        want = [int(head.draft_ids[level.argmax()]) for level in log_p(head, outputs, t)]
        assert tree.is_chain and tree.tokens_BN[0].tolist() == [int(ids[0, t + 1]), *want]
        noise = 3 * torch.randn(1, 5, target.vocab_size, generator=torch.Generator().manual_seed(t))
        tree = proposer.propose(ids[:, t + 1], Sampler([SamplingParams(temperature=1.0)], "cpu"), noise)
        scores = [level + noise[0, k, head.draft_ids] for k, level in enumerate(log_p(head, outputs, t))]
        assert tree.tokens_BN[0, 1:].tolist() == [int(head.draft_ids[level.argmax()]) for level in scores]
        grower = head.proposer(**TREE)
        observed(grower, ids, taps, pieces)
        drafted = grower.propose(ids[:, t + 1], greedy(), None)
        drafted.check_integrity()
        ranked = [[(float(v), int(head.draft_ids[i])) for v, i in zip(*level.topk(3), strict=True)] for level in log_p(head, outputs, t)[:3]]
        scored = [(sum(v for v, _ in path), [i for _, i in path]) for depth in (1, 2, 3) for path in itertools.product(*ranked[:depth])]
        best = sorted(path for _, path in sorted(scored, reverse=True)[:12])
        paths: list[list[int]] = [[]]
        for node in range(1, 13):
            paths.append([*paths[int(drafted.parents_BN[0, node])], int(drafted.tokens_BN[0, node])])
        assert sorted(paths[1:]) == best


def log_p(head: Medusa, outputs: list[torch.Tensor], t: int) -> list[torch.Tensor]:
    """Each head's log-probabilities after position t of the only row."""
    return [head.lm_head(k)(outputs[k][0, t]).detach().log_softmax(-1) for k in range(head.heads)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain", "dynamic", "static"])
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, known: Medusa, shape: str, temperature: float) -> None:
    settings = CHAIN if shape == "chain" else TREE
    check_lossless(target, lambda: StaticMedusaProposer(known, PATHS) if shape == "static" else known.proposer(**settings), temperature)


def test_an_untrained_head_starts_as_the_target_itself(target: Target) -> None:
    head = new_head("medusa", target, {})
    head.set_draft_vocabulary(torch.arange(target.vocab_size), target)
    ids = random_ids(1, 12)
    assert isinstance(head, Medusa)
    taps = features(target, head, whole(ids))
    for k in range(4):
        torch.testing.assert_close(head.logits(taps, 4)[:, :, k], target.logits(taps))


def test_over_fitted_heads_draft_nearly_all(target: Target) -> None:
    head, prompt, text = learnt("medusa", target, MedusaObjective(labels="hard"), steps=100, num_layers=2)
    assert isinstance(head, Medusa)
    assert tau(target, head.proposer(), prompt, text) > 4  # of 5
    assert tau(target, head.proposer(tree="dynamic", nodes=8), prompt, text) > 4
    # What the text's own ranks say: nearly always the first.
    ids = torch.tensor([prompt + text])
    acceptance = rank_acceptance(head, target, ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids), 3)
    assert min(level[0] for level in acceptance) > 0.8 and max(level[1] for level in acceptance) < 0.2
    paths = likeliest_paths(acceptance, 8)
    assert paths[:4] == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert tau(target, StaticMedusaProposer(head, paths), prompt, text) > 4
    with torch.no_grad():  # a head that predicts one token too early would be accepted hardly ever
        for k in range(3, 0, -1):
            head.blocks[k].load_state_dict(head.blocks[k - 1].state_dict())
            head.lm_heads[k].load_state_dict(head.lm_heads[k - 1].state_dict())
    assert tau(target, head.proposer(), prompt, text) < 3


def test_rank_acceptance_counts_the_texts_tokens(target: Target) -> None:
    head = medusa(target)
    ids = random_ids(2, 15)
    loss, document = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    loss[0, :6] = False
    document[1, 7:] = 1
    document[1, 12:] = -1
    outputs = plain_outputs(head, target.features(ids, torch.arange(15).expand(2, 15), document).hidden_BNH)
    acceptance = rank_acceptance(head, target, ids, loss, document, 20)
    for k in range(4):
        hits, total = torch.zeros(20), 0
        for row in range(2):
            for t in range(15 - 2 - k):
                if loss[row, t + 2 + k] and document[row, t] == document[row, t + 2 + k] >= 0:
                    ranked = head.draft_ids[(head.lm_head(k)(outputs[k][row, t])).argsort(descending=True)][:20]
                    hits += ranked == ids[row, t + 2 + k]
                    total += 1
        torch.testing.assert_close(torch.tensor(acceptance[k]), (hits + 1) / (total + 1))


def test_folder_round_trip(target: Target, tmp_path: Path) -> None:
    check_folder(medusa(target, num_layers=2), target, tmp_path / "d")


def test_wrong_input_is_refused(target: Target) -> None:
    check_refusals("medusa", target)
    head = medusa(target)
    with pytest.raises(UserError, match=r"decode\.nodes: wanted 1 \.\. 6 for depth 2 and topk 2, got 7"):
        head.proposer(tree="dynamic", depth=2, topk=2, nodes=7)
    with pytest.raises(UserError, match=rf"decode\.topk: wanted 1 \.\. {VOCAB} .*got {VOCAB + 1}"):
        head.proposer(tree="dynamic", topk=VOCAB + 1)
    with pytest.raises(UserError, match=r"decode\.depth: wanted 1 \.\. 4"):
        StaticMedusaProposer(head, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)])
