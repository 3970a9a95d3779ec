"""EAGLE-3's objective: soft cross-entropy over the training-time test (2503.01840), no feature loss.

Dims: B batch, T sequence, S unrolled steps, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ...decode.target import Step, Target
from ...heads.eagle3 import Eagle3
from ..losses import chunked_soft_cross_entropy


@dataclass
class Batch:
    """ids_BT, loss_BT (bool: the token is one that the drafter should learn to draft), position_BT, document_BT (-1: padding).

    sequence_B: a number for each row's content, if rows come again: row r of any batch with the same number is the same sequence.
    """

    ids_BT: Tensor
    loss_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor
    sequence_B: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Eagle3Objective:
    """steps: unrolled steps; step k weighs step_decay^k over the sum of all; normaliser: mean within each sequence first, or over all tokens."""

    steps: int = 4
    step_decay: float = 0.8
    normaliser: Literal["per_sequence", "per_token"] = "per_sequence"
    chunk_tokens: int = 1024

    def __call__(self, model: nn.Module, drafter: Eagle3, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics). `model` is `drafter`, possibly wrapped for several processes; `step`: the batch's features, if they are there already.
        `accuracy_0` is teacher-forced: not an acceptance rate.

        Logits are formed `chunk_tokens` places at a time: those of a whole batch, the drafter's or the target's, are never held.
        """
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        outputs = model(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, self.steps)
        size, total = batch.ids_BT.shape
        with torch.no_grad():
            judged_SBT = torch.stack([self._judged(batch, k) for k in range(self.steps)])
            # Only places that some step is judged at are looked at from here on: N of them, numbered row * T + position.
            place_N = judged_SBT.any(0).flatten().nonzero().squeeze(1)
            features_NH = step.hidden_BNH.flatten(0, 1)[place_N]
            chunks = torch.split(features_NH, self.chunk_tokens)
            best_N = torch.cat([target.logits(chunk).argmax(-1) for chunk in chunks]) if chunks else place_N
            judged_SN = judged_SBT.flatten(1)[:, place_N]
            weight_SN = self._weights(judged_SN & drafter.t2d[best_N], place_N // total, size)
        ids_V = drafter.draft_ids

        def probs(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                return target.logits(features_NH[start:stop])[:, ids_V].float().softmax(-1)

        # Step k's opinion about the token after place m stands at place m - 1 - k.
        hidden_SNH = torch.stack([hidden.flatten(0, 1)[(place_N - 1 - k).clamp(min=0)] for k, hidden in enumerate(outputs)])
        loss = chunked_soft_cross_entropy(drafter.norm(hidden_SNH), drafter.lm_head.weight, weight_SN, probs, self.chunk_tokens)
        return loss, {"accuracy_0": self._accuracy(drafter, hidden_SNH[0].detach(), best_N, judged_SN[0])}

    @staticmethod
    def _judged(batch: Batch, k: int) -> Tensor:
        """[B, T] places m whose target distribution, that of token m + 1, judges step k of pair m - 1 - k: one document, and a token to learn."""
        judged_BT = torch.zeros_like(batch.loss_BT)
        first, last = batch.document_BT[:, : -2 - k], batch.document_BT[:, 2 + k :]
        judged_BT[:, 1 + k : -1] = batch.loss_BT[:, 2 + k :] & (first == last) & (first >= 0)
        return judged_BT

    def _weights(self, kept_SN: Tensor, row_N: Tensor, rows: int) -> Tensor:
        """[S, N] float32 weights: a step's sum to its share of the decay, evenly over its tokens, or over its sequences first."""
        kept = kept_SN.float()
        if self.normaliser == "per_token":
            share_SN = kept / kept.sum(1, keepdim=True).clamp(min=1)
        else:
            count_SB = torch.zeros(kept.shape[0], rows, device=kept.device).index_add_(1, row_N, kept)
            share_SN = kept / count_SB.clamp(min=1)[:, row_N] / (count_SB > 0).sum(1, keepdim=True).clamp(min=1)
        decay_S = self.step_decay ** torch.arange(kept.shape[0], device=kept.device, dtype=torch.float32)
        return share_SN * (decay_S / decay_S.sum()).unsqueeze(1)

    @torch.no_grad()
    def _accuracy(self, drafter: Eagle3, hidden_NH: Tensor, best_N: Tensor, judged_N: Tensor, sample: int = 256) -> float:
        """Share of (the first `sample`) judged places whose draft argmax is the target's; those outside the draft vocabulary count as misses."""
        places = judged_N.nonzero().squeeze(1)[:sample]
        choice = drafter.draft_ids[drafter.logits(hidden_NH[places]).argmax(-1)]
        return float((choice == best_N[places]).float().mean()) if len(places) else 0.0
