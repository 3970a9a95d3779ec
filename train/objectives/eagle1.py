"""EAGLE-1's objective (2401.15077), a regression of features with a soft cross-entropy, and HASS's (2408.15766), which unrolls it.

    loss = sum_s w_s mean_n [feature_weight SmoothL1(h_sn, f_n) + token_weight CE(p_n, q_sn) + topk_weight CE_topk(p_n, q_sn)]
f_n: the target's feature at the place that is predicted, averaged over H. CE_topk: the terms -p_v log q_v of the k likeliest tokens of p only.

Dims: B batch, T sequence, S unrolled steps, N judged places, C chunk, H hidden, F taps * H, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...decode.target import Step, Target
from ...heads.eagle1 import Eagle1
from ...heads.head import Head
from ..losses import chunked_soft_cross_entropy
from .common import Batch, Objective, Places, judged
from .eagle3 import accuracy


@dataclass(frozen=True, kw_only=True)
class Eagle1Objective(Objective):
    """One step. feature_noise: in training, features are fed with uniform noise of (rand - 0.5) * feature_noise * 512 / tokens of the sequence.

    Places whose greedy choice lies outside the draft vocabulary carry no cross-entropy. They do carry the feature loss.
    """

    name: ClassVar[str] = "eagle1"
    trains: ClassVar[tuple[type[nn.Module], ...]] = (Eagle1,)
    reads_hidden: ClassVar[bool] = True
    feature_noise: float = 0.2
    feature_weight: float = 1.0
    token_weight: float = 0.1

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`."""
        return self._loss(model, drafter, target, batch, step, 1, 0, 0.0)

    def _loss(
        self,
        model: nn.Module,
        drafter: Head,
        target: Target,
        batch: Batch,
        step: Step | None,
        steps: int,
        topk: int,
        topk_weight: float,
    ) -> tuple[Tensor, dict[str, float]]:
        assert isinstance(drafter, Eagle1)
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        fed_BTF = noisy(step.taps_BNF, batch.document_BT, self.feature_noise) if drafter.training else step.taps_BNF
        outputs = model(fed_BTF, batch.ids_BT, batch.position_BT, batch.document_BT, steps, True)
        back = [1 + k for k in range(steps)]
        places = Places.of(torch.stack([judged(batch, b) for b in back]), step)
        ids_V, hidden_SNH, sequence_N = drafter.draft_ids, places.gathered(outputs, back), batch.sequence_of(places.place_N)
        weight_SN = self.weights(places.judged_SN & places.known_N(drafter, target), *sequence_N)

        def mixed(start: int, stop: int) -> Tensor:
            """[C, V] what multiplies -log q: of each place, token_weight p, and topk_weight p at the likeliest tokens."""
            probs_CV = places.probs(target, ids_V, start, stop)
            if topk == 0:
                return self.token_weight * probs_CV
            values_CK, index_CK = probs_CV.topk(min(topk, probs_CV.shape[-1]), dim=-1)
            return (self.token_weight * probs_CV).scatter_add(-1, index_CK, topk_weight * values_CK)

        # The chunked loss takes distributions; what they sum to goes into the weights.
        count = len(places.place_N)
        with torch.no_grad():
            sums = [mixed(start, min(start + self.chunk_tokens, count)).sum(-1) for start in range(0, count, self.chunk_tokens)]
            mass_N = torch.cat(sums) if sums else weight_SN.new_zeros(0)
        loss = chunked_soft_cross_entropy(
            hidden_SNH,
            drafter.output_rows(),
            weight_SN * mass_N,
            lambda start, stop: functional.normalize(mixed(start, stop), p=1.0, dim=-1),
            self.chunk_tokens,
        )
        distance_SN = functional.smooth_l1_loss(hidden_SNH.float(), places.features_NH.float().expand_as(hidden_SNH), reduction="none").mean(-1)
        feature = (self.weights(places.judged_SN, *sequence_N) * distance_SN).sum()
        metrics = {"feature_loss": float(feature.detach()), "accuracy_0": accuracy(drafter, target, hidden_SNH, places)}
        return loss + self.feature_weight * feature, metrics | places.metrics()


@dataclass(frozen=True, kw_only=True)
class HassObjective(Eagle1Objective):
    """HASS: `steps` steps of equal weight, of which each attends to the features of the earlier ones, as when drafting, and `topk` distillation.

    Gradients do not flow back through the features that a step is fed, as in the reference's training.
    """

    name: ClassVar[str] = "hass"
    steps: int = 3
    step_decay: float = 1.0
    topk: int = 10
    topk_weight: float = 1.0

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`."""
        return self._loss(model, drafter, target, batch, step, self.steps, self.topk, self.topk_weight)


def noisy(features_BTF: Tensor, document_BT: Tensor, noise: float) -> Tensor:
    """Features with the reference's uniform noise, smaller for longer sequences: (rand - 0.5) * noise * 512 / tokens of the sequence."""
    length_BT = torch.zeros(len(document_BT), int(document_BT.max()) + 2, device=document_BT.device)
    length_BT = length_BT.scatter_add_(1, document_BT + 1, torch.ones_like(document_BT, dtype=length_BT.dtype)).gather(1, document_BT + 1)
    return features_BTF + (torch.rand_like(features_BTF) - 0.5) * (noise * 512 / length_BT).unsqueeze(-1).to(features_BTF.dtype)
