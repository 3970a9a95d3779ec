"""Kept features are the computed ones, and never more than the limit."""

from __future__ import annotations

import pytest
import torch
from draftsmith.decode.target import Step, Target
from draftsmith.recipes.schema import TargetRef
from draftsmith.train.features import Features
from draftsmith.train.stream import SequenceStream, Share
from draftsmith.train.templates import Sample


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
