"""Parts of the training loop that no run of the command line shows by itself."""

from __future__ import annotations

import itertools
import math

import pytest
from draftsmith.train.run import _lr_factor


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_learning_rate_follows_steps_or_time(kind: str) -> None:
    """A fractional step stands for the share of the time that is spent: the curve is the same."""
    steps, warmup = 100, 10
    by_step = [_lr_factor(kind, step, steps, warmup) for step in range(steps)]
    assert by_step[0] == pytest.approx(0.1) and by_step[9] == 1 and max(by_step) == 1
    assert all(a >= b for a, b in itertools.pairwise(by_step[9:]))
    between = _lr_factor(kind, 55.5, steps, warmup)
    assert min(by_step[55:57]) <= between <= max(by_step[55:57])
    if kind == "cosine":
        assert by_step[55] == pytest.approx(0.5 * (1 + math.cos(math.pi * 45 / 90)))
    if kind != "constant":
        assert by_step[-1] < 0.07
