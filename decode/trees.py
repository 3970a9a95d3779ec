"""Builders of draft trees: static templates from a list of paths, and the union of two trees.

A *path* is a tuple of ranks from the root down, as in Medusa's and EAGLE's tree choices: (0, 2) is the third-best child of the best child.

Dims: B batch, N nodes (root included), M nodes of two trees before merging, D depth, K candidates, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .. import UserError
from .tree import DraftTree, relations


@runtime_checkable
class Follower(Protocol):
    """A proposer that can draft trees of one shape in all rounds."""

    topk: int  # candidates of a node, and nodes that it expands at once, where it goes level by level

    def follow(self, shape: StaticTree) -> None:
        """From now on every tree has this shape. Raises UserError for a shape that is deeper or wider than what the proposer was made for."""


@dataclass(frozen=True, eq=False)
class StaticTree:
    """The shape of a tree that is the same in every round (Medusa 2401.10774, section 2.3.1; EAGLE 2401.15077). Nodes are ordered by depth.

    ranks_N: which of its parent's candidates a node is (root 0). parents_N, depth_N, ancestors_NN: as in DraftTree, without the batch.
    levels: the nodes of depth 1, 2, ... as slices. topk: how many candidates a node must offer, the greatest rank plus one.
    """

    ranks_N: Tensor
    parents_N: Tensor
    depth_N: Tensor
    ancestors_NN: Tensor
    levels: tuple[slice, ...]
    topk: int

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> StaticTree:
        """One node a path, in any order. Raises UserError on an empty, repeated or negative path, or one whose parent is not in the list."""
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        if not ordered or len(ordered) != len(paths) or not ordered[0] or min(map(min, ordered)) < 0:
            raise UserError(f"tree: wanted distinct paths of ranks >= 0, each at least one long, got {[list(path) for path in paths]}")
        node_of = {(): 0} | {path: node for node, path in enumerate(ordered, 1)}
        for path in ordered:
            if path[:-1] not in node_of:
                raise UserError(f"tree: wanted the parent of every path, got {list(path)} without {list(path[:-1])}; add it")
        parents_N = torch.tensor([0, *(node_of[path[:-1]] for path in ordered)])
        depth_1N, ancestors_1NN = relations(parents_N.unsqueeze(0), len(ordered[-1]))
        starts = [1 + sum(len(path) < depth for path in ordered) for depth in range(1, len(ordered[-1]) + 2)]
        levels = tuple(slice(start, stop) for start, stop in pairwise(starts))
        ranks = [0, *(path[-1] for path in ordered)]
        return cls(torch.tensor(ranks), parents_N, depth_1N[0], ancestors_1NN[0], levels, max(ranks) + 1)

    @property
    def num_nodes(self) -> int:
        """Nodes, root included."""
        return self.parents_N.shape[0]

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.levels)

    @property
    def width(self) -> int:
        """Most nodes of one level that have children: so many a drafter that goes level by level has to expand at once."""
        return max((len(chosen) for _, _, chosen in self.plan()[:-1]), default=1)

    def plan(self) -> list[tuple[list[int], list[int], list[int]]]:
        """For each level: (which expanded node of the level above is each node's parent, its rank, and which of its nodes are expanded).

        Expanded are the nodes with children; above the first level it is the root alone.
        """
        parents, ranks, found, above = self.parents_N.tolist(), self.ranks_N.tolist(), [], [0]
        for level in self.levels:
            nodes = list(range(level.start, level.stop))
            chosen = [node for node in nodes if node in parents[1:]]
            found.append(([above.index(parents[node]) for node in nodes], [ranks[node] for node in nodes], [node - level.start for node in chosen]))
            above = chosen
        return found

    def on(self, device: torch.device) -> StaticTree:
        """The same template with its tensors on `device`."""
        if self.parents_N.device == device:
            return self
        ranks_N, parents_N, depth_N, ancestors_NN = (x.to(device) for x in (self.ranks_N, self.parents_N, self.depth_N, self.ancestors_NN))
        return StaticTree(ranks_N, parents_N, depth_N, ancestors_NN, self.levels, self.topk)

    def fill(self, tokens_BN: Tensor, valid_BN: Tensor | None = None) -> DraftTree:
        """The draft tree of this shape with these tokens, root first. The template must be on the tokens' device."""
        batch, nodes = tokens_BN.shape
        is_chain = self.max_depth == nodes - 1
        parents_BN, depth_BN = self.parents_N.expand(batch, nodes), self.depth_N.expand(batch, nodes)
        ancestors_BNN = self.ancestors_NN.expand(batch, nodes, nodes)
        return DraftTree(tokens_BN, parents_BN, depth_BN, ancestors_BNN, self.max_depth, is_chain=is_chain, valid_BN=valid_BN)

    def fill_by_depth(self, root_B: Tensor, candidates_BDK: Tensor) -> DraftTree:
        """Medusa's rule: a node of depth d and rank r is candidates_BDK[:, d - 1, r], whatever its parent is."""
        drafts_BN = candidates_BDK[:, self.depth_N[1:] - 1, self.ranks_N[1:]]
        return self.fill(torch.cat([root_B.unsqueeze(1), drafts_BN], dim=1))


def likeliest_paths(acceptance: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` paths that are accepted most probably (Medusa 2401.10774, section 2.3.3), if ranks are accepted independently.

    acceptance[d][r]: probability in (0, 1] that the candidate of rank r is the token at depth d + 1. A path's probability is the product along it,
    so a parent is never less probable than its child, and taking paths best first gives the optimum. Raises UserError if there are fewer paths.
    """
    if not acceptance or any(not 0 < p <= 1 for level in acceptance for p in level):
        raise UserError(f"tree: wanted acceptance probabilities in (0, 1] for every depth, got {[list(level) for level in acceptance]}")
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-p, 1, (rank,)) for rank, p in enumerate(acceptance[0])]
    heapq.heapify(heap)
    while heap and len(paths) < nodes:
        negative, depth, path = heapq.heappop(heap)
        paths.append(path)
        if depth < len(acceptance):
            for rank, p in enumerate(acceptance[depth]):
                heapq.heappush(heap, (negative * p, depth + 1, (*path, rank)))
    if len(paths) < nodes or nodes < 1:
        raise UserError(f"tree: wanted 1 .. {len(paths)} nodes for {len(acceptance)} depths, got {nodes}")
    return paths


def merge_trees(first: DraftTree, second: DraftTree, nodes: int) -> DraftTree:
    """The union of two trees of the same batch and root, as `nodes` draft nodes; nodes that spell the same path from the root become one.

    The first tree's nodes are kept first, in their order, then the second's: what is over the budget is cut off at the end, and since parents precede
    children it is never a parent of what stays. Nodes that are invalid, or lie below one, are left out; the space they leave is filled with invalid
    nodes. Only rules that need no q may judge the result (`verify.walk`). On the device, without reading anything back.
    """
    offset = first.num_nodes - 1  # the second tree's node i >= 1 becomes i + offset; its root is the first's
    later_parents = second.parents_BN[:, 1:]
    parents_BM = torch.cat([first.parents_BN, torch.where(later_parents == 0, 0, later_parents + offset)], dim=1)
    tokens_BM = torch.cat([first.tokens_BN, second.tokens_BN[:, 1:]], dim=1)
    depth_BM = torch.cat([first.depth_BN, second.depth_BN[:, 1:]], dim=1)
    real_BM = torch.cat([_existing(first), _existing(second)[:, 1:]], dim=1)
    max_depth = max(first.max_depth, second.max_depth, 1)  # what fills a tree up hangs below the root
    same_BMM = _same_path(tokens_BM, parents_BM, depth_BM, max_depth) & real_BM.unsqueeze(1)
    total = tokens_BM.shape[1]
    index_BM = torch.arange(total, device=tokens_BM.device).expand_as(tokens_BM)
    # The earliest node of the same path stands for all of them.
    chief_BM = torch.where(same_BMM, index_BM.unsqueeze(1), total - 1).amin(-1)
    kept_BM = real_BM & (chief_BM == index_BM)
    order_BM = torch.where(kept_BM, index_BM, index_BM + total).argsort(dim=1)
    place_BM = torch.zeros_like(order_BM).scatter(1, order_BM, index_BM)
    new_parents_BM = place_BM.gather(1, chief_BM.gather(1, parents_BM))
    picked_BN = order_BM[:, : nodes + 1]
    valid_BN = kept_BM.gather(1, picked_BN)
    tokens_BN = tokens_BM.gather(1, picked_BN) * valid_BN
    parents_BN = new_parents_BM.gather(1, picked_BN) * valid_BN
    missing = (0, nodes + 1 - picked_BN.shape[1])
    tokens_BN, parents_BN, valid_BN = (torch.nn.functional.pad(x, missing) for x in (tokens_BN, parents_BN, valid_BN))
    return DraftTree.from_parents(tokens_BN, parents_BN, max_depth, valid_BN)


def _existing(tree: DraftTree) -> Tensor:
    """[B, N] nodes that are valid with all their ancestors."""
    if tree.valid_BN is None:
        return torch.ones_like(tree.tokens_BN, dtype=torch.bool)
    missing_BN = torch.cat([torch.zeros_like(tree.valid_BN[:, :1]), ~tree.valid_BN[:, 1:]], dim=1)  # the root always exists
    return ~(tree.ancestors_BNN & missing_BN.unsqueeze(1)).any(-1)


def _same_path(tokens_BM: Tensor, parents_BM: Tensor, depth_BM: Tensor, max_depth: int) -> Tensor:
    """[B, M, M] whether two nodes spell the same path: same token, same depth, and parents that spell the same path."""
    total = tokens_BM.shape[1]
    alike_BMM = (tokens_BM.unsqueeze(1) == tokens_BM.unsqueeze(2)) & (depth_BM.unsqueeze(1) == depth_BM.unsqueeze(2))
    rows_BMM = parents_BM.unsqueeze(2).expand(-1, -1, total)
    columns_BMM = parents_BM.unsqueeze(1).expand(-1, total, -1)
    same_BMM = alike_BMM
    for _ in range(max_depth - 1):  # right up to depth 1 before the loop, one depth more after each turn
        same_BMM = alike_BMM & same_BMM.gather(1, rows_BMM).gather(2, columns_BMM)
    return same_BMM
