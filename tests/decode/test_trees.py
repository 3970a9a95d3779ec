"""Static templates against their paths, and merged trees against the union of the paths of both."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.tree import DraftTree, relations
from draftsmith.decode.trees import StaticTree, likeliest_paths, merge_trees
from draftsmith.decode.verify import walk
from hypothesis import given, settings
from hypothesis import strategies as st

Path = tuple[int, ...]
Row = tuple[list[int], list[int], list[bool]]  # tokens, parents, valid

# EAGLE's published tree of 25 draft nodes (2401.15077), in the order in which its code lists them.
EAGLE = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1]]
EAGLE += [[0, 2, 0], [0, 2, 1], [1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]


def paths_of(tree: DraftTree, row: int) -> list[Path]:
    """The tokens from the root to each node that exists, root left out, in node order."""
    tokens, parents = tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()
    valid = [True] * len(tokens) if tree.valid_BN is None else tree.valid_BN[row].tolist()
    paths: list[Path | None] = [()]
    for node in range(1, len(tokens)):
        above = paths[parents[node]]
        paths.append((*above, tokens[node]) if valid[node] and above is not None else None)
    return [path for path in paths[1:] if path is not None]


@pytest.mark.parametrize("paths", [EAGLE, EAGLE[::-1], [[0], [0, 0], [0, 0, 0]]], ids=["eagle", "reversed", "chain"])
def test_a_static_tree_has_a_node_for_every_path(paths: list[list[int]]) -> None:
    template = StaticTree.from_paths(paths)
    candidates = torch.arange(2 * 5 * 4).view(2, 5, 4) + 100  # every (row, depth, rank) its own token
    tree = template.fill_by_depth(torch.tensor([1, 2]), candidates)
    tree.check_integrity()
    assert (template.num_nodes, template.topk) == (len(paths) + 1, max(map(max, paths)) + 1)
    assert tree.is_chain == (len(paths) == 3) and tree.tokens_BN[:, 0].tolist() == [1, 2]
    for row in range(2):
        want = {tuple(int(candidates[row, depth, rank]) for depth, rank in enumerate(path)) for path in paths}
        assert set(paths_of(tree, row)) == want and len(want) == len(paths)
    for depth, level in enumerate(template.levels, 1):
        assert (template.depth_N[level] == depth).all()
    assert sum(level.stop - level.start for level in template.levels) == len(paths)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "wanted distinct paths"),
        ([[0], []], "wanted distinct paths"),
        ([[0], [0]], "wanted distinct paths"),
        ([[0], [-1]], "ranks >= 0"),
        ([[0], [1, 0]], r"got \[1, 0\] without \[1\]"),
    ],
)
def test_bad_paths_are_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StaticTree.from_paths(paths)


@given(st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_the_likeliest_paths_are_the_best_of_all(acceptance: list[list[float]], data: st.DataObject) -> None:
    everything = [
        prod(acceptance[depth][rank] for depth, rank in enumerate(path))
        for length in range(1, len(acceptance) + 1)
        for path in product(*(range(len(level)) for level in acceptance[:length]))
    ]
    nodes = data.draw(st.integers(1, len(everything)))
    paths = likeliest_paths(acceptance, nodes)
    StaticTree.from_paths(paths)
    got = sum(prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in paths)
    assert got == pytest.approx(sum(sorted(everything, reverse=True)[:nodes]))
    with pytest.raises(UserError, match=f"wanted 1 .. {len(everything)} nodes"):
        likeliest_paths(acceptance, len(everything) + 1)


@st.composite
def rows(draw: st.DrawFn, nodes: int) -> Row:
    """A tree over a vocabulary of 3, so that duplicate siblings and common paths are frequent."""
    parents = [0, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]
    return [0, *(draw(st.integers(0, 2)) for _ in range(1, nodes))], parents, [True, *(draw(st.integers(0, 4)) > 0 for _ in range(1, nodes))]


@st.composite
def batches(draw: st.DrawFn) -> DraftTree:
    nodes = draw(st.integers(1, 8))
    batch = [draw(rows(nodes)) for _ in range(2)]
    tokens, parents, valid = (torch.tensor([row[i] for row in batch]) for i in range(3))
    depth = int(relations(parents, nodes)[0].max())  # tight, as proposers give it
    return DraftTree.from_parents(tokens, parents, depth, valid if draw(st.booleans()) else None)


@settings(max_examples=150)
@given(batches(), batches(), st.integers(1, 18), st.integers(0, 999))
def test_a_merged_tree_is_the_union_up_to_the_budget(first: DraftTree, second: DraftTree, nodes: int, seed: int) -> None:
    tree = merge_trees(first, second, nodes)
    tree.check_integrity()
    assert tree.num_nodes == nodes + 1 and torch.equal(tree.tokens_BN[:, 0], first.tokens_BN[:, 0])
    for row in range(2):
        union = list(dict.fromkeys([*paths_of(first, row), *paths_of(second, row)]))  # in order of first appearance
        assert paths_of(tree, row) == union[:nodes]
        assert tree.valid_BN is not None and int(tree.valid_BN[row].sum()) == 1 + min(nodes, len(union))
    if nodes >= first.num_nodes + second.num_nodes - 2:  # with room for all, the walk takes the better of both
        choices = [torch.tensor([[hash((seed, row, path)) % 3 for path in node_paths(t, row)] for row in range(2)]) for t in (first, second, tree)]
        verdicts = [walk(t, choice) for t, choice in zip((first, second, tree), choices, strict=True)]
        assert torch.equal(verdicts[2].accepted_B, torch.maximum(verdicts[0].accepted_B, verdicts[1].accepted_B))


def node_paths(tree: DraftTree, row: int) -> list[Path]:
    """The tokens from the root to each node, whether it exists or not."""
    paths: list[Path] = [()]
    for token, parent in zip(tree.tokens_BN[row, 1:].tolist(), tree.parents_BN[row, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def test_merging_two_chains_by_hand() -> None:
    first = DraftTree.chain(torch.tensor([[9, 1, 2, 3]]))
    second = DraftTree.chain(torch.tensor([[9, 1, 2, 4, 5]]), torch.tensor([[True, True, True, True, False]]))
    tree = merge_trees(first, second, 5)
    assert tree.tokens_BN.tolist() == [[9, 1, 2, 3, 4, 0]] and tree.parents_BN.tolist() == [[0, 0, 1, 2, 2, 0]]
    assert tree.valid_BN is not None and tree.valid_BN.tolist() == [[True] * 5 + [False]] and tree.max_depth == 4 and not tree.is_chain
