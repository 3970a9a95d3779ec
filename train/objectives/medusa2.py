"""Medusa-2's objective (2401.10774, section 2.2.2): the heads' loss beside the target's own, both of which train an adapter of the target.

    loss = text_weight mean CE(token t + 1, p_t) + original_weight mean KL(o_t || p_t) + heads_weight sum_k step_decay^k mean CE(token t+1+k, q_kt)
p: the tuned target; o: the original, the adapter disabled (self-distillation, section 2.3.2); q_k: head k = 1, 2 ... The heads' sum is not divided by
the sum of its weights. Means are of places of one sequence first, or over all (`normaliser`).

Dims: B batch, T sequence, N places, H hidden, V the target's vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import UserError
from ...decode.target import Step, Target
from ...heads.adapter import TunableTarget
from ...heads.head import Head, scaled_rows
from ...heads.recurrent import check_output_layer
from ...heads.stepwise import StepwiseHead
from ..losses import chunked_loss
from .common import Batch, judged
from .medusa import MedusaObjective


@dataclass(frozen=True, kw_only=True)
class Medusa2Objective(MedusaObjective):
    """labels: of the heads; soft ones are the tuned target's, held constant. Metrics: also `text_loss` and `original_kl`, in nats a token.

    Raises UserError for a target whose logits are more than products with its output rows.
    """

    name: ClassVar[str] = "medusa2"
    tunes_target: ClassVar[bool] = True
    labels: Literal["soft", "hard"] = "hard"
    heads_weight: float = 0.2
    text_weight: float = 1.0
    original_weight: float = 1.0

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. A step that is given would have no gradient: features are always computed here."""
        assert isinstance(drafter, StepwiseHead) and isinstance(target, TunableTarget) and step is None
        check_output_layer(target)
        if getattr(target.config, "final_logit_softcapping", None) is not None:
            raise UserError("objective.name: wanted a target whose logits are not capped for medusa2, got one whose are")
        with target.original():
            before = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        tuned = target.features(batch.ids_BT, batch.position_BT, batch.document_BT, gradient=True)
        heads, metrics = self.of_heads(model, drafter, target, batch, tuned)
        scale = self.step_decay * sum(self.step_decay**k for k in range(drafter.heads))  # `weights` divides by the sum, and begins with k = 0

        place_N = judged(batch, 0).flatten().nonzero().squeeze(1)
        weight_1N = self.weights(torch.ones(1, len(place_N), device=place_N.device), *batch.sequence_of(place_N))
        hidden_1NH, before_NH = tuned.hidden_BNH.flatten(0, 1)[place_N].unsqueeze(0), before.hidden_BNH.flatten(0, 1)[place_N]
        token_N, rows_VH = batch.ids_BT.flatten()[place_N + 1], scaled_rows(target)

        def tokens(start: int, stop: int) -> Tensor:
            return functional.one_hot(token_N[start:stop], len(rows_VH)).float()

        @torch.no_grad()
        def original(start: int, stop: int) -> Tensor:
            return target.logits(before_NH[start:stop]).float().softmax(-1)

        text = chunked_loss("ce", hidden_1NH, rows_VH, weight_1N, tokens, self.chunk_tokens)
        moved = chunked_loss("kl", hidden_1NH, rows_VH, weight_1N, original, self.chunk_tokens)
        loss = self.heads_weight * scale * heads + self.text_weight * text + self.original_weight * moved
        return loss, {**metrics, "text_loss": float(text.detach()), "original_kl": float(moved.detach())}
