"""Best-first trees of independent depths against an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.factorised import best_first
from draftsmith.decode.tree import DraftTree


def marginals(batch: int, depths: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(roots, distinct tokens, log-probabilities in no order) of k candidates of 2 k + 1 tokens each."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, depths, 2 * k + 1, generator=generator, dtype=torch.float64)
    tokens = torch.stack([torch.randperm(2 * k + 1, generator=generator)[:k] for _ in range(batch * depths)]).view(batch, depths, k)
    return torch.randint(100, (batch,), generator=generator), tokens, logits.log_softmax(-1).gather(2, tokens)


def spelled(tree: DraftTree, row: int) -> dict[tuple[int, ...], int]:
    """{tokens from below the root: node} of every node but the root."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, tree.num_nodes):
        paths[node] = (*paths[int(tree.parents_BN[row, node])], int(tree.tokens_BN[row, node]))
    return {path: node for node, path in paths.items() if node}


def exhaustive(tokens_DK: torch.Tensor, log_p_DK: torch.Tensor, nodes: int) -> set[tuple[int, ...]]:
    """The most probable paths of any depth, by trying all."""
    scored = []
    for depth in range(1, tokens_DK.shape[0] + 1):
        for ranks in itertools.product(range(tokens_DK.shape[1]), repeat=depth):
            value = sum(float(log_p_DK[d, r]) for d, r in enumerate(ranks))
            scored.append((value, tuple(int(tokens_DK[d, r]) for d, r in enumerate(ranks))))
    return {path for _, path in sorted(scored, reverse=True)[:nodes]}


@pytest.mark.parametrize(("depths", "k", "nodes"), [(4, 3, 1), (4, 3, 2), (4, 3, 7), (4, 3, 16), (3, 4, 84), (2, 5, 11), (6, 2, 20), (3, 3, 39)])
def test_the_tree_is_that_of_an_exhaustive_search(depths: int, k: int, nodes: int) -> None:
    for seed in range(4):
        root, tokens, log_p = marginals(5, depths, k, seed)
        tree = best_first(root, tokens, log_p, nodes)
        tree.check_integrity()
        assert tree.num_nodes == nodes + 1 and tree.max_depth <= depths
        assert torch.equal(tree.tokens_BN[:, 0], root)
        assert bool((tree.depth_BN.diff(dim=1) >= 0).all())  # in order of depth
        for row in range(5):
            paths = spelled(tree, row)
            assert len(paths) == nodes  # no path twice
            assert set(paths) == exhaustive(tokens[row], log_p[row], nodes)


def test_equal_probabilities_and_impossible_candidates_still_give_a_tree() -> None:
    root, tokens, log_p = marginals(2, 4, 3)
    sure = torch.full_like(log_p, -torch.inf)
    sure[..., 1] = 0.0  # a certain path: parents and children are equally probable
    for values in (sure, torch.zeros_like(log_p), torch.full_like(log_p, -torch.inf)):
        tree = best_first(root, tokens, values, 10)
        tree.check_integrity()
        assert len(spelled(tree, 0)) == 10
    certain = tuple(int(t) for t in tokens[0, :, 1])
    assert all(certain[:depth] in spelled(best_first(root, tokens, sure, 4), 0) for depth in range(1, 5))


def test_one_candidate_a_depth_is_a_chain() -> None:
    root, tokens, log_p = marginals(3, 5, 1)
    tree = best_first(root, tokens, log_p, 4)
    assert tree.is_chain and torch.equal(tree.tokens_BN, torch.cat([root[:, None], tokens[:, :4, 0]], dim=1))


def test_more_nodes_than_paths_are_refused() -> None:
    root, tokens, log_p = marginals(1, 2, 3)
    for nodes in (0, 13):
        with pytest.raises(UserError, match=r"decode\.nodes: wanted 1 \.\. 12 for depth 2 and topk 3"):
            best_first(root, tokens, log_p, nodes)
