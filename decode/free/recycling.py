"""Token recycling: the candidates that the target did not choose are kept, and drafted where the same token comes again.

Dims: B batch, N nodes (root included), V vocabulary, K candidates a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..proposer import Accepted
from ..sampling import Sampler
from ..tree import DraftTree
from ..trees import StaticTree, likeliest_paths
from .drafts import require


class TokenRecycling:
    """Fills a static tree from an adjacency matrix [V, K]: the target's top K candidates after each token, as last seen (2408.08696).

    The matrix is learned from the logits of all verified nodes, accepted or not (`observe_logits`); without them nothing is drafted. It belongs to
    all rows, since it knows single tokens only, and it starts empty with every `reset`, unless keep_matrix is set (the paper's warm start: what is
    drafted, though not what is generated, then depends on the texts before). Everything stays on the device.

    paths: the tree (`StaticTree.from_paths`), whose greatest rank gives K. Raises UserError as that does.
    """

    taps: tuple[int, ...] = ()
    wants_logits = True

    def __init__(self, paths: Sequence[Sequence[int]], *, keep_matrix: bool = False) -> None:
        self._template = StaticTree.from_paths(paths)
        self.max_depth, self.num_nodes = self._template.max_depth, self._template.num_nodes
        self._keep = keep_matrix
        self._matrix_VK: Tensor | None = None  # -1: nothing known. One row more than tokens, where updates of invalid nodes go

    @classmethod
    def sized(cls, *, depth: int = 5, nodes: int = 48, topk: int = 8, keep_matrix: bool = False) -> TokenRecycling:
        """With a tree of the likeliest paths, if the candidate of rank r is right with probability 0.5 / (r + 1)^1.5 (a guess that falls as such
        measurements do; for measured ones, use `likeliest_paths` and the constructor)."""
        require("depth", depth, 1)
        require("topk", topk, 1)
        require("nodes", nodes, 1)
        return cls(likeliest_paths([[0.5 / (rank + 1) ** 1.5 for rank in range(topk)]] * depth, nodes), keep_matrix=keep_matrix)

    def reset(self, batch: int, capacity: int) -> None:
        """Forget the matrix, unless it is to be kept."""
        if not self._keep:
            self._matrix_VK = None

    def observe(self, accepted: Accepted) -> None:
        """Accepted tokens teach nothing that their logits do not."""

    def observe_logits(self, tokens_BN: Tensor, logits_BNV: Tensor, valid_BN: Tensor, parents_BN: Tensor | None = None) -> None:
        """Replace the candidates of every valid node's token. Of nodes with the same token the last one counts, on every device."""
        vocab, topk = logits_BNV.shape[-1], min(self._template.topk, logits_BNV.shape[-1])
        if self._matrix_VK is None:
            self._matrix_VK = torch.full((vocab + 1, self._template.topk), -1, dtype=torch.int64, device=tokens_BN.device)
        candidates_MK = logits_BNV.topk(topk, dim=-1).indices.flatten(0, 1)
        row_M = torch.where(valid_BN, tokens_BN, vocab).flatten()
        # All nodes of a token write the same values, those of the last, so that the order of the writes does not matter.
        last_V = torch.zeros(vocab + 1, dtype=torch.int64, device=row_M.device)
        last_V = last_V.scatter_reduce(0, row_M, torch.arange(row_M.numel(), device=row_M.device), "amax")
        self._matrix_VK[row_M, :topk] = candidates_MK[last_V[row_M]]

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """The template, filled level by level. The noise is not used: nothing is sampled."""
        template = self._template = self._template.on(root_B.device)
        tokens_BN = torch.zeros(root_B.shape[0], self.num_nodes, dtype=torch.int64, device=root_B.device)
        valid_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
        tokens_BN[:, 0], valid_BN[:, 0] = root_B, True
        if self._matrix_VK is None:
            return template.fill(tokens_BN, valid_BN)
        for level in template.levels:
            parents = template.parents_N[level]
            candidates_BL = self._matrix_VK[tokens_BN[:, parents], template.ranks_N[level]]
            valid_BN[:, level] = valid_BN[:, parents] & (candidates_BL >= 0)
            tokens_BN[:, level] = candidates_BL.clamp(min=0)
        return template.fill(tokens_BN, valid_BN)
