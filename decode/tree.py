"""The draft tree: what a proposer hands to the target for verification.

Node 0 is the root: the last accepted token, whose K/V is not in the cache yet. Parents precede their children. A chain is a tree of branching 1.

Dims: B batch, N nodes (root included), D depth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class DraftTree:
    """tokens_BN, parents_BN (the root's parent is 0), depth_BN (root 0), ancestors_BNN (bool, a node is its own ancestor).

    `valid_BN` marks nodes that really exist (None: all); ragged batches pad with invalid nodes, which verification never accepts.
    `max_depth` bounds the depth on the host, so that nothing has to be read back from the device.
    `kind` says how siblings were found: "deterministic" (top-k, retrieved, pruned, merged), or sampled, "iid" or "without_replacement". In a sampled
    tree `q_BNV` is the distribution, over the target's full vocabulary, that each node's first child was really drawn from, and siblings' index
    order is their draw order. `values_BN`, where nodes were chosen by it: the drafter's log-probability that a node's whole path is accepted.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    ancestors_BNN: Tensor
    max_depth: int
    is_chain: bool = False
    valid_BN: Tensor | None = field(default=None)
    q_BNV: Tensor | None = field(default=None)
    kind: str = "deterministic"
    values_BN: Tensor | None = field(default=None)

    @property
    def num_nodes(self) -> int:
        """Nodes per row, root included."""
        return self.tokens_BN.shape[1]

    @classmethod
    def root_only(cls, root_B: Tensor) -> DraftTree:
        """A tree of one node: plain decoding."""
        return cls.chain(root_B.unsqueeze(1))

    @classmethod
    def chain(cls, tokens_BN: Tensor, valid_BN: Tensor | None = None) -> DraftTree:
        """A chain; column 0 is the root."""
        batch, nodes = tokens_BN.shape
        index = torch.arange(nodes, device=tokens_BN.device)
        return cls(
            tokens_BN=tokens_BN,
            parents_BN=(index - 1).clamp(min=0).expand(batch, nodes),
            depth_BN=index.expand(batch, nodes),
            ancestors_BNN=(index.unsqueeze(0) <= index.unsqueeze(1)).expand(batch, nodes, nodes),
            max_depth=nodes - 1,
            is_chain=True,
            valid_BN=valid_BN,
        )

    @classmethod
    def from_parents(cls, tokens_BN: Tensor, parents_BN: Tensor, max_depth: int, valid_BN: Tensor | None = None) -> DraftTree:
        """Build depths and ancestors from parents, on the device. Parents must precede children; the root's parent is itself."""
        depth_BN, ancestors_BNN = relations(parents_BN, max_depth)
        return cls(tokens_BN, parents_BN, depth_BN, ancestors_BNN, max_depth, valid_BN=valid_BN)

    def check_integrity(self) -> None:
        """Raise ValueError unless this is a well-formed tree. For tests and debugging: it reads the device."""
        index = torch.arange(self.num_nodes, device=self.parents_BN.device)
        if bool((self.parents_BN[:, 1:] >= index[1:]).any()) or bool((self.parents_BN[:, 0] != 0).any()):
            raise ValueError(f"parents must precede their children and the root's must be 0, got {self.parents_BN.tolist()}")
        depth_BN, ancestors_BNN = relations(self.parents_BN, self.num_nodes)
        if bool((depth_BN != self.depth_BN).any()) or bool((ancestors_BNN != self.ancestors_BNN).any()):
            raise ValueError(f"depth or ancestors do not follow from the parents {self.parents_BN.tolist()}")
        if int(depth_BN.max()) > self.max_depth:
            raise ValueError(f"max_depth {self.max_depth} is below the tree's depth {int(depth_BN.max())}")


def relations(parents_BN: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """(depth_BN, ancestors_BNN) by climbing `max_depth` times towards the root."""
    batch, nodes = parents_BN.shape
    index_BN = torch.arange(nodes, device=parents_BN.device).expand(batch, nodes)
    ancestors_BNN = torch.eye(nodes, dtype=torch.bool, device=parents_BN.device).repeat(batch, 1, 1)
    depth_BN = torch.zeros_like(parents_BN)
    at_BN = index_BN
    for _ in range(max_depth):
        depth_BN = depth_BN + (at_BN != 0)
        at_BN = parents_BN.gather(1, at_BN)
        ancestors_BNN = ancestors_BNN.scatter(2, at_BN.unsqueeze(-1), True)
    return depth_BN, ancestors_BNN
