"""PARD's objective (2504.18583): the draft predicts from every place the next token, and with masks behind that place those after it.

    loss = sum_d w_d mean_a D(p_{a+d}, q_{a,d})         w_d ~ step_decay^d, d = 0 .. block_size - 1
p_t: the target's distribution of token t + 1; q_{a,d}: the draft's, which knows the text up to place a and d masks. Conditional drop: of the places
that depth d - 1 kept, depth d keeps some at random, max(keep_ratio^d, keep_min) of all, so that every entry finds those of its place before it.

Dims: B batch, T sequence, M mask entries of a row, S depths, N = B T places, X predictions (of places, then of entries), P judged ones, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ... import UserError
from ...decode.target import Step, Target
from ...heads.draft_model import DraftModel
from ...heads.head import Head
from ..losses import chunked_loss
from .common import Batch, judged
from .draft_model import DraftModelObjective


def kept_places(batch: Batch, depths: int, keep_ratio: float, keep_min: float) -> Tensor:
    """[S, B, T] the places that each depth keeps. All tokens that a kept prediction skips, and its own, are of one document and to be learned."""
    kept_BT = judged(batch, 0)
    chance_BT = torch.rand(kept_BT.shape, device=kept_BT.device).masked_fill(~kept_BT, 2.0)
    rank_BT = chance_BT.argsort(dim=1).argsort(dim=1)
    count_B1 = kept_BT.sum(1, keepdim=True)
    kept = [kept_BT]
    for depth in range(1, depths):
        later_BT = torch.zeros_like(kept_BT)  # place a + depth is judged too, in a's document
        later_BT[:, :-depth] = judged(batch, 0)[:, depth:] & (batch.document_BT[:, depth:] == batch.document_BT[:, :-depth])
        few_B1 = (count_B1 * max(keep_ratio**depth, keep_min)).ceil()
        kept.append(kept[-1] & later_BT & (rank_BT < few_B1))
    return torch.stack(kept)


def entries_of(kept_SBT: Tensor) -> tuple[Tensor, Tensor]:
    """(anchor [B, M], depth [B, M]) of what depths 1 .. keep, by place and then by depth; -1 and 0 where a row has fewer entries than another."""
    kept_BX = kept_SBT[1:].permute(1, 2, 0).flatten(1)
    most = int(kept_BX.sum(1).max())
    order_BM = (~kept_BX).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    real_BM, deeper = kept_BX.gather(1, order_BM), kept_SBT.shape[0] - 1
    return (order_BM // deeper).masked_fill(~real_BM, -1), (order_BM % deeper + 1).masked_fill(~real_BM, 0)


@dataclass(frozen=True, kw_only=True)
class PardObjective(DraftModelObjective):
    """keep_ratio, keep_min: of conditional drop; 1 and 1 keep everything. The metrics are `DraftModelObjective`'s, of depth 0, and `entries`, mask
    entries for every token of text.
    """

    name: ClassVar[str] = "pard"
    keep_ratio: float = 0.7
    keep_min: float = 0.2

    def entries_per_token(self, block_size: int) -> float:
        """Mask entries for every token that is learned, of texts much longer than a block: the rest of a text holds fewer."""
        return sum(max(self.keep_ratio**depth, self.keep_min) for depth in range(1, block_size))

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. Logits of a whole batch, the drafter's or the target's, are never held."""
        assert isinstance(drafter, DraftModel)
        if drafter.config.block_size is None:
            raise UserError("drafter.block_size: wanted the tokens that one pass drafts, as the objective is pard, got null")
        rows, total = batch.ids_BT.shape
        kept_SBT = kept_places(batch, min(drafter.config.block_size, total - 1), self.keep_ratio, self.keep_min)
        anchor_BM, depth_BM = entries_of(kept_SBT)
        hidden_BXH = model(batch.ids_BT, batch.position_BT, batch.document_BT, anchor_BM, depth_BM)

        row_B1 = torch.arange(rows, device=anchor_BM.device).unsqueeze(1)
        weight_SN = self.weights(kept_SBT.flatten(1), *batch.sequence_of(torch.arange(rows * total, device=anchor_BM.device)))
        entry_N = (row_B1 * total + anchor_BM.clamp(min=0)).flatten()
        weight_X = torch.cat([weight_SN[0], weight_SN[depth_BM.flatten(), entry_N] * (anchor_BM >= 0).flatten()])
        place_X = torch.cat([torch.arange(rows * total, device=entry_N.device), entry_N + depth_BM.flatten()])
        chosen_P = weight_X.nonzero().squeeze(1)
        chosen_P = chosen_P[place_X[chosen_P].argsort(stable=True)]  # so that a chunk asks for few distributions more than it has places
        place_N, of_P = torch.unique(place_X[chosen_P], return_inverse=True)
        judges = self.judges(drafter, target, batch, place_N, step)

        def probs(start: int, stop: int) -> Tensor:
            low, high = int(of_P[start]), int(of_P[stop - 1]) + 1
            return judges.probs(low, high)[of_P[start:stop] - low]

        hidden_XH = torch.cat([hidden_BXH[:, :total].flatten(0, 1), hidden_BXH[:, total:].flatten(0, 1)])
        weight_SP = (weight_X[chosen_P] * judges.known_N[of_P]).unsqueeze(0)
        output = drafter.output_rows()
        loss = chunked_loss(self.loss, hidden_XH[chosen_P].unsqueeze(0), output, weight_SP, probs, self.chunk_tokens, **self.loss_settings)
        metrics = judges.metrics(hidden_XH[place_N], drafter)
        return loss, metrics | {"entries": float(kept_SBT[1:].sum() / kept_SBT[0].sum().clamp(min=1))}
