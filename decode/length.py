"""How long a draft should be, decided round by round. No policy changes what is generated: with shared noise any draft is verified exactly.

A policy decides before the round how many levels to draft at most, and after each level whether to go on. It never looks at what verification will
say (non-anticipating): only at earlier rounds, and at what has been drafted, which is kept. One policy serves the whole batch.

Dims: D draft depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .. import UserError


class DraftLength(Protocol):
    """A policy. `needs_scores`: whether `goes_on` wants figures of the draft, which cost a transfer from the device at every level."""

    needs_scores: bool

    def reset(self) -> None:
        """A new request."""

    def limit(self, most: int) -> int:
        """Levels to draft in this round, 1 .. most."""

    def goes_on(self, probability: float, entropy: float) -> bool:
        """Whether to draft another level after a token of this path probability (the batch's greatest) and draft entropy in nats (its least)."""

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """A round is over: levels drafted, and how many of them each row accepted."""


@dataclass(frozen=True)
class Latencies:
    """Measured milliseconds: `level`, of drafting one level, and `verify`, of one verification by number of tokens (at least two points)."""

    level: float
    verify: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if len(self.verify) < 2 or [n for n, _ in self.verify] != sorted({n for n, _ in self.verify}):
            raise UserError(f"latencies: wanted verification times of at least two sizes, ascending, got {list(self.verify)}")

    def round(self, levels: int, tokens: int | None = None) -> float:
        """Milliseconds of a round: levels drafted, tokens verified (None: a chain's); between the points, and past the last two, linear."""
        tokens = levels + 1 if tokens is None else tokens
        for (low, before), (high, after) in zip(self.verify, self.verify[1:], strict=False):
            if tokens <= high or high == self.verify[-1][0]:
                return levels * self.level + before + (after - before) * (tokens - low) / (high - low)
        raise AssertionError("unreachable: there are two points")


class Additive:
    """transformers' heuristic (assisted generation): two levels more when all were accepted, one fewer when not; from `start` on."""

    needs_scores = False

    def __init__(self, start: int = 5) -> None:
        if start < 1:
            raise UserError(f"draft length: wanted a start of at least 1, got {start}")
        self._start = self._now = start

    def reset(self) -> None:
        """Begin at `start`."""
        self._now = self._start

    def limit(self, most: int) -> int:
        """What the last rounds led to."""
        return max(1, min(most, self._now))

    def goes_on(self, probability: float, entropy: float) -> bool:
        """Always."""
        return True

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """By the row that accepted most: the others do not lose by it."""
        self._now = drafted + 2 if max(accepted, default=0) >= drafted else max(1, drafted - 1)


class Acceptance:
    """The length with the most expected tokens a millisecond, given the acceptance rate of the last rounds and measured latencies.

    With acceptance a of one token, E[tokens] = (1 - a^(d+1)) / (1 - a) of a chain of d (2211.17192, eq. 1). a is an exponential average, weight
    `memory` on the past, over all judged draft tokens, from `start` on.
    """

    needs_scores = False

    def __init__(self, latencies: Latencies, *, start: float = 0.7, memory: float = 0.95) -> None:
        if not 0 < start < 1 or not 0 <= memory < 1:
            raise UserError(f"draft length: wanted start in (0, 1) and memory in [0, 1), got {start} and {memory}")
        self._latencies, self._start, self._memory = latencies, start, memory
        self.rate = start

    def reset(self) -> None:
        """Forget the last request's acceptance."""
        self.rate = self._start

    def limit(self, most: int) -> int:
        """The best of 1 .. most."""
        return max(range(1, most + 1), key=lambda d: sum(self.rate**i for i in range(d + 1)) / self._latencies.round(d))

    def goes_on(self, probability: float, entropy: float) -> bool:
        """Always."""
        return True

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Judged were the accepted tokens and the first rejected one."""
        for count in accepted:
            for hit in [1.0] * count + [0.0] * (count < drafted):
                self.rate = min(0.999, self._memory * self.rate + (1 - self._memory) * hit)


class Confidence:
    """Stop when no row's draft is likelier than `threshold` to be accepted to its end, by the draft's own probabilities."""

    needs_scores = True

    def __init__(self, threshold: float = 0.3) -> None:
        if not 0 < threshold < 1:
            raise UserError(f"draft length: wanted a threshold in (0, 1), got {threshold}")
        self._threshold = threshold

    def reset(self) -> None:
        """Nothing is remembered."""

    def limit(self, most: int) -> int:
        """No limit."""
        return most

    def goes_on(self, probability: float, entropy: float) -> bool:
        """While the path is likely enough."""
        return probability >= self._threshold

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Nothing is learned."""


class Predicted(Confidence):
    """`Confidence` by what a trained predictor says of acceptance, in place of the draft's own probabilities. The drafter has to have one."""


class Entropy(Confidence):
    """Stop when the draft's entropy H bounds acceptance below the threshold: 1 - sqrt(factor * H) < threshold (AdaEDL, 2410.18351)."""

    def __init__(self, threshold: float = 0.3, factor: float = 0.2) -> None:
        super().__init__(threshold)
        if not (math.isfinite(factor) and factor > 0):
            raise UserError(f"draft length: wanted a factor > 0, got {factor}")
        self._factor = factor

    def goes_on(self, probability: float, entropy: float) -> bool:
        """While the bound is high enough."""
        return 1 - math.sqrt(self._factor * entropy) >= self._threshold


class Expected:
    """How much of a drafted chain to verify: as much as raises the expected tokens a millisecond, by each token's chance and measured latencies.

    A chain whose first d tokens are accepted with probabilities P_1 >= P_2 ... gives 1 + P_1 + ... + P_d tokens. One more is verified as long as that
    pays. Whether it is depends on its own chance and those before, so that nothing is dropped for what comes after it. For drafters that tell
    chances which come true: DSpark's, calibrated (2607.05147).
    """

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def choose(self, paths: Sequence[Sequence[float]]) -> int:
        """Tokens to verify, at least 1. paths: P_1, P_2 ... of each row, equally many."""
        levels = len(paths[0])
        gains = [sum(row[level] for row in paths) for level in range(levels)]
        tokens, length = len(paths) + gains[0], 1
        while length < levels:
            more = tokens + gains[length]
            if more / self._latencies.round(levels, length + 2) <= tokens / self._latencies.round(levels, length + 1):
                break
            tokens, length = more, length + 1
        return length


class CostAware:
    """How large a dynamic tree pays: levels and nodes are added as long as they gain more tokens than their measured latency costs (2606.01813).

    E = 1 + scale * (sum of the nodes' path probabilities) tokens are expected of a tree. A level is added while the most that it can gain, relative
    to E, exceeds its cost relative to the round's; of the sizes that are verified (root included), the one with the most expected tokens a
    millisecond is kept. `scale` corrects the draft's own probabilities by what the last rounds accepted, weight `memory` on the past.
    """

    def __init__(self, latencies: Latencies, *, sizes: Sequence[int] = (2, 4, 8, 16, 32, 64, 128), memory: float = 0.95) -> None:
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 2:
            raise UserError(f"cost-aware tree: wanted ascending sizes of at least 2, root included, got {list(sizes)}")
        if not 0 <= memory < 1:
            raise UserError(f"cost-aware tree: wanted memory in [0, 1), got {memory}")
        self._latencies, self._sizes, self._memory = latencies, tuple(sizes), memory
        self.reset()

    def reset(self) -> None:
        """A new request."""
        self.scale = 1.0
        self._predicted = 0.0

    def goes_on(self, levels: int, tokens: int, mass: float, frontier: float) -> bool:
        """Whether to draft another level. mass: path probabilities of the best nodes so far, which are verified as `tokens`; frontier: of the last
        level's nodes, the most that their children can add."""
        expected = 1 + self.scale * mass
        return self.scale * frontier / expected > self._latencies.level / self._latencies.round(levels, tokens)

    def choose(self, mass: Sequence[float], levels: int) -> int:
        """Draft nodes to keep; mass[n]: path probabilities of the best n together, n = 0 .. all of them."""
        sizes = [size for size in self._sizes if size <= len(mass)] or [len(mass) - 1]
        nodes = max((size - 1 for size in sizes), key=lambda n: (1 + self.scale * mass[n]) / self._latencies.round(levels, n + 1))
        self._predicted = mass[nodes]
        return nodes

    def observe(self, accepted: Sequence[int]) -> None:
        """A round is over: draft tokens that each row accepted."""
        if accepted and self._predicted > 0:
            ratio = sum(accepted) / len(accepted) / self._predicted
            self.scale = self._memory * self.scale + (1 - self._memory) * min(ratio, 4.0)
