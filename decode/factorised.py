"""Trees of drafters whose depths are independent of each other: Medusa's heads, block-parallel drafters.

Such a drafter gives one distribution a depth, so a path's probability is the product of its tokens'. The best tree of a budget holds the paths of
greatest probability: it has the greatest expected number of accepted tokens if the drafter's probabilities are right. (Medusa 2401.10774, 2.3.3,
chooses by measured accuracies instead, once for all rounds.)

Dims: B batch, D depth, K candidates a depth, W paths kept at one depth, C candidates of all depths, N nodes (root included), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import UserError
from .tree import DraftTree


def best_first(root_B: Tensor, tokens_BDK: Tensor, log_p_BDK: Tensor, nodes: int) -> DraftTree:
    """The tree of the `nodes` paths (root not counted) of greatest joint probability, in order of depth.

    tokens_BDK: candidates of depths 1 .. D; log_p_BDK: their log-probabilities, at most 0, in any order along K. A path's parent is at least as
    probable as the path, so the best paths are a tree. With the d - 1 ancestors of any of its nodes of depth d in it, it has room for nodes - d + 1
    of that depth at most: levels are grown with a beam that is so wide, which loses nothing. On the device, without reading anything back.

    Raises UserError if there are fewer paths than nodes.
    """
    batch, depths, k = tokens_BDK.shape
    check_nodes(nodes, depths, k)
    if k == 1:
        return DraftTree.chain(torch.cat([root_B.unsqueeze(1), tokens_BDK[:, :nodes, 0]], dim=1))
    tokens, values, parents = [], [], []
    values_BW = log_p_BDK.new_zeros(batch, 1)  # the root
    ids_BW = torch.zeros(batch, 1, dtype=torch.int64, device=root_B.device)  # candidates are numbered from 1 in order of creation; 0 is the root
    made = 1
    for depth in range(1, min(depths, nodes) + 1):
        paths_BC = (values_BW.unsqueeze(2) + log_p_BDK[:, depth - 1].unsqueeze(1)).flatten(1)
        values_BW, best_BW = paths_BC.topk(min(paths_BC.shape[1], nodes - depth + 1), dim=1)
        tokens.append(tokens_BDK[:, depth - 1].gather(1, best_BW % k))
        values.append(values_BW)
        parents.append(ids_BW.gather(1, best_BW // k))
        ids_BW = torch.arange(made, made + best_BW.shape[1], device=root_B.device).expand(batch, -1)
        made += best_BW.shape[1]
    return keep_best(root_B, torch.cat(tokens, 1), torch.cat(values, 1), torch.cat(parents, 1), nodes, min(depths, nodes))


def check_nodes(nodes: int, depths: int, k: int) -> None:
    """Raise UserError unless k candidates at each of so many depths have at least `nodes` paths."""
    paths = sum(k**depth for depth in range(1, depths + 1))
    if not 1 <= nodes <= paths:
        raise UserError(f"decode.nodes: wanted 1 .. {paths} for depth {depths} and topk {k}, got {nodes}")


def keep_best(root_B: Tensor, tokens_BC: Tensor, values_BC: Tensor, parents_BC: Tensor, nodes: int, max_depth: int) -> DraftTree:
    """The tree of the `nodes` candidates of greatest value. Candidate i has the number i + 1, and the root 0; parents_BC are numbers.

    A candidate comes after its parent, and its value is not greater: then, as the sort is stable, no child is kept without its parent.
    """
    order_BN = values_BC.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
    root_B1 = torch.zeros_like(order_BN[:, :1])
    kept_BN = torch.cat([root_B1, order_BN + 1], dim=1)
    parents_BN = torch.cat([root_B1, parents_BC.gather(1, order_BN)], dim=1)
    tree = DraftTree.from_parents(
        torch.cat([root_B.unsqueeze(1), tokens_BC.gather(1, order_BN)], dim=1),
        torch.searchsorted(kept_BN, parents_BN),  # candidate number -> node
        max_depth,
    )
    tree.values_BN = torch.cat([torch.zeros_like(values_BC[:, :1]), values_BC.gather(1, order_BN)], dim=1)
    return tree
