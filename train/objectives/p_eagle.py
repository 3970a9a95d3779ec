"""P-EAGLE's objective (2602.01469): soft cross-entropy of all pairs, and of the mask entries of sampled anchors.

    loss = w_0 mean_t CE(target's distribution of token t + 2, pair t) + sum_d w_d mean_a CE(that of token a + 2 + d, mask d of anchor a)
with w_d ~ step_decay^d. The paper thins out the mask entries with d; here every anchor has all of its own, and anchors are sampled.

Dims: B batch, T sequence, A anchors, S predictions of an anchor, X all predictions, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...decode.target import Step, Target
from ...heads.head import Head
from ...heads.p_eagle import PEagle
from .common import Batch, Objective, judged
from .dflash import agreement, judged_predictions, places_of, sample_anchors, soft_loss


@dataclass(frozen=True, kw_only=True)
class PEagleObjective(Objective):
    """anchors: pairs a sequence and step that are followed by mask entries.

    Places whose greedy choice lies outside the draft vocabulary carry no loss, but count as misses in `accuracy_0` (which is teacher-forced).
    """

    name: ClassVar[str] = "p_eagle"
    trains: ClassVar[tuple[type[nn.Module], ...]] = (PEagle,)
    anchors: int = 32

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. Logits of a whole batch, the drafter's or the target's, are never held."""
        assert isinstance(drafter, PEagle)
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        rows, total = batch.ids_BT.shape
        anchors_BA, valid_BA = sample_anchors(batch, self.anchors)
        pairs_BTH, masks_BASH = model(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, anchors_BA)

        # Predictions are numbered: all pairs, by their place, then the mask entries.
        place_BAS, kept_BAS = judged_predictions(batch, anchors_BA, valid_BA, masks_BASH.shape[2], first=2)
        kept_BT = functional.pad(judged(batch, 1)[:, 1:], (0, 1))
        pair_N = torch.arange(rows * total, device=place_BAS.device)
        place_X = torch.cat([(pair_N + 1).clamp(max=rows * total - 1), place_BAS.flatten()])
        kept_X = torch.cat([kept_BT.flatten(), kept_BAS.flatten()])
        places, learned_X = places_of(place_X, kept_X, batch, step, drafter, target)
        hidden_XH = drafter.readout(torch.cat([pairs_BTH.flatten(0, 1), masks_BASH.flatten(0, 2)]))
        weight_X = self.entry_weights(learned_X, batch, anchors_BA, masks_BASH.shape[2])
        loss = soft_loss(hidden_XH, place_X, weight_X, drafter.output_rows(), drafter, places, target, self.chunk_tokens)
        first_P = kept_BT.flatten().nonzero().squeeze(1)
        accuracy_0 = agreement(hidden_XH, place_X, first_P, drafter.output_rows(), drafter, places, target)
        return loss, {"accuracy_0": accuracy_0, **places.metrics()}

    def entry_weights(self, learned_X: Tensor, batch: Batch, anchors_BA: Tensor, masks: int) -> Tensor:
        """`Objective.weights` of pairs and mask entries, each depth a step."""
        (rows, anchors), total = anchors_BA.shape, batch.ids_BT.shape[1]
        pair_N = (torch.arange(rows, device=anchors_BA.device).unsqueeze(1) * total + anchors_BA).flatten()
        learned_SN = torch.zeros(1 + masks, rows * total, dtype=torch.bool, device=anchors_BA.device)
        learned_SN[0] = learned_X[: rows * total]
        learned_SN[1:, pair_N] = learned_X[rows * total :].view(rows * anchors, masks).t()
        weight_SN = self.weights(learned_SN, *batch.sequence_of(torch.arange(rows * total, device=anchors_BA.device)))
        return torch.cat([weight_SN[0], weight_SN[1:, pair_N].t().flatten()])
