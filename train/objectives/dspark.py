"""DSpark's objective (2607.05147): cross-entropy and total variation of blocks at sampled anchors, and cross-entropy of the confidence.

    loss = sum_s w_s mean(0.1 CE(p, q) + 0.9 TV(p, q) + BCE(c, 1 - TV(p, q)))                        w_s ~ step_decay^s
p: the target's distribution of a token; q, c: the drafter's distribution and confidence of it, given the true token before. The paper's CE is of the
text's tokens; here it is of the distribution that they were drawn from, which is the same in the mean and less noisy.

Dims: B batch, A anchors, S predictions of a block, P judged predictions, C chunk, H hidden, R rank, V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...decode.target import Step, Target
from ...heads.dspark import DSpark
from ...heads.head import Head
from ..losses import chunked_loss
from .common import Batch, Places
from .dflash import DFlashObjective, agreement, in_order_of_places, judged_predictions, places_of, sample_anchors

CE, TV = 0.1, 0.9


@dataclass(frozen=True, kw_only=True)
class DSparkObjective(DFlashObjective):
    """anchors, step_decay: as DFlash's.

    Places whose greedy choice lies outside the draft vocabulary carry no loss but the confidence's. Metrics, all teacher-forced: `accuracy_0`;
    `overlap`, the mean of 1 - TV over judged predictions, and `confidence`, that of c, which comes near it.
    """

    name: ClassVar[str] = "dspark"
    trains: ClassVar[tuple[type[nn.Module], ...]] = (DSpark,)
    step_decay: float = math.exp(-1 / 4)
    anchors: int = 32

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. Logits of a whole batch, the drafter's or the target's, are never held."""
        assert isinstance(drafter, DSpark)
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        anchors_BA, valid_BA = sample_anchors(batch, self.anchors)
        hidden_BASH = model(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, anchors_BA)
        place_BAS, kept_BAS = judged_predictions(batch, anchors_BA, valid_BA, hidden_BASH.shape[2])
        place_X = place_BAS.flatten()
        places, learned_X = places_of(place_X, kept_BAS.flatten(), batch, step, drafter, target)
        weight_X = self.block_weights(learned_X.view(kept_BAS.shape), batch, anchors_BA).flatten()
        confidence_weight_X = self.block_weights(kept_BAS, batch, anchors_BA).flatten()
        chosen_P, of_P = in_order_of_places(place_X, confidence_weight_X, places)

        # The token before prediction s is that of the place that judges it.
        hidden_PH, latent_PR = hidden_BASH.flatten(0, 2)[chosen_P], drafter.latent(batch.ids_BT.flatten()[place_X[chosen_P]])
        joint_P, output = torch.cat([hidden_PH, latent_PR], dim=-1), self.output(drafter)
        overlap_P = overlaps(joint_P, output, of_P, places, target, drafter.draft_ids, self.chunk_tokens)
        ids_V = drafter.draft_ids

        def probs(start: int, stop: int) -> Tensor:
            low, high = int(of_P[start]), int(of_P[stop - 1]) + 1
            return places.probs(target, ids_V, low, high)[of_P[start:stop] - low]

        draft_loss = chunked_loss("mixed", joint_P.unsqueeze(0), output, weight_X[chosen_P].unsqueeze(0), probs, self.chunk_tokens, ce=CE, tv=TV)
        logit_P = drafter.confidence_logits(hidden_PH, latent_PR).float()
        missed_P = functional.binary_cross_entropy_with_logits(logit_P, overlap_P, reduction="none")
        loss = draft_loss + (confidence_weight_X[chosen_P] * missed_P).sum()
        first_P = (chosen_P % hidden_BASH.shape[2] == 0).nonzero().squeeze(1)
        metrics = {
            "accuracy_0": agreement(joint_P, place_X[chosen_P], first_P, output, drafter, places, target),
            "overlap": float(overlap_P.mean()) if len(overlap_P) else 0.0,
            "confidence": float(logit_P.detach().sigmoid().mean()) if len(overlap_P) else 0.0,
        }
        return loss, metrics | places.metrics()

    @staticmethod
    def output(drafter: DSpark) -> Tensor:
        """[V, H + R] what multiplies [hidden; latent]: frozen output rows and W2."""
        return torch.cat([drafter.output_rows(), drafter.markov_head.markov_w2.weight], dim=1)


@torch.no_grad()
def overlaps(joint_PH: Tensor, output_VH: Tensor, of_P: Tensor, places: Places, target: Target, ids_V: Tensor, chunk: int) -> Tensor:
    """[P] sum_v min(p_v, q_v), float32: 1 - TV. What the target says outside the draft vocabulary cannot be accepted."""
    parts = []
    for start in range(0, len(of_P), chunk):
        of_C = of_P[start : start + chunk]
        low, high = int(of_C[0]), int(of_C[-1]) + 1
        p_CV = places.probs(target, None, low, high)[:, ids_V][of_C - low]
        parts.append(torch.minimum(p_CV, (joint_PH[start : start + chunk] @ output_VH.t()).float().softmax(-1)).sum(-1))
    return torch.cat(parts) if parts else torch.zeros(0, device=joint_PH.device)
