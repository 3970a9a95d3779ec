"""Random trees: relations, the walk against a plain recursive one, and compaction."""

from __future__ import annotations

from itertools import pairwise

import torch
from draftsmith.decode.cache import TreeCache
from draftsmith.decode.tree import DraftTree
from draftsmith.decode.verify import walk
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[bool]]:
    """(tokens, parents, choices, valid) over a vocabulary of 3, so that duplicate siblings are common."""
    nodes = draw(st.integers(1, 14))
    parents = [0, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]
    tokens = [draw(st.integers(0, 2)) for _ in range(nodes)]
    # A choice depends on the tokens so far and on nothing else, as a model's does: duplicate siblings agree.
    seed = draw(st.integers(0, 999))
    paths: list[tuple[int, ...]] = [(tokens[0],)]
    for node in range(1, nodes):
        paths.append((*paths[parents[node]], tokens[node]))
    choices = [hash((seed, path)) % 3 for path in paths]
    return tokens, parents, choices, [True, *(draw(st.integers(0, 4)) > 0 for _ in range(nodes - 1))]


def longest(node: int, tokens: list[int], parents: list[int], choices: list[int], valid: list[bool]) -> list[int]:
    """The tokens accepted below `node`, then the choice that ends the walk: the definition, recursively."""
    best = [choices[node]]
    for child in range(1, len(tokens)):
        if parents[child] == node and valid[child] and tokens[child] == choices[node]:
            found = [tokens[child], *longest(child, tokens, parents, choices, valid)]
            best = found if len(found) > len(best) else best
    return best


@settings(max_examples=1000)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_walk_equals_the_recursive_definition(rows: list[tuple[list[int], list[int], list[int], list[bool]]]) -> None:
    nodes = max(len(row[0]) for row in rows)
    padded = [
        (t + [0] * (nodes - len(t)), p + [0] * (nodes - len(p)), c + [0] * (nodes - len(c)), v + [False] * (nodes - len(v))) for t, p, c, v in rows
    ]
    tokens, parents, choices, valid = (torch.tensor([row[i] for row in padded]) for i in range(4))
    tree = DraftTree.from_parents(tokens, parents, nodes, valid)
    tree.check_integrity()
    verdict = walk(tree, choices)
    for row, (t, p, c, v) in enumerate(rows):
        accepted = int(verdict.accepted_B[row])
        path = verdict.path_BP[row, : accepted + 1].tolist()
        assert path[0] == 0 and all(p[b] == a for a, b in pairwise(path))
        got = [t[node] for node in path[1:]] + [int(verdict.next_B[row])]
        want = longest(0, t, p, c, v)
        assert got == want  # among duplicate siblings the paths may differ, the tokens do not


def test_moving_a_path_reads_before_it_writes() -> None:
    cache = TreeCache(2, 2, 12)
    states = torch.arange(2 * 3 * 8 * 4, dtype=torch.float32).view(2, 3, 8, 4)
    slots = torch.arange(8).expand(2, 8)
    for layer in range(2):
        cache.place(slots, 8, 0)
        cache.update(states + layer, -states - layer, layer)
    cache.move(torch.tensor([[3, 4, 6], [2, 3, 7]]), torch.tensor([[3, 5, 6], [3, 4, 5]]))
    cache.place(torch.tensor([[8], [9]]), 10, None)
    keys, values = cache.update(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4), 1)
    assert torch.equal(keys[0, :, 5], states[0, :, 4] + 1) and torch.equal(keys[1, :, [3, 4, 5]], states[1, :, [2, 3, 7]] + 1)
    assert torch.equal(values[0, :, 6], -states[0, :, 6] - 1)
    assert bool((keys[0, :, 8] == 1).all()) and bool((keys[1, :, 9] == 1).all()) and not bool((keys[0, :, 9] == 1).any())
