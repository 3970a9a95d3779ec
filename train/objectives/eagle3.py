"""EAGLE-3's objective: soft cross-entropy over the training-time test (2503.01840), no feature loss.

Dims: B batch, T sequence, S unrolled steps, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...decode.target import Step, Target
from ...heads.eagle1 import Eagle1
from ...heads.eagle3 import Eagle3
from ...heads.head import Head
from ...heads.mtp import Mtp
from ...heads.recurrent import RecurrentHead
from ..losses import chunked_loss
from .common import Batch, Objective, Places, judged


@dataclass(frozen=True, kw_only=True)
class Eagle3Objective(Objective):
    """steps: unrolled steps. Step k of pair t is judged by the target's distribution of token t + 2 + k, over the draft vocabulary.

    Places whose greedy choice lies outside the draft vocabulary carry no loss, but count as misses in `accuracy_0` (which is teacher-forced).
    """

    name: ClassVar[str] = "eagle3"
    trains: ClassVar[tuple[type[nn.Module], ...]] = (Eagle3, Eagle1, Mtp)
    steps: int = 4
    loss: str = "ce"

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. Logits of a whole batch, the drafter's or the target's, are never held."""
        assert isinstance(drafter, RecurrentHead)
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        outputs = model(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, self.steps)
        back = [1 + k for k in range(self.steps)]
        places = Places.of(torch.stack([judged(batch, b) for b in back]), step)
        weight_SN = self.weights(places.judged_SN & places.known_N(drafter, target), *batch.sequence_of(places.place_N))
        ids_V, hidden_SNH = drafter.draft_ids, places.gathered(outputs, back)
        loss = chunked_loss(
            self.loss,
            drafter.readout(hidden_SNH),
            drafter.output_rows(),
            weight_SN,
            lambda start, stop: places.probs(target, ids_V, start, stop),
            self.chunk_tokens,
        )
        return loss, {"accuracy_0": accuracy(drafter, target, hidden_SNH, places), **places.metrics()}


@torch.no_grad()
def accuracy(drafter: RecurrentHead, target: Target, hidden_SNH: Tensor, places: Places, sample: int = 256) -> float:
    """Share of (the first `sample`) places judged by step 0 whose draft argmax is the target's; ones outside the draft vocabulary are misses."""
    chosen = places.judged_SN[0].nonzero().squeeze(1)[:sample]
    choice = drafter.draft_ids[drafter.logits(hidden_SNH[0, chosen]).argmax(-1)]
    return float((choice == places.choices(target, chosen)).float().mean()) if len(chosen) else 0.0
