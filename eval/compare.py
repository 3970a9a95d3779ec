"""Several reports side by side: one table, one plot, and verdicts with their certainty.

    entries = [read_entry(Path("runs/quickstart")), read_entry(Path("runs/quickstart-medusa"))]
    print(comparison_markdown(entries))

Reports hold ratios and intervals, not the prompts' own figures, so that two drafters are compared as if measured on independent prompts. Where they
were measured on the same ones, the intervals given here are wider than they need be, never narrower than they should.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rich.box
import rich.table

from .. import UserError
from .report import read_report
from .schema import Report, Row
from .wording import ABSENT, FAIL

Z95 = 1.959964  # two-sided 95 % of the normal law


@dataclass(frozen=True)
class Entry:
    """One drafter: its rows over all categories, parameters (None: not stated) and minutes of training (None: none, or not stated)."""

    name: str
    rows: list[Row]
    parameters: int | None
    minutes: float | None
    same: tuple[str, ...]  # what must be the same for figures to be comparable: target, prompts, hardware


@dataclass(frozen=True)
class Verdict:
    """How much faster one drafter is than another at one temperature; at T=0 and T=1 alike, ratio of the speed-ups over plain decoding."""

    faster: str
    slower: str
    temperature: float
    ratio: float
    lo: float
    hi: float
    tau_says_otherwise: bool

    def __str__(self) -> str:
        certain = "" if self.lo > 1 else "; not certain"
        odd = f"; {self.slower} has the higher tau: more is accepted, but drafting costs more than it gains" if self.tau_says_otherwise else ""
        return f"T={self.temperature:g}: {self.faster} over {self.slower}: {self.ratio:.2f}x, 95 % {self.lo:.2f}-{self.hi:.2f}{certain}{odd}"


def read_entry(run: Path) -> list[Entry]:
    """The drafter of a run folder, evaluation folder or report.json, then its report's other drafters. Raises UserError if there is no report."""
    folder = run / "eval" if (run / "eval" / "report.json").is_file() else run
    report = read_report(folder)
    same = _same(report)
    training = report.training or {}
    seconds = training.get("train_seconds")
    name = run.name if run.name not in ("", ".", "eval", "report.json") else run.resolve().parent.name
    method = str(report.drafter.get("method", "drafter"))
    label = name if method in name else f"{name} ({method})"
    label = label if report.drift is None else f"{label}, tunes its target"
    minutes = None if seconds is None else seconds / 60
    entries = [Entry(label, _comparable(report.overall), report.drafter.get("parameters"), minutes, same)]
    return entries + [Entry(other.drafter, _comparable(other.results), None, None, same) for other in report.others]


def _comparable(rows: Sequence[Row]) -> list[Row]:
    """Those of plain temperatures: what a model's own sampling is differs from model to model."""
    return [row for row in rows if not row.defaults]


def _same(report: Report) -> tuple[str, ...]:
    fingerprint = report.target.get("fingerprint", {})
    weights = fingerprint.get("weights", "") if isinstance(fingerprint, dict) else fingerprint
    adapter = f" tuned by adapter {fingerprint['adapter']}" if isinstance(fingerprint, dict) and "adapter" in fingerprint else ""
    return (
        f"target {report.target.get('name')} {weights}{adapter}",
        f"prompts {report.protocol.get('prompts_sha256')}",
        f"max_new_tokens {report.protocol.get('max_new_tokens')}",
        f"timed_prompts {report.protocol.get('timed_prompts')}",
        f"device {report.hardware.get('device')}",
        f"dtype {report.hardware.get('dtype')}",
    )


def gather(runs: Sequence[Path]) -> list[Entry]:
    """All drafters of these runs; another drafter that several reports have is taken from the first. Runs of the same name are told by their paths.

    Raises UserError if fewer than two are left.
    """
    read = [(run, read_entry(run)) for run in dict.fromkeys(runs)]
    names = [found[0].name for _, found in read]
    entries: list[Entry] = []
    for run, (own, *others) in read:
        entries.append(replace(own, name=f"{own.name} in {run}") if names.count(own.name) > 1 else own)
        entries += [entry for entry in others if all(entry.name != known.name for known in entries)]
    if len(entries) < 2:
        raise UserError(f"compare: wanted at least two drafters, got {len(entries)}; give more run folders")
    return entries


def differences(entries: Sequence[Entry]) -> list[str]:
    """What was not the same for all of them: figures that differ in these respects are not comparable."""
    first = entries[0]
    return [
        f"{entry.name} was measured with {theirs}, {first.name} with {ours}"
        for entry in entries[1:]
        for ours, theirs in zip(first.same, entry.same, strict=True)
        if ours != theirs
    ]


def _find(entry: Entry, temperature: float) -> Row | None:
    return next((row for row in entry.rows if row.temperature == temperature and row.batch == 1), None)


def temperatures(entries: Sequence[Entry]) -> list[float]:
    """All that any of them was measured at, ascending."""
    return sorted({row.temperature for entry in entries for row in entry.rows})


def ranked(entries: Sequence[Entry], temperature: float) -> list[tuple[Entry, Row]]:
    """Those measured at this temperature, the fastest first; those that failed the gate last."""
    found = [(entry, row) for entry in entries if (row := _find(entry, temperature)) is not None]
    return sorted(found, key=lambda pair: (not pair[1].passed, -pair[1].speedup.engine))


def verdicts(entries: Sequence[Entry]) -> list[Verdict]:
    """The fastest at each temperature over every other one, by the ratio of their speed-ups. Whoever failed the gate is not in it."""
    found = []
    for temperature in temperatures(entries):
        passed = [pair for pair in ranked(entries, temperature) if pair[1].passed]
        for entry, row in passed[1:]:
            best, top = passed[0]
            ratio = top.speedup.engine / row.speedup.engine
            spread = Z95 * math.hypot(_deviation(top), _deviation(row))
            found.append(Verdict(best.name, entry.name, temperature, ratio, ratio * math.exp(-spread), ratio * math.exp(spread), row.tau > top.tau))
    return found


def _deviation(row: Row) -> float:
    """Standard deviation of the logarithm of the speed-up, from its interval. Infinite where one observation tells no spread."""
    low, high = row.speedup.engine_ci
    if row.observed < 2:
        return math.inf
    return math.log(high / low) / (2 * Z95) if low > 0 else math.inf


HEAD = ("drafter", "T", "gate", "tau (95 %)", "acc.", "tok/s", "speed-up (95 %)", "size (memory)", "train")


def cells(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """The table's rows, by temperature, the fastest first. A drafter that failed the gate has FAIL in place of every speed."""
    rows: list[tuple[str, ...]] = []
    for temperature in temperatures(entries):
        for entry, row in ranked(entries, temperature):
            gain = f"{row.speedup.engine:.2f}x ({row.speedup.engine_ci[0]:.2f}-{row.speedup.engine_ci[1]:.2f})"
            rows.append(
                (
                    entry.name,
                    f"{temperature:g}",
                    "PASS" if row.passed else FAIL,
                    f"{row.tau:.2f} ({row.tau_ci[0]:.2f}-{row.tau_ci[1]:.2f})",
                    f"{100 * row.acceptance_rate:.0f} %",
                    f"{row.tokens_per_second.speculative:.0f}" if row.passed else FAIL,
                    gain if row.passed else FAIL,
                    (ABSENT if entry.parameters is None else f"{entry.parameters / 1e6:.2f} M")
                    + ("" if row.memory is None else f" ({row.memory.speculation:.1f} MiB)"),
                    ABSENT if entry.minutes is None else f"{entry.minutes:.1f} min",
                )
            )
    return rows


def comparison_table(entries: Sequence[Entry]) -> rich.table.Table:
    """For the terminal, 80 columns: intervals below their figures."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(HEAD):
        table.add_column(
            name.partition(" (")[0], justify="right" if index else "left", no_wrap=index > 0, overflow="fold", min_width=4 if index else 15
        )
    for row in cells(entries):
        table.add_row(*(cell.replace(" (", "\n[dim]").replace(")", "[/]") if index else cell for index, cell in enumerate(row)))
    return table


def comparison_markdown(entries: Sequence[Entry]) -> str:
    """The table, what is not comparable, and the verdicts."""
    lines = ["| " + " | ".join(HEAD) + " |", "|:--" + "|--:" * (len(HEAD) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in cells(entries)]
    for title, items in (("Not comparable", differences(entries)), ("Verdicts", [str(verdict) for verdict in verdicts(entries)])):
        if items:
            lines += ["", f"{title}:", "", *(f"- {item}" for item in items)]
    return "\n".join(lines) + "\n"


def _cost_panels(order: Sequence[Entry]) -> list[tuple[str, list[float | None]]]:
    """What each drafter costs beside time: (label, one value a drafter)."""
    memory = [next((row.memory.speculation for row in entry.rows if row.memory is not None), None) for entry in order]
    return [("memory, MiB", memory), ("training, minutes", [entry.minutes for entry in order])]


def comparison_plot(entries: Sequence[Entry], path: Path) -> None:
    """Bars of tau and of the speed-up with their intervals, one colour a temperature, and of what drafters cost. PNG or SVG, by the suffix."""
    from matplotlib.figure import Figure

    passed = [entry for entry in entries if all(row.passed for row in entry.rows)]
    order = [entry for entry, _ in ranked(passed, temperatures(passed)[0])] if passed else []
    if not order:
        raise UserError("compare: wanted at least one drafter that passed the losslessness gate for a plot, got none")
    costs = [panel for panel in _cost_panels(order) if any(value is not None for value in panel[1])]
    figure = Figure(figsize=(10 + 2.5 * len(costs), 1.2 + 0.55 * len(order)), layout="constrained")
    left, right, *others = figure.subplots(1, 2 + len(costs), sharey=True, width_ratios=[2, 2, *[1] * len(costs)])
    for axes, (label, spent) in zip(others, costs, strict=True):
        axes.barh(range(len(order)), [value or 0.0 for value in spent], height=0.6, color="0.6")
        axes.set_xlabel(label)
    shown = temperatures(order)
    height = 0.8 / len(shown)
    for index, temperature in enumerate(shown):
        placed = [(place, row) for place, entry in enumerate(order) if (row := _find(entry, temperature)) is not None]
        at = [place + (index - (len(shown) - 1) / 2) * height for place, _ in placed]
        for axes, values in (
            (left, [(row.tau, row.tau_ci) for _, row in placed]),
            (right, [(row.speedup.engine, row.speedup.engine_ci) for _, row in placed]),
        ):
            errors = [[max(0.0, value - low) for value, (low, _) in values], [max(0.0, high - value) for value, (_, high) in values]]
            axes.barh(at, [value for value, _ in values], height=0.9 * height, xerr=errors, color=f"C{index}", label=f"T={temperature:g}", capsize=2)
    left.set_yticks(range(len(order)), [entry.name for entry in order])
    left.invert_yaxis()
    left.set_xlabel("tau: tokens a target forward")
    right.set_xlabel("speed-up over our own plain decoding")
    right.axvline(1, color="black", linewidth=0.8)
    left.legend(frameon=False)
    for axes in (left, right, *others):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
