"""Temperatures of a draft's confidence: the trees that they give are those of the formula, what is generated stays the same."""

from __future__ import annotations

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.calibration import Temperatures
from draftsmith.decode.engine import Engine
from draftsmith.decode.length import Confidence
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.registry import new_head
from draftsmith.heads.standalone import Standalone

from ..eval.tiny import tiny

MIXED = [SamplingParams(), SamplingParams(temperature=0.8, seed=3)]


def test_log_probabilities_are_those_of_divided_scores_by_depth_and_by_row() -> None:
    torch.manual_seed(0)
    scores_BKV = torch.randn(2, 3, 11, dtype=torch.float64)
    sampler = Sampler(MIXED, "cpu")
    known = Temperatures(greedy=(0.5, 0.25), sampled=(2.0,))
    for level, wanted in enumerate(((0.5, 2.0), (0.25, 2.0), (0.25, 2.0))):  # the last one holds for all that are deeper
        found = known.log_p(scores_BKV, sampler, level)
        for row, t in enumerate(wanted):
            assert torch.allclose(found[row], (scores_BKV[row] / t).log_softmax(-1), rtol=1e-6)
        assert torch.equal(known.log_p_by_depth(scores_BKV, sampler)[:, level], known.log_p(scores_BKV[:, level], sampler, level))
    assert torch.equal(known.log_p(scores_BKV, Sampler([MIXED[0]] * 2, "cpu"), 0), (scores_BKV / 0.5).log_softmax(-1))
    assert torch.equal(Temperatures().log_p(scores_BKV, sampler, 0), scores_BKV.log_softmax(-1))
    with pytest.raises(UserError, match="wanted finite numbers > 0"):
        Temperatures((0.0,))


def drafts(target: Target, proposer: object, prompt: list[int]) -> list[set[tuple[int, ...]]]:
    """The paths of tokens of every tree."""
    own, found = proposer.propose, []  # type: ignore[attr-defined]

    def propose(*args: object) -> object:
        tree = own(*args)
        tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tokens)):
            paths.append((*paths[parents[node]], tokens[node]))
        found.append(set(paths))
        return tree

    proposer.propose = propose  # type: ignore[attr-defined]
    Engine(target, proposer, overlap=False).generate([prompt], SamplingParams(), 6)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("method", ["draft_model", "medusa", "dflash"])
def test_trees_follow_the_formula_and_the_output_does_not_change(method: str) -> None:
    """Medusa's scores stay the same, so that its best paths can be listed; the others are compared with themselves."""
    target = tiny()
    torch.manual_seed(2)
    drafter = Standalone(tiny(1)).bind(target) if method == "draft_model" else new_head(method, target, {}).double()
    prompts = [[5, 9, 33], [7, 80, 12, 4]]
    plain = Engine(target).generate(prompts, MIXED, 12).tokens
    shapes = {}
    for sharp in (Temperatures(), Temperatures((0.05,), (0.05,)), Temperatures((20.0,), (20.0,))):
        proposer = drafter.proposer(tree="dynamic", depth=3, topk=4, nodes=6)
        proposer.temperatures = sharp  # type: ignore[attr-defined]
        assert Engine(target, proposer).generate(prompts, MIXED, 12).tokens == plain
        trees = drafts(target, proposer, prompts[0])
        shapes[sharp.greedy] = sum(max(map(len, tree)) for tree in trees) / len(trees)
        if method == "medusa":
            engine = drafter.proposer(tree="dynamic", depth=3, topk=4, nodes=6)
            Engine(target, engine, overlap=False).generate([prompts[0]], SamplingParams(), 1)
            t = sharp.greedy[0] if sharp.greedy else 1.0
            log_p_DV = (drafter.logits(engine._hidden_BH, 3)[0] / t).log_softmax(-1)  # type: ignore[union-attr, operator, attr-defined]
            ids = drafter.draft_ids.tolist()  # type: ignore[union-attr]
            best = [[(float(v), ids[int(i)]) for v, i in zip(*log_p_DV[d].detach().topk(4), strict=True)] for d in range(3)]
            paths: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
            for d in range(3):
                paths += [((*p, token), v + w) for p, v in paths if len(p) == d for w, token in best[d]]
            wanted = {p for p, _ in sorted(paths, key=lambda pair: -pair[1])[:7]}
            assert trees[0] == wanted
    assert shapes[0.05,] > shapes[20.0,]  # who is sure of itself drafts deep, who is not drafts wide


def test_policies_compare_the_calibrated_confidence() -> None:
    target = tiny()
    lengths = {}
    for t in (0.02, 10.0):
        proposer = Standalone(tiny(1)).bind(target).proposer(tree="chain", depth=5)
        proposer.length = Confidence(0.5)
        proposer.temperatures = Temperatures((t,))
        rounds = Engine(target, proposer).generate([[5, 9, 33]], SamplingParams(), 20).rounds[0]
        lengths[t] = sum(r.proposed for r in rounds) / len(rounds)
    assert lengths[0.02] > lengths[10.0] == 1
