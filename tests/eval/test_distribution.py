"""The test of distributions: its own distribution under the null, its power, and its sampling settings."""

from __future__ import annotations

import math

import pytest
import torch
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.eval.distribution import chi_square_tail, detectable, places, power_of, uniformity

from .tiny import tiny


def test_tails_are_those_of_the_tables() -> None:
    for statistic, freedom, tail in ((3.841, 1, 0.05), (18.307, 10, 0.05), (43.820, 19, 0.001)):
        assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-3)


def test_the_null_is_rejected_as_often_as_stated_and_the_stated_shift_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    trials, count, level = 400, 600, 0.05
    null = [uniformity(torch.rand(count, generator=generator, dtype=torch.float64).tolist(), level) for _ in range(trials)]
    rejected = sum(test is not None and not test.passed for test in null) / trials
    assert abs(rejected - level) < 3 * math.sqrt(level * (1 - level) / trials)
    # The hardest shift of the stated total variation: every other bin has a little more, the others a little less.
    shift = detectable(count, 20, level, 0.95)
    found = 0
    for _ in range(200):
        u = torch.rand(count, generator=generator, dtype=torch.float64)
        pair, within = (u * 10).long(), (u * 10) % 1
        fuller = (1 + 2 * shift) / 2
        moved = torch.where(within < fuller, within / fuller / 2, 0.5 + (within - fuller) / (1 - fuller) / 2)
        test = uniformity(((pair + moved) / 10).tolist(), level)
        found += test is not None and not test.passed
    assert found / 200 > 0.9 and found / 200 < 0.995
    assert power_of(0.0, 19, level) == pytest.approx(level, rel=1e-3)


def test_plain_sampling_is_uniform_under_filters_and_penalties_and_others_are_not() -> None:
    target = tiny()
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=2.5, seed=3)
    prompts = [[5, 9, 33], [7, 12], [44]]
    out = Engine(target).generate(prompts, params, 120)
    right = uniformity([u for p, t in zip(prompts, out.tokens, strict=True) for u in places(target, p, t, params, 0)])
    other = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, seed=3)
    wrong = uniformity([u for p, t in zip(prompts, out.tokens, strict=True) for u in places(target, p, t, other, 0)])
    assert right is not None and right.passed and right.tokens == 3 * 119
    assert wrong is not None and not wrong.passed  # without the penalty that was used
    assert uniformity([0.5] * 19) is None
