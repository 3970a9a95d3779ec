"""DFlash's objective (2602.06036): soft cross-entropy of blocks that start at sampled anchors, later positions weighing less.

    loss = sum_s w_s mean CE(target's distribution of token p + 1 + s, prediction s of the block at anchor p),     w_s ~ step_decay^s

Dims: B batch, T sequence, A anchors, S predictions of a block, X all predictions (judged or not), P judged ones, N places, H hidden,
V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...decode.target import Step, Target
from ...heads.dflash import DFlash
from ...heads.head import Head
from ..losses import chunked_soft_cross_entropy
from .common import Batch, Objective, Places, judged


def sample_anchors(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """(columns [B, A] ascending, whether they are anchors [B, A]), A as many as any row has.

    Up to `count` of each sequence, drawn evenly from those whose next token is to be learned.
    """
    chance_BT = torch.rand(batch.ids_BT.shape, device=batch.ids_BT.device).masked_fill(~judged(batch, 0), -1.0)
    if int(batch.document_BT.max()) > 0:
        return _of_each_document(chance_BT, batch.document_BT, count)
    chance_BA, anchors_BA = chance_BT.topk(min(count, chance_BT.shape[1]), dim=1)
    anchors_BA, order = anchors_BA.sort(dim=1)
    return anchors_BA, chance_BA.gather(1, order) >= 0


def _of_each_document(chance_BT: Tensor, document_BT: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`sample_anchors` of rows with several documents: the `count` best chances of each."""
    # Sorted by document, then by falling chance (in 0 .. 1); what is no anchor comes last.
    key_BT = (document_BT.double() + 1 - chance_BT).masked_fill(chance_BT < 0, torch.inf)
    order_BT = key_BT.argsort(dim=1)
    column_T = torch.arange(chance_BT.shape[1], device=chance_BT.device)
    sorted_BT = document_BT.gather(1, order_BT)
    new_BT = torch.cat([torch.ones_like(sorted_BT[:, :1], dtype=torch.bool), sorted_BT[:, 1:] != sorted_BT[:, :-1]], dim=1)
    rank_BT = column_T - torch.where(new_BT, column_T, 0).cummax(dim=1).values
    kept_BT = torch.zeros_like(new_BT).scatter(1, order_BT, (rank_BT < count) & (chance_BT.gather(1, order_BT) >= 0))
    last = chance_BT.shape[1] - 1
    anchors_BT = torch.where(kept_BT, column_T, last + 1).sort(dim=1).values[:, : max(1, int(kept_BT.sum(1).max()))]
    return anchors_BT.clamp(max=last), anchors_BT <= last


def judged_predictions(batch: Batch, anchors_BA: Tensor, valid_BA: Tensor, steps: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """(places [B, A, S], whether they judge [B, A, S]). Prediction s at anchor p is judged at place p + first + s.

    That is by the distribution of the token after it. All tokens after the anchor up to that one lie in its document and are to be learned: no
    block is judged beyond a gap.
    """
    total = batch.ids_BT.shape[1]
    token_BAS = anchors_BA.unsqueeze(2) + 1 + torch.arange(first + steps, device=anchors_BA.device)
    here = token_BAS.clamp(max=total - 1).flatten(1)
    same = batch.document_BT.gather(1, here).view(token_BAS.shape) == batch.document_BT.gather(1, anchors_BA).unsqueeze(2)
    good = batch.loss_BT.gather(1, here).view(token_BAS.shape) & same & (token_BAS < total) & valid_BA.unsqueeze(2)
    row_B11 = torch.arange(len(anchors_BA), device=anchors_BA.device).view(-1, 1, 1)
    place_BAS = row_B11 * total + (token_BAS - 1).clamp(max=total - 1)
    return place_BAS[:, :, first:], good.int().cumprod(2).bool()[:, :, first:]


def places_of(place_X: Tensor, kept_X: Tensor, batch: Batch, step: Step, drafter: Head, target: Target) -> tuple[Places, Tensor]:
    """(the places that judge any prediction, which predictions are to be learned: those whose place's greedy choice the draft vocabulary has)."""
    judges_BT = torch.zeros_like(batch.loss_BT)
    judges_BT.view(-1)[place_X[kept_X]] = True
    places = Places.of(judges_BT.unsqueeze(0), step)
    known = judges_BT.flatten()
    known[places.place_N] = places.known_N(drafter, target)
    return places, kept_X & known[place_X]


def in_order_of_places(place_X: Tensor, weight_X: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """(predictions that weigh anything, by the place that judges them [P]; the number of that place among `places` [P])."""
    chosen_P = weight_X.nonzero().squeeze(1)
    chosen_P = chosen_P[place_X[chosen_P].argsort(stable=True)]
    return chosen_P, torch.searchsorted(places.place_N, place_X[chosen_P])


def soft_loss(
    hidden_XH: Tensor, place_X: Tensor, weight_X: Tensor, rows_VH: Tensor, drafter: Head, places: Places, target: Target, chunk: int
) -> Tensor:
    """sum_x weight_x CE(target's distribution at place x over the draft vocabulary, softmax(rows hidden_x)).

    A chunk of predictions asks for few distributions more than it has places, as predictions are taken in their order.
    """
    chosen_P, of_P = in_order_of_places(place_X, weight_X, places)
    ids_V = drafter.draft_ids

    def probs(start: int, stop: int) -> Tensor:
        low, high = int(of_P[start]), int(of_P[stop - 1]) + 1
        return places.probs(target, ids_V, low, high)[of_P[start:stop] - low]

    return chunked_soft_cross_entropy(hidden_XH[chosen_P].unsqueeze(0), rows_VH, weight_X[chosen_P].unsqueeze(0), probs, chunk)


@torch.no_grad()
def agreement(
    hidden_XH: Tensor, place_X: Tensor, chosen_P: Tensor, rows_VH: Tensor, drafter: Head, places: Places, target: Target, sample: int = 256
) -> float:
    """Share of (the first `sample`) chosen predictions whose argmax is the target's choice; ones outside the draft vocabulary are misses."""
    chosen_P = chosen_P[:sample]
    if not len(chosen_P):
        return 0.0
    choice_P = drafter.draft_ids[(hidden_XH[chosen_P] @ rows_VH.t()).argmax(-1)]
    return float((choice_P == places.choices(target, torch.searchsorted(places.place_N, place_X[chosen_P]))).float().mean())


@dataclass(frozen=True, kw_only=True)
class DFlashObjective(Objective):
    """anchors: blocks a sequence and step. step_decay: exp(-1 / gamma) of the paper, whose gamma is 4 for blocks of 7 or 8, 7 for blocks of 16.

    Places whose greedy choice lies outside the draft vocabulary carry no loss, but count as misses in `accuracy_0` (which is teacher-forced).
    """

    name: ClassVar[str] = "dflash"
    trains: ClassVar[tuple[type[nn.Module], ...]] = (DFlash,)
    step_decay: float = math.exp(-1 / 4)
    anchors: int = 32

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. Logits of a whole batch, the drafter's or the target's, are never held."""
        assert isinstance(drafter, DFlash)
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None, "target.set_taps() comes first"
        anchors_BA, valid_BA = sample_anchors(batch, self.anchors)
        hidden_BASH = model(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, anchors_BA)
        place_BAS, kept_BAS = judged_predictions(batch, anchors_BA, valid_BA, hidden_BASH.shape[2])
        place_X, hidden_XH, rows_VH = place_BAS.flatten(), hidden_BASH.flatten(0, 2), drafter.output_rows()
        places, learned_X = places_of(place_X, kept_BAS.flatten(), batch, step, drafter, target)
        weight_X = self.block_weights(learned_X.view(kept_BAS.shape), batch, anchors_BA).flatten()
        loss = soft_loss(hidden_XH, place_X, weight_X, rows_VH, drafter, places, target, self.chunk_tokens)
        first_P = kept_BAS[:, :, 0].flatten().nonzero().squeeze(1) * kept_BAS.shape[2]
        accuracy_0 = agreement(hidden_XH, place_X, first_P, rows_VH, drafter, places, target)
        return loss, {"accuracy_0": accuracy_0, **places.metrics()}

    def block_weights(self, kept_BAS: Tensor, batch: Batch, anchors_BA: Tensor) -> Tensor:
        """`Objective.weights` of blocks, [B, A, S]."""
        rows, anchors, steps = kept_BAS.shape
        place_BA = torch.arange(rows, device=kept_BAS.device).unsqueeze(1) * batch.ids_BT.shape[1] + anchors_BA
        weight_SN = self.weights(kept_BAS.flatten(0, 1).t(), *batch.sequence_of(place_BA.flatten()))
        return weight_SN.t().reshape(rows, anchors, steps)
