"""Verification rules: pure, batched tensor functions on a draft tree; no host synchronisation.

Dims: B batch, N nodes (root included), D the tree's max depth, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """What a rule decided.

    path_BP: [B, D + 1] node indices of the accepted path from the root on; entries past a row's accepted length repeat its last node.
    accepted_B: accepted draft tokens (root not counted), 0 .. D.
    next_B: the token that follows the path (bonus token or correction).
    """

    path_BP: Tensor
    accepted_B: Tensor
    next_B: Tensor


def walk(tree: DraftTree, choice_BN: Tensor) -> Verdict:
    """Follow the target's own choices down the tree: at each node, descend into the child that is the choice, else stop and emit it.

    With choice = argmax p this is the greedy walk (class L2 for p itself). With choice = argmax(log p + g), g the noise of the plain seeded
    sampler, it is shared-noise (Gumbel) verification (2408.07978): class L1 for any tree, however its nodes were found or pruned, and the
    output is token-identical to the plain sampler's.

    All nodes are judged at once: a node is accepted iff it and all its ancestors carry the token that the target chose at their parents.
    Among duplicate siblings the deepest path wins, and the earliest among equals; the emitted tokens are the same whichever is taken.

    choice_BN: the target's choice after each node.
    """
    good_BN = tree.tokens_BN == choice_BN.gather(1, tree.parents_BN)
    if tree.valid_BN is not None:
        good_BN = good_BN & tree.valid_BN
    good_BN = good_BN.index_fill(1, torch.zeros(1, dtype=torch.int64, device=good_BN.device), True)
    accepted_BN = ~(tree.ancestors_BNN & ~good_BN.unsqueeze(1)).any(-1)
    # First node of the greatest depth: argmax breaks ties by the lowest index only if the values differ, so rank by (depth, -index).
    nodes = tree.num_nodes
    index_N = torch.arange(nodes, device=choice_BN.device)
    rank_BN = torch.where(accepted_BN, tree.depth_BN * nodes + (nodes - 1 - index_N), -1)
    leaf_B = rank_BN.argmax(-1)
    path_BP = path_to(tree, leaf_B)
    return Verdict(path_BP, tree.depth_BN.gather(1, leaf_B.unsqueeze(1)).squeeze(1), choice_BN.gather(1, leaf_B.unsqueeze(1)).squeeze(1))


def path_to(tree: DraftTree, leaf_B: Tensor) -> Tensor:
    """[B, D + 1] nodes from the root to `leaf_B`, ordered by depth; entries past the leaf repeat it."""
    batch, nodes = tree.tokens_BN.shape
    on_path_BN = tree.ancestors_BNN.gather(1, leaf_B.view(-1, 1, 1).expand(batch, 1, nodes)).squeeze(1)
    # Each node of the path goes to the column of its depth; all others to a column that is cut off.
    column_BN = torch.where(on_path_BN, tree.depth_BN, tree.max_depth + 1)
    path_BP = leaf_B.unsqueeze(1).repeat(1, tree.max_depth + 2)
    index_BN = torch.arange(nodes, device=leaf_B.device).expand(batch, nodes)
    return path_BP.scatter(1, column_BN, index_BN)[:, : tree.max_depth + 1]
