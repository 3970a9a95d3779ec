"""Distillation of a draft model (DistillSpec, 2310.08461): a divergence between the target's and the draft's distributions of every token.

    loss = mean_t D(p_t, q_t)          D: one of `train/losses.py`; p, q: of token t + 1, over the tokens that both models have
What text that is over is the data's affair: given, the target's own, or the draft's (`train/on_policy.py`).

Dims: B batch, T sequence, S = 1 step, N judged places, C chunk, H hidden, V shared tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import UserError
from ...decode.target import Step, Target
from ...heads.draft_model import DraftModel
from ...heads.head import Head
from ..losses import acceptance, chunked_loss, make_loss
from .common import Batch, Objective, Places, judged

_SETTINGS = {"beta": ("jsd", "beta"), "loss_decay": ("lk_lambda", "decay"), "ce_weight": ("mixed", "ce"), "tv_weight": ("mixed", "tv")}


@dataclass(frozen=True, kw_only=True)
class DraftModelObjective(Objective):
    """labels: "soft", the target's distributions, or "hard", the text's tokens: plain language modelling, for which the target is not run.

    beta is of the loss jsd, loss_decay of lk_lambda, ce_weight and tv_weight of mixed; null: their own. Metrics, teacher-forced: `accuracy_0`, the
    share of places where both would choose the same token (soft), or the draft the text's (hard); `overlap`, the mean of sum_v min(p, q).
    """

    name: ClassVar[str] = "draft_model"
    trains: ClassVar[tuple[type[nn.Module], ...]] = (DraftModel,)
    step_decay: float = 1.0
    loss: str = "kl"
    labels: Literal["soft", "hard"] = "soft"
    beta: float | None = None
    loss_decay: float | None = None
    ce_weight: float | None = None
    tv_weight: float | None = None

    def __post_init__(self) -> None:
        make_loss(self.loss, **self.loss_settings)  # wrong ones are found out now

    @property
    def loss_settings(self) -> dict[str, Any]:
        """What the loss is asked for. Raises UserError for a setting of another loss."""
        given = {name: value for name in _SETTINGS if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            if _SETTINGS[name][0] != self.loss:
                raise UserError(f"objective.{name}: wanted null, as it belongs to the loss {_SETTINGS[name][0]}, not to {self.loss}, got {value}")
        return {_SETTINGS[name][1]: value for name, value in given.items()}

    def __call__(self, model: nn.Module, drafter: Head, target: Target, batch: Batch, step: Step | None = None) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics): see `Objective`. Logits of a whole batch, the drafter's or the target's, are never held."""
        assert isinstance(drafter, DraftModel)
        hidden_BTH = model(batch.ids_BT, batch.position_BT, batch.document_BT)
        place_N = judged(batch, 0).flatten().nonzero().squeeze(1)
        judges = self.judges(drafter, target, batch, place_N, step)
        weight_SN = self.weights(judges.known_N.unsqueeze(0), *batch.sequence_of(place_N))
        hidden_SNH = hidden_BTH.flatten(0, 1)[place_N].unsqueeze(0)
        loss = chunked_loss(self.loss, hidden_SNH, drafter.output_rows(), weight_SN, judges.probs, self.chunk_tokens, **self.loss_settings)
        return loss, judges.metrics(hidden_SNH[0], drafter)

    def judges(self, drafter: DraftModel, target: Target, batch: Batch, place_N: Tensor, step: Step | None) -> Judges:
        """What the draft's predictions at places (row * T + position, ascending) are judged by."""
        if self.labels == "hard":
            return _Text(batch.ids_BT.flatten()[place_N + 1], drafter.config.draft_vocab_size)
        step = step or target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        saved = None if step.topk is None else step.topk.flat(place_N)
        places = Places(place_N, torch.ones_like(place_N, dtype=torch.bool).unsqueeze(0), step.hidden_BNH.flatten(0, 1)[place_N], saved)
        return _Distributions(places, target, drafter.draft_ids)


class Judges:
    """Distributions by which predictions are judged. known_N: whether a place can be (its label is a token that the draft has)."""

    known_N: Tensor

    def probs(self, start: int, stop: int) -> Tensor:
        """[C, V] those of places start .. stop - 1."""
        raise NotImplementedError

    @torch.no_grad()
    def metrics(self, hidden_NH: Tensor, drafter: DraftModel, sample: int = 256) -> dict[str, float]:
        """Of the first `sample` places."""
        count = min(sample, len(hidden_NH))
        if not count:
            return {"accuracy_0": 0.0, "overlap": 0.0}
        p_CV, z_CV = self.probs(0, count), hidden_NH[:count].detach() @ drafter.output_rows().detach().to(hidden_NH.dtype).t()
        return {"accuracy_0": float((p_CV.argmax(-1) == z_CV.argmax(-1)).float().mean()), "overlap": float(acceptance(z_CV, p_CV).mean())}


class _Text(Judges):
    """The text's own tokens."""

    def __init__(self, label_N: Tensor, vocabulary: int) -> None:
        self._label_N, self._vocabulary, self.known_N = label_N.clamp(max=vocabulary - 1), vocabulary, label_N < vocabulary

    def probs(self, start: int, stop: int) -> Tensor:
        return functional.one_hot(self._label_N[start:stop], self._vocabulary).float()


class _Distributions(Judges):
    """The target's distributions over the shared tokens, renormalised."""

    def __init__(self, places: Places, target: Target, ids_V: Tensor) -> None:
        self._places, self._target, self._ids_V, self.known_N = places, target, ids_V, places.judged_SN[0]

    def metrics(self, hidden_NH: Tensor, drafter: DraftModel, sample: int = 256) -> dict[str, float]:
        return super().metrics(hidden_NH, drafter, sample) | self._places.metrics()

    def probs(self, start: int, stop: int) -> Tensor:
        return self._places.probs(self._target, self._ids_V, start, stop)
