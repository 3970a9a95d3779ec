"""Static trees grown level by level: every node is the candidate of its rank after its own path, and decoding stays token-identical."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.decode.trees import Follower, StaticTree
from draftsmith.eval.drafting import make_proposer
from draftsmith.eval.trace import trace
from draftsmith.heads.registry import new_head, open_drafter
from draftsmith.heads.standalone import Standalone
from draftsmith.recipes.schema import Decode

from ..heads.tiny import tiny_target

PATHS = [[0], [1], [2], [0, 0], [0, 3], [2, 0], [2, 1], [0, 0, 0], [2, 1, 0], [2, 1, 2], [2, 1, 2, 0]]
PROMPT = [5, 9, 33, 2, 71, 8]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def test_the_plan_of_a_shape() -> None:
    shape = StaticTree.from_paths(PATHS)
    assert shape.width == 2 and shape.topk == 4
    assert shape.plan() == [
        ([0, 0, 0], [0, 1, 2], [0, 2]),  # the root's children; the first and the third have some of their own
        ([0, 0, 1, 1], [0, 3, 0, 1], [0, 3]),
        ([0, 1, 1], [0, 0, 2], [2]),
        ([0], [0], []),
    ]


def test_each_node_is_the_candidate_of_its_rank_after_its_path(target: Target) -> None:
    draft = tiny_target(seed=1)
    proposer = make_proposer(Standalone(draft).bind(target), Decode(tree="static", paths=PATHS), target, PROMPT)
    assert isinstance(proposer, Follower) and proposer.num_nodes == len(PATHS) + 1 and proposer.max_depth == 4
    new, rounds = trace(target, proposer, PROMPT, SamplingParams(), 12)
    text, judged = [*PROMPT, new[0]], 0
    for entry in rounds:
        nodes = sorted({tuple(path) for path in PATHS}, key=lambda path: (len(path), path))
        spelled = {(): 0} | {path: number for number, path in enumerate(nodes, 1)}
        for path, number in spelled.items():
            if path:
                assert entry.parents[number] == spelled[path[:-1]]
                prefix = [entry.tokens[spelled[path[:depth]]] for depth in range(1, len(path))]
                logits = draft.model(input_ids=torch.tensor([[*text, *prefix]])).logits[0, -1]
                assert entry.tokens[number] == int(logits.topk(path[-1] + 1).indices[-1])
                judged += 1
        text += entry.emitted
    assert judged == len(rounds) * len(PATHS) and len(rounds) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eagle3", "medusa", "hydra", "dflash", "dspark"])
def test_decoding_with_a_static_tree_is_token_identical(target: Target, method: str, temperature: float) -> None:
    torch.manual_seed(0)
    head = new_head(method, target, {})
    prompts = [PROMPT, [7], [12, 40, 3, 3]]
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(3)]
    proposer = make_proposer(head, Decode(tree="static", paths=PATHS), target, PROMPT)
    out = Engine(target, proposer).generate(prompts, params, 20)
    assert out.tokens == Engine(target).generate(prompts, params, 20).tokens
    assert {entry.proposed for rounds in out.rounds for entry in rounds} == {len(PATHS)}


def test_shapes_that_do_not_fit_are_refused(target: Target) -> None:
    draft = Standalone(tiny_target(seed=1)).bind(target)
    drafts: list[tuple[dict[str, Any], list[list[int]], str]] = [
        ({"tree": "dynamic", "depth": 2, "topk": 2, "nodes": 4}, [[0], [0, 0], [0, 0, 0]], "a tree of depth 2 at most"),
        ({"tree": "dynamic", "depth": 2, "topk": 2, "nodes": 4}, [[0], [1], [2]], "with 2 children a node"),
        ({"tree": "chain", "depth": 2}, [[0]], "wanted a proposer of dynamic trees"),
    ]
    for settings, paths, says in drafts:
        with pytest.raises(UserError, match=says):
            draft.proposer(**settings).follow(StaticTree.from_paths(paths))
    with pytest.raises(UserError, match="cannot follow a static tree"):
        make_proposer(open_drafter("prompt_lookup", target)[0], Decode(tree="static", paths=[[0]]), target, PROMPT)
    recipes: list[tuple[dict[str, Any], str]] = [
        ({"tree": "static"}, "decode.paths: wanted a list of paths with decode.tree static"),
        ({"paths": [[0]]}, "decode.paths: wanted a list of paths with decode.tree static, else null"),
        ({"tree": "static", "paths": [[0, 1]]}, r"the parent of every path, got \[0, 1\]; add \[0\]"),
        ({"tree": "static", "paths": [[0], [0]]}, "all different"),
    ]
    for settings, says in recipes:
        with pytest.raises(UserError, match=says):
            Decode(**settings)
