"""Objective of heads with parameters of their own for every depth: Medusa-1's (2401.10774, equation 1), with soft or hard labels.

    loss = sum_k w_k mean_t CE(label of token t + 2 + k, softmax(lm_head_k x_k[t])),     w_k = step_decay^k / sum_j step_decay^j

Dims: B batch, T sequence, S heads, N judged places, C chunk, H hidden, V draft vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...decode.target import Step, Target
from ...heads.head import Head
from ...heads.hydra import Hydra
from ...heads.medusa import Medusa
from ...heads.mlp_speculator import MLPSpeculator
from ...heads.stepwise import StepwiseHead
from ..losses import chunked_soft_cross_entropy
from .common import Batch, Objective, Places, judged


@dataclass(frozen=True, kw_only=True)
class MedusaObjective(Objective):
    """labels: "soft", the target's distributions over the draft vocabulary, or "hard", the text's tokens, as in the paper.

    Places whose label (the distribution's best token, or the token) lies outside the draft vocabulary carry no loss, but count as misses in
    `accuracy_0`, which is of head 0 and teacher-forced.
    """

    name: ClassVar[str] = "medusa"
    trains: ClassVar[tuple[type[nn.Module], ...]] = (Medusa, Hydra, MLPSpeculator)
    labels: Literal["soft", "hard"] = "soft"

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. Logits of a whole batch, the drafter's or the target's, are never held."""
        assert isinstance(drafter, StepwiseHead)
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        return self.of_heads(model, drafter, target, batch, step)

    def of_heads(self, model: nn.Module, drafter: StepwiseHead, target: Target, batch: Batch, step: Step) -> tuple[Tensor, dict[str, float]]:
        """The loss and the metrics, from features."""
        outputs = model(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT)
        back = [1 + k for k in range(drafter.heads)]
        places = Places.of(torch.stack([judged(batch, b) for b in back]), step)
        token_N = batch.ids_BT.flatten()[places.place_N + 1]
        known_N = places.known_N(drafter, target) if self.labels == "soft" else drafter.t2d[token_N]
        weight_SN = self.weights(places.judged_SN & known_N, *batch.sequence_of(places.place_N))
        ids_V, draft_N = drafter.draft_ids, (drafter.t2d.cumsum(0) - 1)[token_N].clamp(min=0)

        @functools.lru_cache(maxsize=1)  # a batch of one chunk is the same for all heads; of several, each head forms them again
        def probs(start: int, stop: int) -> Tensor:
            if self.labels == "soft":
                return places.probs(target, ids_V, start, stop)
            return functional.one_hot(draft_N[start:stop], len(ids_V)).float()

        hidden_SNH = places.gathered(outputs, back)
        losses = [
            chunked_soft_cross_entropy(hidden_SNH[k : k + 1], drafter.lm_head(k).weight, weight_SN[k : k + 1], probs, self.chunk_tokens)
            for k in range(drafter.heads)
        ]
        return torch.stack(losses).sum(), {"accuracy_0": self._accuracy(drafter, target, hidden_SNH[0].detach(), places), **places.metrics()}

    @staticmethod
    @torch.no_grad()
    def _accuracy(drafter: StepwiseHead, target: Target, hidden_NH: Tensor, places: Places, sample: int = 256) -> float:
        """Share of (the first `sample`) places judged for head 0 whose draft argmax is the target's."""
        chosen = places.judged_SN[0].nonzero().squeeze(1)[:sample]
        choice = drafter.draft_ids[drafter.lm_head(0)(hidden_NH[chosen]).argmax(-1)]
        return float((choice == places.choices(target, chosen)).float().mean()) if len(chosen) else 0.0
