"""What the engine asks of a drafter. Heads, standalone drafts and n-gram lookup are all Proposers; the engine knows none of them by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .sampling import Sampler
from .tree import DraftTree


@dataclass
class Accepted:
    """What the target has just processed, column by column, with each row's real count; columns at or past the count are garbage.

    tokens_BM: the tokens processed (prompt, or root and accepted nodes). next_BM: the token that follows each; the last one is the new root.
    taps_BMF: the target's tapped features of them (None if the proposer asks for no taps). start_B: absolute position of column 0.
    """

    tokens_BM: Tensor
    next_BM: Tensor
    taps_BMF: Tensor | None
    start_B: Tensor
    count_B: Tensor


class Proposer(Protocol):
    """Grows a draft tree below the root, round after round. Its output never changes what is generated, only how fast."""

    taps: tuple[int, ...]  # layers whose features it needs (canonical k)
    max_depth: int  # greatest depth of a tree
    num_nodes: int  # nodes of a tree, root included

    def reset(self, batch: int, capacity: int) -> None:
        """Forget everything; make room for `batch` rows of `capacity` positions."""

    def observe(self, accepted: Accepted) -> None:
        """Take in what was accepted. Called after the prefill and after every round."""

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree of at most `num_nodes` nodes, whose node 0 is root_B.

        noise_BDV[:, d] is the noise of the token that follows a node of depth d (None: greedy).
        """
