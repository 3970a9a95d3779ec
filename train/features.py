"""Features of the frozen target for training: computed when needed, and kept in memory if there is room."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decode.target import Step, Target
from .objectives.common import Batch


class Features:
    """The target's features of batches. Each sequence's are kept, up to `limit` bytes, so that later epochs do without the target's forward pass.

    The target must have the taps set that were set when the first sequence was kept. What is kept lies on the target's device.
    """

    def __init__(self, target: Target, limit: int = 0) -> None:
        self.target, self.limit, self.bytes = target, limit, 0
        self._kept: dict[int, list[Tensor]] = {}  # last hidden states, and taps if there are any
        self._taps: tuple[int, ...] | None = None

    def of(self, batch: Batch) -> Step:
        """What `Target.features` gives for the batch; at padded places, zeros if all of its sequences were kept."""
        if self.limit and batch.sequence_B is not None and all(i in self._kept for i in batch.sequence_B):
            assert self.target.taps == self._taps, "the taps changed"
            rows = [self._kept[i] for i in batch.sequence_B]
            hidden, *taps = (torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True))
            return Step(hidden, taps[0] if taps else None)
        step = self.target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        if self.limit and batch.sequence_B is not None:
            self._taps = self.target.taps
            for row, index in enumerate(batch.sequence_B):
                length = int((batch.document_BT[row] >= 0).sum())
                parts = [part[row, :length].clone() for part in (step.hidden_BNH, step.taps_BNF) if part is not None]
                size = sum(part.numel() * part.element_size() for part in parts)
                if index not in self._kept and self.bytes + size <= self.limit:
                    self._kept[index] = parts
                    self.bytes += size
        return step
