"""What the engine asks of a drafter. Heads, standalone drafts and n-gram lookup are all Proposers; the engine knows none of them by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from .sampling import Sampler
from .tree import DraftTree


@dataclass(frozen=True)
class Extent:
    """How far rows reach, as the host knows it: none has more than `longest` committed tokens; exact: every row has just so many."""

    longest: int
    exact: bool


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


@runtime_checkable
class DeviceProposer(Proposer, Protocol):
    """One with tensors as long as the rows: the engine tells it how far they reach, in `extent`, before every call but that after the prefill.

    max_positions: the longest text that it can follow; None: any.

    asynchronous: neither propose nor observe waits for the device, all shapes follow from `extent`, and what is kept between calls stays in the same
    tensors, written in place. Then rounds follow each other without the host, and may be captured as graphs.
    """

    extent: Extent
    max_positions: int | None

    @property
    def asynchronous(self) -> bool:
        """See the class's docstring."""

    def tensors(self) -> list[Tensor]:
        """What it keeps between calls."""


@runtime_checkable
class LogitObserver(Protocol):
    """A proposer that also learns from the logits of what was drafted. The engine, or a proposer around it, calls it if wants_logits is true."""

    wants_logits: bool

    def observe_logits(self, tokens_BN: Tensor, logits_BNV: Tensor, valid_BN: Tensor, parents_BN: Tensor | None = None) -> None:
        """The target's raw logits after each node of the tree just verified; once a round, before or after `observe`.

        valid_BN: nodes that exist, in rows that are not finished. parents_BN: None if the tree verified is the one this proposer proposed last.
        """
