"""What objectives share: the batch, which predictions are judged by which of the target's distributions, and how they are weighed.

Dims: B batch, T sequence, S steps (of an unrolled head, or heads), N judged places, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ... import UserError
from ...decode.target import Step, Target, TopK
from ...heads.head import Head


@dataclass
class Batch:
    """ids_BT, loss_BT (bool: the token is one that the drafter should learn to draft), position_BT, document_BT (-1: padding).

    A row holds one sequence, or several that are packed, as documents 0, 1, .. of the row. sequence_B: a number for each row's content, if rows come
    again: row r of any batch with the same number is the same.
    """

    ids_BT: Tensor
    loss_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor
    sequence_B: list[int] | None = None

    def sequence_of(self, place_N: Tensor) -> tuple[Tensor, int]:
        """(the sequence that each place row * T + position lies in [N], more than the greatest of these numbers): packed ones count one by one."""
        per_row = int(self.document_BT.max()) + 1
        return place_N // self.ids_BT.shape[1] * per_row + self.document_BT.flatten()[place_N].clamp(min=0), len(self.ids_BT) * per_row


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """What training minimises. step_decay: step s weighs step_decay^s over the sum of all. normaliser: mean within each sequence first, or over all
    tokens. chunk_tokens: places whose logits are held at once.
    """

    step_decay: float = 0.8
    normaliser: Literal["per_sequence", "per_token"] = "per_sequence"
    chunk_tokens: int = 1024

    name: ClassVar[str]
    trains: ClassVar[tuple[type[nn.Module], ...]]  # the heads that it is for, not their subclasses
    reads_hidden: ClassVar[bool] = False  # whether it judges by the target's last hidden states too, and not by its distributions alone
    tunes_target: ClassVar[bool] = False  # whether it trains an adapter of the target too

    @abstractmethod
    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics). `model` is `drafter`, possibly wrapped for several processes; `step`: the batch's features, if they are there already.

        Teacher-forced metrics are no acceptance rates, and are not called so.
        """

    @classmethod
    def of(cls, settings: dict[str, object]) -> Self:
        """With these settings, None standing for the method's own. Raises UserError for one that this objective does not have."""
        given = {name: value for name, value in settings.items() if value is not None}
        known = {field.name for field in dataclasses.fields(cls)}
        for name in given:
            if name not in known:
                raise UserError(f"objective.{name}: wanted null, as the objective {cls.name} has no such setting, got {given[name]}")
        return cls(**given)  # type: ignore[arg-type]

    def weights(self, kept_SN: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
        """[S, N] float32 weights: a step's sum to its share of the decay, evenly over its tokens, or over its sequences first.

        sequence_N, sequences: see `Batch.sequence_of`.
        """
        kept = kept_SN.float()
        if self.normaliser == "per_token":
            share_SN = kept / kept.sum(1, keepdim=True).clamp(min=1)
        else:
            count_SB = torch.zeros(kept.shape[0], sequences, device=kept.device).index_add_(1, sequence_N, kept)
            share_SN = kept / count_SB.clamp(min=1)[:, sequence_N] / (count_SB > 0).sum(1, keepdim=True).clamp(min=1)
        decay_S = self.step_decay ** torch.arange(kept.shape[0], device=kept.device, dtype=torch.float32)
        return share_SN * (decay_S / decay_S.sum()).unsqueeze(1)


def judged(batch: Batch, back: int) -> Tensor:
    """[B, T] places m whose target distribution, that of token m + 1, judges a prediction made at place m - back.

    They lie in one document, and token m + 1 is one to learn.
    """
    judged_BT = torch.zeros_like(batch.loss_BT)
    if batch.ids_BT.shape[1] < back + 2:
        return judged_BT
    first, last = batch.document_BT[:, : batch.document_BT.shape[1] - 1 - back], batch.document_BT[:, 1 + back :]
    judged_BT[:, back:-1] = batch.loss_BT[:, 1 + back :] & (first == last) & (first >= 0)
    return judged_BT


@torch.no_grad()
def greedy_choices(target: Target, features_NH: Tensor) -> Tensor:
    """[N] the target's likeliest tokens, from its last hidden states. On a CPU few logits are held at a time: they are looked at once."""
    rows = 256 if features_NH.device.type == "cpu" else 1024
    parts = [target.logits(part).argmax(-1) for part in torch.split(features_NH, rows)] if len(features_NH) else []
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=features_NH.device)


@dataclass
class Places:
    """The places of a batch that some step is judged at: N of them, numbered row * T + position (place_N).

    judged_SN: by which steps. features_NH: the target's last hidden states there. topk: its likeliest tokens [N, K], if they were saved in place of
    the hidden states; distributions are then of these tokens alone. best_N: its own greedy choices, if they are known already.
    """

    place_N: Tensor
    judged_SN: Tensor
    features_NH: Tensor
    topk: TopK | None = None
    best_N: Tensor | None = None
    _reader: tuple[Tensor | None, Callable[[Tensor], Tensor]] | None = None

    @classmethod
    def of(cls, judged_SBT: Tensor, step: Step) -> Places:
        """Find them."""
        place_N = judged_SBT.any(0).flatten().nonzero().squeeze(1)
        judged_SN, features_NH = judged_SBT.flatten(1)[:, place_N], step.hidden_BNH.flatten(0, 1)[place_N]
        if step.topk is not None:
            topk = step.topk.flat(place_N)
            return cls(place_N, judged_SN, features_NH, topk, topk.ids[:, 0])
        return cls(place_N, judged_SN, features_NH, None, None if step.best_BN is None else step.best_BN.flatten()[place_N])

    def known_N(self, drafter: Head, target: Target) -> Tensor:
        """[N] whether the target's greedy choice is in the draft vocabulary. If that holds all tokens, no logits are formed to tell."""
        if drafter.sizes.draft_vocab_size == drafter.sizes.target_vocab_size:
            return torch.ones_like(self.place_N, dtype=torch.bool)
        if self.best_N is None:
            self.best_N = greedy_choices(target, self.features_NH)
        return drafter.t2d[self.best_N]

    def choices(self, target: Target, index: Tensor) -> Tensor:
        """The target's greedy choices at some places, given by their numbers among these."""
        return greedy_choices(target, self.features_NH[index]) if self.best_N is None else self.best_N[index]

    def gathered(self, hidden_SBT: list[Tensor], back: list[int]) -> Tensor:
        """[S, N, H] each step's hidden states at the places that predict what is judged here: place m - back[s]."""
        return torch.stack([hidden.flatten(0, 1)[(self.place_N - b).clamp(min=0)] for hidden, b in zip(hidden_SBT, back, strict=True)])

    @torch.no_grad()
    def probs(self, target: Target, ids_V: Tensor | None, start: int, stop: int) -> Tensor:
        """[C, V] the target's distributions over `ids_V` (ascending; None: the whole vocabulary), renormalised, of places start .. stop - 1.

        The one place where an objective asks for them: from all logits, or from the saved likeliest tokens (`TopK.probs`).
        """
        if self.topk is not None:
            return self.topk.flat(torch.arange(start, stop, device=self.place_N.device)).probs(ids_V, target.vocab_size)
        if self._reader is None or self._reader[0] is not ids_V:
            self._reader = ids_V, target.reader(ids_V)
        return self._reader[1](self.features_NH[start:stop]).float().softmax(-1)

    def metrics(self) -> dict[str, float]:
        """What is to be logged of the distributions: the mean probability of what was not saved, if not everything was."""
        if self.topk is None:
            return {}
        return {"topk_missing": float(self.topk.missing.mean()) if len(self.place_N) else 0.0}
