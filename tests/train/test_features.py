"""Kept features are the computed ones, and never more than the limit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from draftsmith.decode.target import Step, Target
from draftsmith.heads.registry import new_head
from draftsmith.recipes.schema import TargetRef
from draftsmith.train.features import Features
from draftsmith.train.objectives import common
from draftsmith.train.objectives.common import judged
from draftsmith.train.objectives.eagle3 import Eagle3Objective
from draftsmith.train.stream import SequenceStream, Share
from draftsmith.train.templates import Sample

from ..heads.tiny import ragged, random_ids, tiny_target, whole


def test_kept_features_are_the_computed_ones_and_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.load(TargetRef().location)
    target.set_taps((2, 5))
    generator = torch.Generator().manual_seed(0)
    sequences = [Sample(torch.randint(5, 2000, (9 + 3 * i,), generator=generator).tolist(), [(4, 9 + 3 * i)]) for i in range(6)]
    calls: list[int] = []
    compute = Target.features

    def counted(self: Target, *arguments: torch.Tensor) -> Step:
        calls.append(1)
        return compute(self, *arguments)

    monkeypatch.setattr(Target, "features", counted)
    stream = SequenceStream(sequences, Share(batch_size=2), seed=0)
    plenty, none, little = Features(target, 2**30), Features(target), Features(target, 50_000)
    for _ in range(9):  # three epochs, other pairs in each
        (batch,) = next(stream)
        want, got = none.of(batch), plenty.of(batch)
        real = batch.document_BT >= 0
        assert want.taps_BNF is not None and got.taps_BNF is not None and got.taps_BNF.shape == want.taps_BNF.shape
        torch.testing.assert_close(got.taps_BNF[real], want.taps_BNF[real], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.hidden_BNH[real], want.hidden_BNH[real], atol=1e-4, rtol=1e-4)
        assert little.of(batch).hidden_BNH.shape == want.hidden_BNH.shape
    row = (target.hidden_size * 3) * 4  # bytes a token: two taps and the last hidden state
    assert plenty.bytes == row * sum(len(ids) for ids, _ in sequences) and 0 < little.bytes <= 50_000
    before = len(calls)
    plenty.of(next(stream)[0])
    assert len(calls) == before


def test_kept_choices_are_those_that_the_logits_tell_and_change_no_loss() -> None:
    """From the second epoch on an objective forms no logits of the whole vocabulary: it would fail here."""
    target = tiny_target()
    head = new_head("eagle3", target, {"draft_vocab_size": 60})
    head.set_draft_vocabulary(torch.arange(20, 80), target)
    target.set_taps(head.taps)
    batch = dataclasses.replace(ragged(), sequence_B=[0, 1])
    kept, objective = Features(target, 2**30, choices=True), Eagle3Objective(steps=2)
    first = kept.of(batch)
    want, _ = objective(head, head, target, batch, dataclasses.replace(first, best_BN=None))
    again = kept.of(batch)
    places = judged(batch, 0)
    assert again.best_BN is not None and places.any() and not bool((again.best_BN == 0).all())
    assert torch.equal(again.best_BN[places], target.logits(again.hidden_BNH)[places].argmax(-1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "greedy_choices", lambda *_: pytest.fail("formed again"))
        got, _ = objective(head, head, target, batch, again)
    torch.testing.assert_close(got, want)
    known = head.t2d[again.best_BN[places]]
    assert 0 < int(known.sum()) < len(known)  # else the draft vocabulary would decide nothing here


def test_a_whole_draft_vocabulary_is_known_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch, looked_at = tiny_target(), whole(random_ids(4, 100)), list[int]()
    head = new_head("eagle3", target, {})
    target.set_taps(head.taps)
    choose = common.greedy_choices

    def counted(target: Target, features: torch.Tensor) -> torch.Tensor:
        looked_at.append(len(features))
        return choose(target, features)

    monkeypatch.setattr(common, "greedy_choices", counted)
    Eagle3Objective(steps=1)(head, head, target, batch)
    assert looked_at == [256]  # what the metric looks at, of 392 places
