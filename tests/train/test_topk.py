"""Objectives judge by the target's likeliest tokens, if those were saved, as by all logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from draftsmith.decode.target import Step, Target, TopK
from draftsmith.heads.registry import new_head
from draftsmith.train.objectives import OBJECTIVES
from draftsmith.train.objectives.common import Places

from ..heads.tiny import VOCAB, ragged, tiny_target

METHOD = {"hass": "eagle1", "pard": "draft_model"}  # where it is not the objective's name


def step_of(target: Target, taps: tuple[int, ...]) -> Step:
    batch = ragged()
    target.set_taps(taps)
    return target.features(batch.ids_BT, batch.position_BT, batch.document_BT)


@pytest.mark.parametrize("name", sorted(name for name, objective in OBJECTIVES.items() if not objective.tunes_target))
def test_all_tokens_saved_is_the_same_as_logits(name: str) -> None:
    """Loss and gradients; the last hidden state is left out where the objective does not read it."""
    target, batch = tiny_target(), ragged()
    settings = {"draft_vocab_size": VOCAB} | ({"mask_token_id": 0} if name in ("dflash", "dspark") else {})
    settings = {"draft_model": {"num_layers": 1}, "pard": {"num_layers": 1, "block_size": 3}}.get(name, settings)
    drafter = new_head(METHOD.get(name, name), target, settings)
    if "draft_vocab_size" in settings:
        drafter.set_draft_vocabulary(torch.arange(7, 7 + VOCAB), target)
    with torch.no_grad():  # some heads start with layers of zeros, which have no gradients behind them
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    objective, plain = OBJECTIVES[name].of({}), step_of(target, drafter.taps)
    saved = dataclasses.replace(plain, topk=TopK.of(target.logits(plain.hidden_BNH), target.vocab_size))
    if not objective.reads_hidden:
        saved.hidden_BNH = plain.hidden_BNH[..., :0]
    results = []
    for step in (plain, saved):
        torch.manual_seed(3)  # anchors and noise
        drafter.zero_grad()
        loss, metrics = objective(drafter, drafter, target, batch, step)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
        results.append((loss.detach(), gradient, metrics))
    (want, want_gradient, _), (got, gradient, metrics) = results
    assert float(want) > 0 and float(want_gradient.norm()) > 0
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, want_gradient, atol=1e-5, rtol=1e-4)
    assert metrics["topk_missing"] == pytest.approx(0, abs=1e-5)


def test_few_tokens_saved_are_renormalised_and_the_rest_is_stated() -> None:
    target, batch, ids_V = tiny_target(), ragged(), torch.arange(7, 7 + VOCAB)
    step = step_of(target, (1,))
    logits = target.logits(step.hidden_BNH)
    step.topk = TopK.of(logits, 3)
    judged_SBT = batch.loss_BT.unsqueeze(0)
    places = Places.of(judged_SBT, step)
    for vocabulary in (ids_V, None):
        probs = places.probs(target, vocabulary, 0, len(places.place_N))
        for row, place in enumerate(places.place_N.tolist()):
            plain = logits.flatten(0, 1)[place].softmax(-1)
            best = sorted(range(len(plain)), key=lambda token: -float(plain[token]))[:3]
            columns = ids_V.tolist() if vocabulary is not None else list(range(target.vocab_size))
            kept = {columns.index(token): float(plain[token]) for token in best if token in columns}
            want = torch.zeros(len(columns))
            for column, mass in kept.items():
                want[column] = mass / sum(kept.values())
            torch.testing.assert_close(probs[row], want, atol=1e-5, rtol=1e-4)
            assert places.choices(target, torch.tensor([row])).item() == best[0]
            assert places.topk is not None
            assert float(places.topk.missing[row]) == pytest.approx(1 - sum(float(plain[token]) for token in best), abs=1e-5)
