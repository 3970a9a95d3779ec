"""Train the predictor that decides a draft's length (`heads/acceptance.py`), for a draft model that is finished and stays as it is.

    draftsmith train quickstart/draft drafter.predictor=true                  after the draft, with the same data
    draftsmith eval runs/quickstart-draft/drafter --length predicted          decode with it

What it is trained on is computed once: hidden states of the draft, and how much of its distribution there overlaps with the target's. Of the texts,
the last fifth trains no layer: one half of it calibrates, the other says how well that went (ECE, the mean distance between what is predicted and
what is so, in ten equal steps of prediction).

Dims: B batch, T sequence, N places, H hidden, V tokens that draft and target share.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..decode.target import Target
from ..heads.acceptance import AcceptancePredictor
from ..heads.registry import open_drafter
from ..heads.standalone import Standalone
from .data import Sequences, collate
from .losses import acceptance
from .objectives.common import judged

ROWS, CHUNK = 8, 1024  # sequences a forward pass; places whose distributions are compared at once
MOST_PLACES = 2**17


def add_predictor(folder: Path, target: Target, sequences: Sequences, *, whole: bool, seed: int = 0) -> dict[str, float]:
    """Train one for the draft model in `folder`, and write it there. Returns figures: see `train_predictor`. whole: prompts' tokens too."""
    drafter, _ = open_drafter(folder, target)
    assert isinstance(drafter, Standalone)
    places = [overlaps(drafter, target, [s.whole if whole else s for s in part]) for part in split(sequences)]
    predictor, figures = train_predictor(*places, seed=seed)
    predictor.save(folder)
    return figures


def split(sequences: Sequences) -> tuple[Sequences, Sequences, Sequences]:
    """(texts that train, that calibrate, that tell)."""
    tenth = max(1, len(sequences) // 10)
    return sequences[: -2 * tenth] or sequences, sequences[-2 * tenth : -tenth] or sequences, sequences[-tenth:]


@torch.no_grad()
def overlaps(drafter: Standalone, target: Target, sequences: Sequences, most: int = MOST_PLACES) -> tuple[Tensor, Tensor]:
    """(hidden states of the draft [N, H], sum_v min(p_v, q_v) of what they predict [N]) at what is learned of the sequences, `most` at most."""
    draft, hidden, overlap, found = drafter.draft, list[Tensor](), list[Tensor](), 0
    target.set_taps(())
    draft.set_taps(())
    for start in range(0, len(sequences), ROWS):
        batch = collate(sequences[start : start + ROWS])
        where = tuple(part.to(target.device) for part in (batch.ids_BT, batch.position_BT, batch.document_BT))
        place_N = judged(batch, 0).flatten().nonzero().squeeze(1).to(target.device)
        q_NH, p_NH = (model.features(*where).hidden_BNH.flatten(0, 1)[place_N] for model in (draft, target))
        for q_CH, p_CH in zip(torch.split(q_NH, CHUNK), torch.split(p_NH, CHUNK), strict=True):
            p_CV = target.logits(p_CH).float().softmax(-1)[:, : drafter.vocab_size]
            overlap.append(acceptance(draft.logits(q_CH)[:, : drafter.vocab_size], p_CV))
        hidden.append(q_NH.float())
        found += len(place_N)
        if found >= most:
            break
    return torch.cat(hidden)[:most], torch.cat(overlap)[:most]


def train_predictor(
    training: tuple[Tensor, Tensor],
    calibration: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    steps: int = 600,
    batch: int = 256,
    seed: int = 0,
) -> tuple[AcceptancePredictor, dict[str, float]]:
    """(predictor, figures) from (hidden states [N, H], overlaps [N]) of each kind of text.

    Figures, of the test's places: `ece_uncalibrated`, `ece`, `overlap` (its mean), `correlation` of prediction and overlap.
    """
    hidden_NH, overlap_N = training
    torch.manual_seed(seed)
    predictor = AcceptancePredictor(hidden_NH.shape[1]).to(hidden_NH.device)
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    for _ in range(steps):
        chosen = torch.randint(len(hidden_NH), (batch,), device=hidden_NH.device)
        loss = functional.binary_cross_entropy_with_logits(predictor.raw(hidden_NH[chosen]), overlap_N[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    predictor.eval().requires_grad_(False)
    before = calibration_error(predictor(test[0]), test[1])
    calibrate(predictor, *calibration)
    predicted = predictor(test[0])
    correlation = float(torch.corrcoef(torch.stack([predicted, test[1]]))[0, 1])
    return predictor, {
        "ece_uncalibrated": before,
        "ece": calibration_error(predicted, test[1]),
        "overlap": float(test[1].mean()),
        "correlation": correlation if math.isfinite(correlation) else 0.0,
    }


def calibrate(predictor: AcceptancePredictor, hidden_NH: Tensor, overlap_N: Tensor) -> None:
    """Set scale and shift to those of least cross-entropy (Platt's, which is convex): its gradient is zero where predictions are right on average."""
    logit_N = predictor.raw(hidden_NH).double()
    line = torch.tensor([1.0, 0.0], dtype=torch.float64, device=logit_N.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([line], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(line[0] * logit_N + line[1], overlap_N.double())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    predictor.scale.copy_(line[0].detach())
    predictor.shift.copy_(line[1].detach())


def calibration_error(predicted_N: Tensor, so_N: Tensor, steps: int = 10) -> float:
    """Expected calibration error: over equal steps of what is predicted, the mean of |mean prediction - mean of what is so|, by their sizes."""
    step_N = (predicted_N * steps).long().clamp(max=steps - 1)
    gap_S = torch.zeros(steps, dtype=torch.float64, device=so_N.device).index_add_(0, step_N, (predicted_N - so_N).double())
    return float(gap_S.abs().sum() / max(1, len(so_N)))
