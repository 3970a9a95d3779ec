"""When does speculation stop paying in service? `draftsmith monitor SOURCE --costs FOLDER`, by the cost model, not by a fixed acceptance.

SOURCE is a JSONL of acceptance events, "-" for standard input, or a server's metrics: a URL, or a file in Prometheus' text format. An event is
{"accepted": 3, "proposed": 5, "rounds": 1}: draft tokens accepted and proposed in so many rounds (rounds 1 if not given; "batch" and "context", if
given, say at what load). Metrics understood: vLLM's counters `vllm:spec_decode_num_drafts`, `.._num_draft_tokens`, `.._num_accepted_tokens` and
`.._num_accepted_tokens_per_pos` (with or without `_total`), and SGLang's gauge `sglang:spec_accept_length` (tokens a round, bonus included).

What it takes to pay comes from latencies measured on the machine that serves: a drafter's tuning.json, a report.json, or a file of conditions.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from .. import UserError
from .cost_model import CostModel
from .stats import mean_ratio_interval

Z95 = 1.959964
SAMPLE = re.compile(r'^([A-Za-z_:][\w:]*)(\{(?:[^"}]|"(?:\\.|[^"\\])*")*\})?\s+(\S+)')  # a label's value may hold braces, and quotes escaped


@dataclass(frozen=True)
class Event:
    """Draft tokens accepted and proposed in some rounds. lengths[i]: of them, those that accepted exactly i, if that is known."""

    accepted: float
    proposed: float
    rounds: float
    batch: float = 1.0
    context: float | None = None
    lengths: tuple[float, ...] = field(default=())


@dataclass(frozen=True)
class Judgement:
    """Of some rounds. tau, with its 95 % interval (None: one gauge tells no spread); the tau at which drafting pays; the predicted speed-up there."""

    rounds: float
    tau: float
    tau_ci: tuple[float, float] | None
    break_even: float
    depth: float

    @property
    def speedup(self) -> float:
        """Predicted, over plain decoding."""
        return self.tau / self.break_even

    @property
    def stopped(self) -> bool:
        """Whether it no longer pays, beyond chance."""
        return (self.tau_ci[1] if self.tau_ci else self.tau) < self.break_even

    def __str__(self) -> str:
        span = f" (95 % {self.tau_ci[0]:.3f}-{self.tau_ci[1]:.3f})" if self.tau_ci else ""
        lo = (self.tau_ci[0] if self.tau_ci else self.tau) / self.break_even
        verdict = "speculation has STOPPED PAYING" if self.stopped else "speculation pays" if lo >= 1 else "not certain that speculation pays"
        counted = f"{self.rounds:.0f} rounds" if self.rounds else "a gauge"
        needed = f"break-even tau {self.break_even:.3f} at {self.depth:.1f} draft tokens"
        return f"{counted}: tau {self.tau:.3f}{span}, {needed}, predicted {self.speedup:.2f}x: {verdict}"


def read_costs(path: Path) -> CostModel:
    """From a drafter's folder (tuning.json), a run's or an evaluation's (report.json), or such a file. Raises UserError if none of them has costs."""
    places = (
        [path] if path.is_file() else [path / "tuning.json", path / "drafter" / "tuning.json", path / "report.json", path / "eval" / "report.json"]
    )
    for place in places:
        if not place.is_file():
            continue
        try:
            values = json.loads(place.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{place}: wanted JSON with measured latencies, got a damaged file ({error})") from error
        costs = values.get("costs") if isinstance(values, dict) else values
        costs = costs.get("conditions") if isinstance(costs, dict) else costs
        if costs:
            return CostModel.from_json(costs)
    raise UserError(
        f"--costs: wanted a tuning.json or a report.json with costs, got {path} without; run draftsmith tune or eval on the serving machine"
    )


def events_of(lines: Iterable[str], where: str) -> Iterator[Event]:
    """Of a JSONL. Raises UserError naming the line that is none."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            accepted, rounds = float(value["accepted"]), float(value.get("rounds", 1))
            proposed = float(value["proposed"])
            batch = float(value.get("batch", 1))
            context = None if value.get("context") is None else float(value["context"])
            if not (rounds > 0 and 0 <= accepted <= proposed and batch >= 1 and (context is None or context >= 0)):
                raise ValueError("0 <= accepted <= proposed and rounds > 0 do not hold")
            if not all(map(math.isfinite, (rounds, proposed, batch, context or 0.0))):
                raise ValueError("a figure is not finite")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            wanted = '{"accepted": 3, "proposed": 5, "rounds": 1}'
            raise UserError(f"{where}:{number}: wanted {wanted}, got {line.strip()[:80]!r} ({error})") from error
        yield Event(accepted, proposed, rounds, batch, context)


def samples_of(text: str) -> dict[str, list[tuple[str, float]]]:
    """{name without _total: [(labels, value)]} of Prometheus' text format."""
    found: dict[str, list[tuple[str, float]]] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match and not line.startswith("#"):
            try:
                value = float(match[3])
            except ValueError:
                continue
            if math.isfinite(value):  # NaN: a gauge that was never set
                found.setdefault(match[1].removesuffix("_total"), []).append((match[2] or "", value))
    return found


def event_of_metrics(text: str) -> tuple[Event | None, float | None]:
    """(counters as one event since the server's start, SGLang's gauge of tokens a round). Raises UserError if there is neither."""
    found = samples_of(text)

    def total(name: str) -> float | None:
        values = found.get(f"vllm:spec_decode_{name}")
        return None if values is None else sum(value for _, value in values)

    rounds, drafted, accepted = (total(name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    if rounds is not None and drafted is not None and accepted is not None:
        by_place: dict[int, float] = {}
        for labels, value in found.get("vllm:spec_decode_num_accepted_tokens_per_pos", []):
            place = re.search(r'position="(\d+)"', labels)
            if place:
                by_place[int(place[1])] = by_place.get(int(place[1]), 0.0) + value
        reached = [rounds, *(by_place[i] for i in sorted(by_place)), 0.0] if by_place else []
        lengths = tuple(a - b for a, b in pairwise(reached))
        return Event(accepted, drafted, rounds, lengths=lengths), None
    gauges = [value for _, value in found.get("sglang:spec_accept_length", []) if value > 0]
    if gauges:
        return None, sum(gauges) / len(gauges)
    raise UserError("metrics: wanted vllm:spec_decode_num_drafts and its kin, or sglang:spec_accept_length, got none; is speculation on?")


def difference(now: Event, before: Event) -> Event | None:
    """What happened between two readings of the same counters; None if nothing, or if they started anew."""
    rounds = now.rounds - before.rounds
    if rounds <= 0 or now.accepted < before.accepted:
        return None
    same = len(now.lengths) == len(before.lengths)
    lengths = tuple(max(0.0, a - b) for a, b in zip(now.lengths, before.lengths, strict=True)) if same else ()
    return Event(now.accepted - before.accepted, now.proposed - before.proposed, rounds, now.batch, now.context, lengths)


def judge(events: Sequence[Event], costs: CostModel) -> Judgement:
    """Of these events together, at their mean load and draft length."""
    rounds = sum(e.rounds for e in events)
    if rounds <= 0:
        raise UserError("monitor: wanted at least one round, got none; is anything decoded speculatively?")
    tau = 1 + sum(e.accepted for e in events) / rounds
    depth = sum(e.proposed for e in events) / rounds
    contexts = [(e.context, e.rounds) for e in events if e.context is not None]
    context = sum(c * n for c, n in contexts) / sum(n for _, n in contexts) if contexts else None
    batch = sum(e.batch * e.rounds for e in events) / rounds
    return Judgement(rounds, tau, _interval(events, rounds, tau, depth), costs.at(round(batch), context).break_even_tau(depth, depth), depth)


def _interval(events: Sequence[Event], rounds: float, tau: float, depth: float) -> tuple[float, float]:
    """Bootstrap over events where there are many; else from the lengths, if they are known; else from the widest law that there is."""
    if len(events) >= 20:
        found = mean_ratio_interval([e.accepted + e.rounds for e in events], [e.rounds for e in events], resamples=500)
        return found.lo, found.hi
    accepted = tau - 1
    lengths = [sum(e.lengths[i] for e in events) for i in range(len(events[0].lengths))] if all(e.lengths for e in events) else []
    if lengths and sum(lengths) > 0:
        variance = sum(n * (i - accepted) ** 2 for i, n in enumerate(lengths)) / sum(lengths)
    else:
        variance = max(0.0, accepted * (depth - accepted))  # of all or nothing: none spreads more
    width = Z95 * math.sqrt(variance / rounds)
    return max(1.0, tau - width), min(depth + 1, tau + width)


def judge_gauge(tokens: float, depth: int, costs: CostModel, batch: int = 1) -> Judgement:
    """Of a gauge of tokens a round; it does not tell the draft's length."""
    return Judgement(0, tokens, None, costs.at(batch).break_even_tau(depth, depth), depth)


def windows(events: Iterable[Event], rounds: float) -> Iterator[list[Event]]:
    """Groups of at least so many rounds; what is left at the end is the last one."""
    group: list[Event] = []
    for event in events:
        group.append(event)
        if sum(e.rounds for e in group) >= rounds:
            yield group
            group = []
    if group:
        yield group


def fetch(source: str) -> str:
    """The text of a URL. Raises UserError if it cannot be had."""
    try:
        with urlopen(source, timeout=10) as answer:
            body: Any = answer.read()
        return str(body, "utf-8")
    except (URLError, OSError, ValueError) as error:
        raise UserError(f"monitor {source}: wanted a server's metrics, got {' '.join(str(error).split())[:120]}") from error


def read_source(source: str) -> str | Iterable[str]:
    """Prometheus' text (a text), or the lines of a JSONL. Raises UserError for a file that is none."""
    if source.startswith(("http://", "https://")):
        return fetch(source)
    if source == "-":
        return sys.stdin
    path = Path(source)
    if not path.is_file():
        raise UserError(f"monitor: wanted a .jsonl of events, a file of metrics, a URL or -, got {source}, which does not exist")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"monitor {source}: wanted a text file in UTF-8, got byte {error.start} that is not") from error
    return text.split("\n") if text.lstrip().startswith("{") else text
