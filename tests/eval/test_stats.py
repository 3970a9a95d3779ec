"""Bootstrap intervals: exact small cases, coverage against a known ratio, and clear errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from draftsmith import UserError
from draftsmith.eval.stats import Interval, expanded_tail, mean_ratio_interval, paired_ratio_interval, student_quantile


def test_value_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    speed = paired_ratio_interval([10, 100], [1, 20], [10, 100], [2, 20])
    assert speed.value == pytest.approx((110 / 21) / (110 / 22), rel=1e-12)
    assert mean_ratio_interval([1, 9], [1, 3]).value == 2.5  # the mean of the ratios would be 2


def test_two_prompts_have_the_three_outcomes_of_the_exact_bootstrap() -> None:
    """Two prompts are drawn as (1,1), (1,2), (2,2) with probabilities 1/4, 1/2, 1/4: the quantiles are known exactly."""
    numerators, denominators = [2.0, 8.0], [1.0, 2.0]  # ratios 2, 10/3, 4
    assert mean_ratio_interval(numerators, denominators, level=0.95) == Interval(10 / 3, 2.0, 4.0)
    # At a level of 0.05, Student's t of one degree of freedom is 0.0787, times sqrt(2): 0.456 .. 0.544 of the resamples, inside the middle half.
    assert mean_ratio_interval(numerators, denominators, level=0.05) == Interval(10 / 3, 10 / 3, 10 / 3)
    assert mean_ratio_interval(numerators, denominators, level=0.5) == Interval(10 / 3, 2.0, 4.0)  # 0.079 .. 0.921, where the percentile has 0.25


def test_three_prompts_match_the_enumerated_bootstrap() -> None:
    tokens_a, seconds_a = np.array([30.0, 50, 20]), np.array([1.0, 2, 1.5])
    tokens_b, seconds_b = np.array([30.0, 52, 18]), np.array([2.5, 4, 3])
    every = [list(draw) for draw in itertools.product(range(3), repeat=3)]
    ratios = [(tokens_a[d].sum() / seconds_a[d].sum()) / (tokens_b[d].sum() / seconds_b[d].sum()) for d in every]
    got = paired_ratio_interval(list(tokens_a), list(seconds_a), list(tokens_b), list(seconds_b), resamples=20_000, level=0.5)
    # 27 equally likely draws: with 20,000 resamples each outcome's frequency is within 0.005 of its probability (4 standard errors). The interval
    # cuts off Phi(-sqrt(3/2) * 0.8165) = 0.1587 (t of two degrees of freedom at 0.75), inside the 5th draw of the sorted ones by more than that.
    exact = sorted(ratios)
    assert got.lo == pytest.approx(exact[math.floor(0.1587 * 27)], rel=1e-12)
    assert got.hi == pytest.approx(exact[math.floor((1 - 0.1587) * 27)], rel=1e-12)


def simulated_run(rng: np.random.Generator, prompts: int, ratio: float) -> tuple[list[float], list[float], list[float], list[float]]:
    """Both decoders answer the same prompts; A needs 1/ratio of B's expected time. Difficulty (spread 0.5) slows both, noise is 0.1 each."""
    tokens = rng.integers(20, 128, prompts).astype(float)
    difficulty = rng.lognormal(0.0, 0.5, prompts)
    noise_a, noise_b = rng.lognormal(0.0, 0.1, (2, prompts))
    seconds_a, seconds_b = tokens * difficulty * noise_a / ratio, tokens * difficulty * noise_b
    return list(tokens), list(seconds_a), list(tokens), list(seconds_b)


@pytest.mark.parametrize(("prompts", "level", "least", "most"), [(32, 0.95, 0.93, 0.97), (64, 0.95, 0.93, 0.97), (40, 0.80, 0.76, 0.84)])
def test_interval_covers_the_true_ratio_as_often_as_it_says(prompts: int, level: float, least: float, most: float) -> None:
    """2,500 simulated runs with a known ratio: a binomial standard error of 0.004 at 95 %, 0.008 at 80 %.

    The interval's own coverage here is 94.2 % (8,000 runs). One of plain percentiles covers 92.4 % at 32 prompts; a wrong level lies far outside.
    """
    rng, truth, repetitions = np.random.default_rng(7), 2.4, 2500
    covered = 0
    for repetition in range(repetitions):
        interval = paired_ratio_interval(*simulated_run(rng, prompts, truth), resamples=600, seed=repetition, level=level)
        covered += interval.lo <= truth <= interval.hi
    assert least <= covered / repetitions <= most


def test_student_quantiles_are_those_of_the_tables() -> None:
    for freedom, table in {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 10: 2.228, 31: 2.040}.items():
        assert student_quantile(0.975, freedom) == pytest.approx(table, rel=2e-3)
    assert expanded_tail(0.95, 1000) == pytest.approx(0.025, abs=2e-4) and expanded_tail(0.95, 8) < 0.01


def test_tau_interval_covers_the_true_mean() -> None:
    """The same, for tokens / forwards: rounds that accept 0..4 tokens by a geometric law whose mean is known. Same tolerance."""
    rng, accept, repetitions = np.random.default_rng(11), 0.6, 400
    truth = 1 + sum(accept**i for i in range(1, 5))
    covered = 0
    for repetition in range(repetitions):
        forwards = rng.integers(5, 40, 40)
        tokens = [float((1 + np.minimum(4, rng.geometric(1 - accept, n) - 1)).sum()) for n in forwards]
        interval = mean_ratio_interval(tokens, [float(n) for n in forwards], resamples=400, seed=repetition)
        covered += interval.lo <= truth <= interval.hi
    error = 3 * math.sqrt(0.95 * 0.05 / repetitions)
    assert 0.95 - error - 0.02 <= covered / repetitions <= 0.95 + error


def test_pairing_removes_what_the_prompts_have_in_common() -> None:
    """Difficulty varies five times as much as the noise: shuffling B's prompts (the same sums, no pairing) must widen the interval at least twice."""
    rng = np.random.default_rng(3)
    tokens_a, seconds_a, tokens_b, seconds_b = simulated_run(rng, 64, 2.0)
    order = rng.permutation(64)
    paired = paired_ratio_interval(tokens_a, seconds_a, tokens_b, seconds_b)
    unpaired = paired_ratio_interval(tokens_a, seconds_a, [tokens_b[i] for i in order], [seconds_b[i] for i in order])
    assert unpaired.value == pytest.approx(paired.value)
    assert unpaired.hi - unpaired.lo > 2 * (paired.hi - paired.lo)


def test_constant_data_gives_a_zero_width_interval() -> None:
    assert paired_ratio_interval([64] * 9, [0.5] * 9, [64] * 9, [1.25] * 9) == Interval(2.5, 2.5, 2.5)  # exact in binary, so exactly zero
    interval = mean_ratio_interval([3.3] * 50, [1.1] * 50)
    assert interval.hi - interval.lo < 1e-12  # 1.1 is not exact in binary: sums of it round in the last place
    assert interval.value == pytest.approx(3.0)


def test_same_seed_same_interval_other_seed_another() -> None:
    run = simulated_run(np.random.default_rng(0), 20, 2.0)
    assert paired_ratio_interval(*run, seed=5) == paired_ratio_interval(*run, seed=5)
    assert paired_ratio_interval(*run, seed=5) != paired_ratio_interval(*run, seed=6)


def test_prompts_that_decoded_nothing_are_left_out() -> None:
    assert mean_ratio_interval([4, 0, 6], [2, 0, 2]) == mean_ratio_interval([4, 6], [2, 2])


def test_one_prompt_has_no_width() -> None:
    assert mean_ratio_interval([6], [2]) == Interval(3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], [], []), r"at least one prompt, got tokens_a empty"),
        (([1, 2], [1, 2], [1], [1, 2]), r"tokens_b \[1\]"),
        (([[1]], [[1]], [[1]], [[1]]), r"shapes tokens_a \[1, 1\]"),
        (([1, 2], [1, math.nan], [1, 2], [1, 2]), r"seconds_a\[1\] = nan"),
        (([1, 2], [1, 2], [-1, 2], [1, 2]), r"tokens_b\[0\] = -1"),
        (([1, 2], [0, 0], [1, 2], [1, 2]), r"seconds_a = 0 over 2 prompts"),
        (([1, 0], [1, 1], [1, 1], [1, 1]), r"whose total is 0; measure more prompts"),
    ],
)
def test_wrong_input_is_named(arguments: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        paired_ratio_interval(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("resamples", "level"), [(0, 0.95), (100, 0.0), (100, 1.0), (100, 95)])
def test_wrong_settings_are_named(resamples: int, level: float) -> None:
    with pytest.raises(UserError, match=r"resamples|level"):
        mean_ratio_interval([1, 2], [1, 2], resamples=resamples, level=level)
