"""Objectives of draft models against the same written out with transformers, place by place: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.heads.draft_model import DraftModel
from draftsmith.train.losses import make_loss
from draftsmith.train.objectives.draft_model import DraftModelObjective
from draftsmith.train.objectives.pard import PardObjective, entries_of, kept_places

from ..heads.test_draft_model import draft_of
from ..heads.tiny import ragged, random_ids, tiny_target, whole

MASK = 3


def gradient(draft: DraftModel, loss: torch.Tensor) -> torch.Tensor:
    draft.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])


def compare(draft: DraftModel, got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradient(draft, got), gradient(draft, want), atol=2e-5, rtol=1e-3)


SETTINGS: list[dict[str, Any]] = [{"loss": "kl"}, {"loss": "jsd", "beta": 0.2}, {"loss": "mixed", "ce_weight": 0.5}, {"loss": "ce", "labels": "hard"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["loss"])
def test_distillation_is_the_mean_of_the_loss_over_what_is_to_be_learned(settings: dict[str, Any]) -> None:
    """Ragged rows, two documents in one of them: each document's mean first."""
    target, batch = tiny_target(), ragged()
    draft = draft_of("llama", target)
    objective = DraftModelObjective(chunk_tokens=8, **settings)
    got, metrics = objective(draft, draft, target, batch)
    loss = make_loss(objective.loss, **objective.loss_settings)
    means = []
    for row in range(2):
        for first, stop in ((0, 24),) if row == 0 else ((0, 8), (8, 17)):
            losses = []
            ids = batch.ids_BT[row : row + 1, first:stop]
            with torch.no_grad():
                probs = target.model(ids).logits[0].softmax(-1)
            logits = draft.causal_lm(ids).logits[0]
            for place in range(stop - first - 1):
                if batch.loss_BT[row, first + place + 1]:
                    p = torch.nn.functional.one_hot(ids[0, place + 1], 97).float() if objective.labels == "hard" else probs[place]
                    losses.append(loss.plain(logits[place], p))
            means.append(torch.stack(losses).mean())
    compare(draft, got, torch.stack(means).mean())
    assert 0 <= metrics["overlap"] <= 1


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_pard_is_the_loss_of_every_kept_place_and_depth_computed_alone(labels: Any) -> None:
    target = tiny_target()
    draft = draft_of("llama", target, block_size=4, mask_token_id=MASK)
    batch = whole(random_ids(2, 10))
    batch.loss_BT[0, :3] = False
    batch.document_BT[1, 6:] = 1
    batch.position_BT = torch.stack([torch.arange(10), torch.tensor([*range(6), *range(4)])])
    objective = PardObjective(chunk_tokens=8, labels=labels, step_decay=0.5, loss="kl")
    torch.manual_seed(5)
    kept = kept_places(batch, 4, 0.7, 0.2)
    torch.manual_seed(5)
    got, metrics = objective(draft, draft, target, batch)
    assert metrics["entries"] == pytest.approx(float(kept[1:].sum() / kept[0].sum()))
    loss, terms = make_loss("kl"), []
    for depth in range(4):
        means = []
        for row, start, stop in ((0, 0, 10), (1, 0, 6), (1, 6, 10)):
            losses = []
            for place in kept[depth, row, start:stop].nonzero().squeeze(1).tolist():
                place += start
                text = batch.ids_BT[row, start : place + 1].tolist()
                q = draft.causal_lm(torch.tensor([[*text, *[MASK] * depth]])).logits[0, -1]
                true = batch.ids_BT[row, start : place + depth + 1]
                with torch.no_grad():
                    p = target.model(true.unsqueeze(0)).logits[0, -1].softmax(-1)
                if labels == "hard":
                    p = torch.nn.functional.one_hot(batch.ids_BT[row, place + depth + 1], 97).float()
                losses.append(loss.plain(q, p))
            means += [torch.stack(losses).mean()] if losses else []
        terms.append(0.5**depth * torch.stack(means).mean())
    compare(draft, got, torch.stack(terms).sum() / (1 + 0.5 + 0.25 + 0.125))


def test_conditional_drop_keeps_what_later_depths_need() -> None:
    batch = whole(random_ids(2, 101))
    batch.loss_BT[1, 50:] = False
    kept = kept_places(batch, 8, 0.7, 0.2)
    assert kept[0].sum(1).tolist() == [100, 49]
    for depth in range(1, 8):
        assert (kept[depth] <= kept[depth - 1]).all()  # an entry finds those of its place before it
        wanted = max(0.7**depth, 0.2) * 100
        assert wanted - 12 <= int(kept[depth, 0].sum()) <= wanted + 1  # at the end of a text there is nothing that deep to predict
        assert not kept[depth, 1, 49 - depth :].any()
    assert kept_places(batch, 3, 1.0, 1.0).sum((1, 2)).tolist() == [149, 147, 145]
    anchor_BM, depth_BM = entries_of(kept)
    for row in range(2):
        entries = {(int(a), int(d)) for a, d in zip(anchor_BM[row], depth_BM[row], strict=True) if a >= 0}
        assert entries == {(place, d) for d in range(1, 8) for place in kept[d, row].nonzero().squeeze(1).tolist()}


def test_settings_of_another_loss_and_a_missing_block_are_refused() -> None:
    with pytest.raises(UserError, match=r"objective\.beta: wanted null, as it belongs to the loss jsd, not to kl, got 0\.5"):
        DraftModelObjective(beta=0.5)
    target = tiny_target()
    draft = draft_of("llama", target)
    with pytest.raises(UserError, match=r"drafter\.block_size: wanted the tokens that one pass drafts"):
        PardObjective()(draft, draft, target, ragged())
