"""Intervals for ratios of sums, by a bootstrap over prompts.

A speed is total tokens / total seconds and tau is total tokens / total forwards: ratios of sums, never means of per-prompt ratios (which would give
a ten-token answer the weight of a thousand-token one). The prompt is what is drawn again, because tokens inside one answer are not independent. Two
decoders that answered the same prompts are drawn together (paired): a hard prompt is slow for both, and that part of the variation cancels.

A plain percentile interval is too narrow on few prompts: it has the spread of the sample, not of what it was drawn from, and no allowance for that
spread being estimated (92 % for 95 % at 32 prompts). Its percentiles are moved outward by Student's t and sqrt(n / (n - 1)) (Hesterberg, "What
teachers should know about the bootstrap", 2015, the expanded percentile interval).

Shapes: P prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import UserError

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A figure and its bootstrap interval, all three in the unit of the figure. lo <= hi."""

    value: float
    lo: float
    hi: float


def paired_ratio_interval(
    tokens_a: Sequence[float],
    seconds_a: Sequence[float],
    tokens_b: Sequence[float],
    seconds_b: Sequence[float],
    *,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Speed of A over speed of B: (sum tokens_a / sum seconds_a) / (sum tokens_b / sum seconds_b).

    Each argument holds P figures, one a prompt, in the same order of prompts. A prompt on which neither side decoded anything (all four are 0: it
    ended at the token that the prefill gives) is no observation and is left out. One prompt alone gives lo = hi: there is no variation to draw from.

    Raises UserError on empty input, lengths that differ, a figure that is negative or not finite, or totals that are 0.
    """
    columns = _columns({"tokens_a": tokens_a, "seconds_a": seconds_a, "tokens_b": tokens_b, "seconds_b": seconds_b})
    totals_r4, prompts = _resampled_totals(columns, resamples=resamples, seed=seed, level=level)
    ratios_r = (totals_r4[:, 0] / totals_r4[:, 1]) / (totals_r4[:, 2] / totals_r4[:, 3])
    return _interval(ratios_r, level, prompts)


def mean_ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """sum numerators / sum denominators, such as tau = tokens / target forwards or a speed = tokens / seconds.

    P figures each, one a prompt. A prompt where both are 0 is left out. Raises UserError as `paired_ratio_interval` does.
    """
    columns = _columns({"numerators": numerators, "denominators": denominators})
    totals_r2, prompts = _resampled_totals(columns, resamples=resamples, seed=seed, level=level)
    return _interval(totals_r2[:, 0] / totals_r2[:, 1], level, prompts)


def _columns(named: dict[str, Sequence[float]]) -> dict[str, Floats]:
    columns = {name: np.asarray(values, dtype=np.float64) for name, values in named.items()}
    lengths = {name: column.shape for name, column in columns.items()}
    if any(column.ndim != 1 for column in columns.values()) or len(set(lengths.values())) != 1:
        got = ", ".join(f"{name} {list(shape)}" for name, shape in lengths.items())
        raise UserError(f"interval: wanted one figure a prompt, the same number everywhere, got shapes {got}")
    for name, column in columns.items():
        if column.size == 0:
            raise UserError(f"interval: wanted at least one prompt, got {name} empty; measure some prompts first")
        if not np.isfinite(column).all() or (column < 0).any():
            worst = int(np.flatnonzero(~np.isfinite(column) | (column < 0))[0])
            raise UserError(f"interval: wanted finite figures >= 0, got {name}[{worst}] = {column[worst]}")
    return columns


def _resampled_totals(columns: dict[str, Floats], *, resamples: int, seed: int, level: float) -> tuple[Floats, int]:
    """([1 + R, columns]: row 0 the totals of the sample itself, then those of R samples of P prompts drawn with replacement; P)."""
    if resamples < 1:
        raise UserError(f"interval: wanted resamples >= 1, got {resamples}")
    if not 0 < level < 1:
        raise UserError(f"interval: wanted a level between 0 and 1, got {level}")
    figures_pc = np.stack(list(columns.values()), axis=1)
    figures_pc = figures_pc[figures_pc.any(axis=1)]
    for name, total in zip(columns, figures_pc.sum(axis=0), strict=True):
        if total <= 0:
            raise UserError(f"interval: wanted a total above 0, got {name} = 0 over {len(next(iter(columns.values())))} prompts; nothing was decoded")
    # How often each prompt is drawn is multinomial, so that R resamples are one matrix product instead of an [R, P, columns] gather.
    prompts = len(figures_pc)
    draws_rp = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    weights_rp = np.concatenate([np.ones((1, prompts)), draws_rp.astype(np.float64)])
    totals_rc: Floats = weights_rp @ figures_pc
    if (totals_rc <= 0).any():
        raise UserError(f"interval: wanted figures above 0 on most prompts, got a resample of the {prompts} whose total is 0; measure more prompts")
    return totals_rc, prompts


def _interval(ratios_r: Floats, level: float, prompts: int) -> Interval:
    tail = expanded_tail(level, prompts)
    lo, hi = np.quantile(ratios_r[1:], [tail, 1 - tail])
    return Interval(float(ratios_r[0]), float(lo), float(hi))


def expanded_tail(level: float, prompts: int) -> float:
    """The share of the resamples to cut off at either end, for an interval of this level over so many prompts."""
    if prompts < 2:
        return 0.0
    t = student_quantile((1 + level) / 2, prompts - 1)
    return NormalDist().cdf(-math.sqrt(prompts / (prompts - 1)) * t)


def student_quantile(probability: float, freedom: int) -> float:
    """Of Student's t, probability >= 1/2: exact for 1 and 2 degrees of freedom, else Cornish and Fisher's expansion (error below 2 % from 3 on)."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4)
    )
