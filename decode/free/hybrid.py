"""Two proposers at once: their trees are merged, and one forward pass of the target judges both.

Dims: B batch, N nodes (root included), M tokens processed, H hidden, F taps * H, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..proposer import Accepted, DeviceProposer, Extent, LogitObserver, Proposer
from ..sampling import Sampler
from ..tree import DraftTree
from ..trees import merge_trees
from .drafts import require


class Hybrid:
    """The union of two proposers' trees under one budget of `nodes` draft nodes (default: room for both).

    The first's nodes are kept first, so put the proposer first that is seldom wrong when it has a draft at all (retrieval, suffix automaton), and
    second the one that always has one (a trained head). Both observe everything. `taps` is the union of theirs; each is given its own slice.
    A merged tree has no q: only rules that need none may judge it (`verify.walk`, as the engine does). Hybrids may be nested.
    Raises UserError on impossible budgets.
    """

    def __init__(self, first: Proposer, second: Proposer, nodes: int | None = None) -> None:
        most = first.num_nodes + second.num_nodes - 2
        require("nodes", most if nodes is None else nodes, 1, most)
        self.first, self.second = first, second
        self.num_nodes = (most if nodes is None else nodes) + 1
        self.max_depth = max(first.max_depth, second.max_depth)
        self.taps = tuple(sorted({*first.taps, *second.taps}))
        self._observers = [proposer for proposer in (first, second) if isinstance(proposer, LogitObserver) and proposer.wants_logits]
        self.wants_logits = bool(self._observers)
        self._parents_BN: Tensor | None = None
        self._extent = Extent(0, True)
        limits = [half.max_positions for half in (first, second) if isinstance(half, DeviceProposer) and half.max_positions is not None]
        self.max_positions = min(limits, default=None)

    @property
    def extent(self) -> Extent:
        """How far rows reach; both halves are told."""
        return self._extent

    @extent.setter
    def extent(self, extent: Extent) -> None:
        self._extent = extent
        for half in (self.first, self.second):
            if isinstance(half, DeviceProposer):
                half.extent = extent

    @property
    def asynchronous(self) -> bool:
        """Whether both halves are."""
        return all(isinstance(half, DeviceProposer) and half.asynchronous for half in (self.first, self.second))

    def tensors(self) -> list[Tensor]:
        """What both keep."""
        return [tensor for half in (self.first, self.second) if isinstance(half, DeviceProposer) for tensor in half.tensors()]

    def memory(self, batch: int, capacity: int) -> int:
        """Bytes that both halves' caches will take more than they hold."""
        return sum(half.memory(batch, capacity) for half in (self.first, self.second) if hasattr(half, "memory"))

    def reset(self, batch: int, capacity: int) -> None:
        """Reset both."""
        self.first.reset(batch, capacity)
        self.second.reset(batch, capacity)

    def observe(self, accepted: Accepted) -> None:
        """Both take in what was accepted, each with the taps it asked for."""
        for proposer in (self.first, self.second):
            proposer.observe(replace(accepted, taps_BMF=self._slice(accepted.taps_BMF, proposer.taps)))

    def _slice(self, taps_BMF: Tensor | None, taps: tuple[int, ...]) -> Tensor | None:
        """These layers' features out of those of the union, which lie side by side in ascending order."""
        if taps_BMF is None or not taps or taps == self.taps:
            return taps_BMF if taps else None
        chosen = [self.taps.index(tap) for tap in taps]
        batch, count, width = taps_BMF.shape
        return taps_BMF.view(batch, count, len(self.taps), width // len(self.taps))[:, :, chosen].flatten(-2)

    def observe_logits(self, tokens_BN: Tensor, logits_BNV: Tensor, valid_BN: Tensor, parents_BN: Tensor | None = None) -> None:
        """Those that learn from logits see the whole merged tree, whoever drafted its nodes."""
        parents_BN = self._parents_BN if parents_BN is None else parents_BN
        for observer in self._observers:
            observer.observe_logits(tokens_BN, logits_BNV, valid_BN, parents_BN)

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """The merged tree."""
        first, second = (proposer.propose(root_B, sampler, noise_BDV) for proposer in (self.first, self.second))
        tree = merge_trees(first, second, self.num_nodes - 1)
        self._parents_BN = tree.parents_BN
        return tree
