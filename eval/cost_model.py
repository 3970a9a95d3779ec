"""What limits a speed-up: a model of a round's cost, fitted to latencies that are measured on this machine.

    S = tau * t_ar / t_round        t_round(depth, nodes) = fixed + level * depth + node * nodes + t_verify(nodes + 1)

t_verify is a staircase: measured at some sizes, never falling, linear between them. The rest is fitted to whole rounds of a few shapes of draft, so
that other depths, tree sizes, batches and contexts can be predicted. `fixed` is what a round costs whatever its size: the engine's overhead, and the
start of a draft. From the same figures follow the acceptance below which drafting does not pay, the best length of a chain, and what even a perfect
drafter would gain.

    costs = CostModel((Condition(batch=1, context=128, t_ar=5.0, verify=((1, 4.6), (8, 6.4)), fixed=0.5, level=0.8),))
    costs.at(1, 128).speedup(tau=3.1, depth=4, nodes=10)

`python -m draftsmith.eval.cost_check DRAFTER` compares the predictions with measured rounds of sizes that were not fitted.

All latencies are milliseconds of the whole batch; draft nodes do not count the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from .. import UserError

Points = tuple[tuple[int, float], ...]
LONGEST = 64  # no draft of more tokens in a row is considered


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Latencies at one batch size and context length. t_ar: one plain decoding step. verify: {tokens a row: ms} of one verification, ascending.

    Raises UserError for latencies that are none, or fewer than two sizes of verification.
    """

    batch: int
    context: float
    t_ar: float
    verify: Points
    fixed: float
    level: float
    node: float = 0.0

    def __post_init__(self) -> None:
        sizes = [n for n, _ in self.verify]
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise UserError(f"cost model: wanted verification times of at least two sizes, ascending, got {list(self.verify)}")
        figures = [self.t_ar, self.fixed, self.level, self.node, *(ms for _, ms in self.verify)]
        if not all(math.isfinite(ms) and ms >= 0 for ms in figures) or self.t_ar == 0:
            raise UserError(f"cost model: wanted finite latencies >= 0 and a plain step above 0, got {figures}")

    def t_verify(self, tokens: float) -> float:
        """Of one verification of so many tokens a row; beyond the measured sizes as from the last but one to the last."""
        (low, before), (high, after) = next(((a, b) for a, b in pairwise(self.verify) if tokens <= b[0]), self.verify[-2:])
        return max(0.0, before + (after - before) * (tokens - low) / (high - low))

    def t_draft(self, depth: float) -> float:
        """Of drafting so many levels."""
        return self.level * depth

    def overhead(self, nodes: float) -> float:
        """Of a round, beside drafting and verification."""
        return self.fixed + self.node * nodes

    def round(self, depth: float, nodes: float) -> float:
        """Of a whole round."""
        return self.overhead(nodes) + self.t_draft(depth) + self.t_verify(nodes + 1)

    def speedup(self, tau: float, depth: float, nodes: float) -> float:
        """Over plain decoding, for this many tokens a round."""
        return tau * self.t_ar / self.round(depth, nodes)

    def ceiling(self, depth: float, nodes: float) -> float:
        """What a perfect drafter of this shape would gain: every round emits depth + 1 tokens."""
        return self.speedup(depth + 1, depth, nodes)

    def break_even_tau(self, depth: float, nodes: float) -> float:
        """Tokens a round below which plain decoding is faster."""
        return self.round(depth, nodes) / self.t_ar

    def break_even(self, depth: int) -> float | None:
        """The acceptance of one token above which a chain of this length pays; None if even a perfect one does not."""
        wanted = self.break_even_tau(depth, depth)
        if wanted > depth + 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if chain_tau([middle], depth) < wanted else (low, middle)
        return high

    def best_length(self, acceptance: Sequence[float], most: int) -> tuple[int, float]:
        """(length of a chain, 1 .. most, with the highest predicted speed-up; that speed-up). acceptance: conditional, see `chain_tau`."""
        return max(((d, self.speedup(chain_tau(acceptance, d), d, d)) for d in range(1, most + 1)), key=lambda pair: pair[1])

    def needed_anywhere(self, most: int) -> float | None:
        """The least acceptance of one token at which some chain of up to `most` tokens pays; None if none does."""
        found = [a for d in range(1, most + 1) if (a := self.break_even(d)) is not None]
        return min(found, default=None)

    def edges(self, most: int, rise: float = 0.1) -> list[int]:
        """Numbers of draft nodes up to `most` that end a tread: the next measured size costs a `rise` more. `most` is always one."""
        ends = [low - 1 for (low, a), (_, b) in pairwise(self.verify) if 1 < low <= most and b > a * (1 + rise)]
        return sorted({*ends, most})


@dataclass(frozen=True)
class CostModel:
    """Conditions measured, and what lies between them. Outside them the two nearest are extrapolated; where there is one, it stands for all."""

    conditions: tuple[Condition, ...]

    def __post_init__(self) -> None:
        if not self.conditions:
            raise UserError("cost model: wanted at least one measured condition, got none")

    def at(self, batch: int = 1, context: float | None = None) -> Condition:
        """The latencies at a batch and a context (None: the shortest measured)."""
        rows = []
        for size in sorted({c.batch for c in self.conditions}):
            measured = sorted((c for c in self.conditions if c.batch == size), key=lambda c: c.context)
            rows.append(_between(measured, measured[0].context if context is None else context, lambda c: c.context))
        return _between(rows, batch, lambda c: c.batch)

    def to_json(self) -> list[dict[str, Any]]:
        """One object a condition, see SCHEMA.md."""
        return [
            {
                "batch": c.batch,
                "context": round(c.context),
                "t_ar_ms": c.t_ar,
                "fixed_ms": c.fixed,
                "level_ms": c.level,
                "node_ms": c.node,
                "verify_ms": [[n, ms] for n, ms in c.verify],
            }
            for c in self.conditions
        ]

    @classmethod
    def from_json(cls, values: object) -> CostModel:
        """The inverse of `to_json`. Raises UserError for what is none."""
        try:
            assert isinstance(values, list)
            return cls(
                tuple(
                    Condition(
                        batch=int(v["batch"]),
                        context=float(v["context"]),
                        t_ar=float(v["t_ar_ms"]),
                        verify=tuple((int(n), float(ms)) for n, ms in v["verify_ms"]),
                        fixed=float(v["fixed_ms"]),
                        level=float(v["level_ms"]),
                        node=float(v.get("node_ms", 0.0)),
                    )
                    for v in values
                )
            )
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"cost model: wanted a list of measured conditions, got {str(values)[:80]!r}") from error


def _between(measured: Sequence[Condition], wanted: float, axis: Callable[[Condition], float]) -> Condition:
    """Linear in one axis; latencies never fall below 0."""
    if len(measured) == 1:
        return measured[0]
    low, high = next(((a, b) for a, b in pairwise(measured) if wanted <= axis(b)), (measured[-2], measured[-1]))
    share = (wanted - axis(low)) / (axis(high) - axis(low))

    def mixed(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    sizes = sorted({n for n, _ in (*low.verify, *high.verify)})
    return Condition(
        batch=max(1, round(mixed(low.batch, high.batch))),
        context=mixed(low.context, high.context),
        t_ar=mixed(low.t_ar, high.t_ar) or low.t_ar,
        verify=tuple((n, mixed(low.t_verify(n), high.t_verify(n))) for n in sizes),
        fixed=mixed(low.fixed, high.fixed),
        level=mixed(low.level, high.level),
        node=mixed(low.node, high.node),
    )


def chain_tau(acceptance: Sequence[float], depth: int) -> float:
    """Tokens a round of a chain. acceptance[i]: share of the rounds that accept draft token i + 1 among those that accepted the i before it.

    Positions past the list are accepted as its last one; one figure alone gives (1 - a^(depth + 1)) / (1 - a) (2211.17192, eq. 1).
    """
    if not acceptance or not all(0 <= a <= 1 for a in acceptance):
        raise UserError(f"cost model: wanted acceptances in 0 .. 1, got {list(acceptance)}")
    tau, path = 1.0, 1.0
    for i in range(depth):
        path *= acceptance[min(i, len(acceptance) - 1)]
        tau += path
    return tau


def never_falling(points: Iterable[tuple[int, float]]) -> Points:
    """Isotonic regression (pool adjacent violators): the nearest latencies, in squares, that do not fall as sizes grow. Noise makes them fall."""
    pools: list[tuple[list[int], float]] = []
    for size, ms in sorted(points):
        pools.append(([size], ms))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (left, a), (right, b) = pools[-2:]
            pools[-2:] = [(left + right, (len(left) * a + len(right) * b) / (len(left) + len(right)))]
    return tuple((size, ms) for sizes, ms in pools for size in sizes)


def fit(*, batch: int, context: float, t_ar: float, verify: Iterable[tuple[int, float]], rounds: Sequence[tuple[float, float, float]]) -> Condition:
    """The condition that measured rounds (depth, nodes, ms) suggest: least squares of relative errors, no cost below 0.

    The cost of a node is fitted from four shapes on. Raises UserError without any round.
    """
    if not rounds:
        raise UserError("cost model: wanted at least one measured round, got none")
    stairs = Condition(batch=batch, context=context, t_ar=t_ar, verify=never_falling(verify), fixed=0.0, level=0.0)
    rest = np.array([ms - stairs.t_verify(nodes + 1) for _, nodes, ms in rounds])
    columns = np.array([[1.0, depth, nodes] for depth, nodes, _ in rounds])
    known = 3 if len(rounds) >= 4 else 2 if len({depth for depth, _, _ in rounds}) > 1 else 1
    weights = 1 / np.array([ms for _, _, ms in rounds])
    fixed, level, node = _non_negative(columns[:, :known] * weights[:, None], rest * weights, 3)
    return Condition(batch=batch, context=context, t_ar=t_ar, verify=stairs.verify, fixed=fixed, level=level, node=node)


def _non_negative(a: Any, b: Any, size: int) -> list[float]:
    """argmin |a x - b| over x >= 0, by trying every set of unknowns that are not 0: there are at most three. Padded with zeros to `size`."""
    best, least = [0.0] * size, float(b @ b)
    for count in range(1, a.shape[1] + 1):
        for chosen in combinations(range(a.shape[1]), count):
            x = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            error = float(((a[:, chosen] @ x - b) ** 2).sum())
            if (x >= 0).all() and error < least - 1e-15:
                best, least = [0.0] * size, error
                for index, value in zip(chosen, x, strict=True):
                    best[index] = float(value)
    return best


def explain(
    condition: Condition, *, tau: float, depth: int, nodes: int, acceptance: Sequence[float], longest: int | None = None, chain: bool = True
) -> list[str]:
    """What the figures say, one sentence a line. longest: the most tokens in a row that the drafter can draft. chain: whether the draft is one."""
    c, shape = condition, f"{depth} deep, {nodes} nodes"
    whole = c.round(depth, nodes)
    # How long drafting takes before its first level is the same in every round, and cannot be told from what else is.
    parts = (("levels of drafting", c.t_draft(depth)), ("verification", c.t_verify(nodes + 1)), ("what every round costs", c.overhead(nodes)))
    split = ", ".join(f"{name} {100 * ms / whole:.0f} %" for name, ms in parts)
    where = f"batch {c.batch}, context {c.context:.0f}"
    lines = [
        f"{where}: a round takes {whole:.2f} ms ({split}), a plain step {c.t_ar:.2f} ms",
        f"predicted {c.speedup(tau, depth, nodes):.2f}x at tau {tau:.2f}; "
        f"it pays above tau {c.break_even_tau(depth, nodes):.2f}; "
        f"even a perfect draft of this size ({shape}) gains at most {c.ceiling(depth, nodes):.2f}x",
    ]
    if not chain:
        return lines
    most = min(LONGEST, longest or max(2 * depth, 8))
    needed = c.needed_anywhere(most)
    if needed is None:
        lines.append(f"no chain of up to {most} tokens can pay here, whatever its acceptance: a round costs too much beside a plain step")
    elif acceptance:
        length, gain = c.best_length(acceptance, most)
        first = acceptance[0]
        verdict = "above" if first > needed else "NOT above"
        lines.append(f"break-even acceptance of a chain: {needed:.3f} (measured {first:.3f}: {verdict}); best length {length}, predicted {gain:.2f}x")
    return lines
