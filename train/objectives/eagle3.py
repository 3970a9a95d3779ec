"""EAGLE-3's objective: soft cross-entropy over the training-time test (2503.01840), no feature loss.

Dims: B batch, T sequence, S unrolled steps, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ...decode.target import Target
from ...heads.eagle3 import Eagle3
from ..losses import chunked_soft_cross_entropy


@dataclass
class Batch:
    """ids_BT, loss_BT (bool: the token is one that the drafter should learn to draft), position_BT, document_BT (-1: padding)."""

    ids_BT: Tensor
    loss_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor


@dataclass(frozen=True, kw_only=True)
class Eagle3Objective:
    """steps: unrolled steps; step k weighs step_decay^k over the sum of all; normaliser: mean within each sequence first, or over all tokens."""

    steps: int = 4
    step_decay: float = 0.8
    normaliser: Literal["per_sequence", "per_token"] = "per_sequence"
    chunk_tokens: int = 1024

    def __call__(self, model: nn.Module, drafter: Eagle3, target: Target, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics). `model` is `drafter`, possibly wrapped for several processes. `accuracy_k` is teacher-forced: not an acceptance rate."""
        step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        outputs = model(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, self.steps)
        size, total = batch.ids_BT.shape
        # Rows are laid end to end with S spare places each, so that "s tokens further on" never leaves the row.
        width = total + self.steps + 1
        hidden_SNH = torch.nn.functional.pad(torch.stack(outputs), (0, 0, 0, self.steps + 1)).flatten(1, 2)
        ids_V, slot = drafter.draft_ids, torch.arange(total, device=batch.ids_BT.device)
        probs_NV, known_N = torch.zeros(size * width + self.steps, ids_V.numel(), device=ids_V.device), []
        target_BN = torch.zeros(size, width + self.steps, dtype=torch.int64, device=ids_V.device)
        with torch.no_grad():
            for row in range(size):
                logits_TV = target.logits(step.hidden_BNH[row]).float()
                # Place n holds the distribution that pair n at step 0 is judged by: the target's at position n + 1.
                probs_NV[row * width : row * width + total - 1] = logits_TV[1:, ids_V].softmax(-1)
                best_T = logits_TV.argmax(-1)
                target_BN[row, : total - 1] = best_T[1:]
                known_N.append(drafter.t2d[best_T])
            known_BT = torch.stack(known_N)
            weights = []
            for k in range(self.steps):
                # Pair t at step k predicts token t + 2 + k from the target's distribution at t + 1 + k.
                judged = torch.zeros(size, width, dtype=torch.bool, device=ids_V.device)
                stop = total - 2 - k
                if stop > 0:
                    same = batch.document_BT[:, :stop] == batch.document_BT[:, 2 + k :]
                    judged[:, :stop] = batch.loss_BT[:, 2 + k :] & same & (batch.document_BT[:, :stop] >= 0)
                inside = torch.zeros_like(judged)
                inside[:, : max(stop, 0)] = known_BT[:, 1 + k : total - 1]
                weights.append((judged, judged & inside))
            scale = sum(self.step_decay**k for k in range(self.steps))
            weight_SN = torch.stack([self.step_decay**k / scale * self._normalised(w) for k, (_, w) in enumerate(weights)]).flatten(1)
        loss = chunked_soft_cross_entropy(drafter.norm(hidden_SNH), drafter.lm_head.weight, weight_SN, lambda a, b: probs_NV[a:b], self.chunk_tokens)
        return loss, self._accuracy(drafter, hidden_SNH, target_BN, weights, slot)

    def _normalised(self, kept_BW: Tensor) -> Tensor:
        kept = kept_BW.float()
        if self.normaliser == "per_token":
            return kept / kept.sum().clamp(min=1)
        rows = (kept.sum(1, keepdim=True) > 0).sum().clamp(min=1)
        return kept / kept.sum(1, keepdim=True).clamp(min=1) / rows

    @torch.no_grad()
    def _accuracy(
        self, drafter: Eagle3, hidden_SNH: Tensor, target_BN: Tensor, weights: list[tuple[Tensor, Tensor]], slot: Tensor
    ) -> dict[str, float]:
        """Share of judged places whose draft argmax is the target's, at step 0; those outside the draft vocabulary count as misses."""
        judged = weights[0][0]
        size, width = judged.shape
        hidden_BWH = hidden_SNH[0].view(size, width, -1)
        hits, places = 0, 0
        for row in range(min(size, 2)):
            choice = drafter.draft_ids[drafter.logits(hidden_BWH[row]).argmax(-1)]
            hits += int(((choice == target_BN[row, :width]) & judged[row]).sum())
            places += int(judged[row].sum())
        return {"accuracy_0": hits / max(places, 1)}
