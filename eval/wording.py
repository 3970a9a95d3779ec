"""A report's figures and sentences as text: what the terminal, Markdown and HTML have in common.

A row whose losslessness gate failed shows FAIL in place of every speed-up, and of the speculative speed that one could divide, wherever it is shown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .schema import Report, Row, Span

FAIL = "FAIL"
ABSENT = "–"  # noqa: RUF001  (the dash of a table cell: not measured)

DEFINITIONS: tuple[tuple[str, str], ...] = (
    ("tau", "mean tokens emitted per target forward, bonus token included; the first token, which the prefill gives, is not counted."),
    ("acceptance rate", "accepted draft tokens / drafted nodes of the trees verified."),
    ("conditional acceptance at position i", "share of rounds that accepted the i-th draft token among those that accepted the i-1 before it."),
    (
        "speed-up",
        "total tokens / total seconds, against our own plain decoding: the same engine, cache and kernels, one token at a time, decode only. "
        "End to end includes the prefill.",
    ),
    (
        "rows named after a drafter",
        "other drafters, which need no training, on the prompts that were timed and in the same turns: what a trained one has to beat.",
    ),
    ("eager", "transformers generate with its default settings, the baseline that most papers use."),
    ("assisted", "transformers generate with the same draft model (assistant_model), prefill included on both sides."),
    ("ceiling", "the speed-up of a perfect drafter of this shape, by the cost model: every round emits depth + 1 tokens."),
    ("speculation needs", "memory beyond plain decoding: the drafter's weights and state, cache slots and logits of draft nodes."),
    ("interval", "95 %, paired bootstrap over prompts, widened for small numbers of them."),
)


def number(value: float) -> str:
    """Three or more significant digits, without false precision: 0.42, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def speed(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _span(span: Span | None, prompts: int) -> str:
    """lo to hi; nothing when there was one prompt, whose bootstrap has no width and would read as certainty."""
    return "" if span is None or prompts < 2 else f"{span[0]:.2f}–{span[1]:.2f}"  # noqa: RUF001


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _label(described: Mapping[str, Any], *keys: str) -> str:
    """The first of `keys` that the object has; the renderers' titles must not depend on which of them the evaluation filled in."""
    return next((str(described[key]) for key in keys if described.get(key)), "not stated")


def setting(row: Row) -> str:
    own = ", the model's own sampling" if row.defaults else ""
    return f"T={row.temperature:g}{own}, batch {row.batch}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """One row as text: the only place where a row becomes figures, so that FAIL cannot be forgotten by one of the renderers."""

    row: Row
    suite: str
    temperature: str
    batch: str
    lossless: str
    identical: str
    tau: str
    tau_ci: str
    acceptance: str
    speculative: str
    engine: str
    eager: str
    speedup: str
    speedup_ci: str
    end_to_end: str
    end_to_end_ci: str
    vs_eager: str
    vs_eager_ci: str
    vs_assisted: str
    vs_assisted_ci: str
    ceiling: str
    memory: str
    reason: str


def _found(row: Row) -> str:
    """What the gate found, in few words."""
    gate = row.lossless
    if gate.test is not None:
        return f"{gate.test.tokens:,} tokens tested, p = {gate.test.p_value:.2g}"
    return f"{gate.identical:,}/{gate.checked:,} identical"


def _cells(row: Row, *, times: str, name_rule: bool) -> Cells:
    def gain(value: float | None) -> str:
        return FAIL if not row.passed else ABSENT if value is None else f"{value:.2f}{times}"

    def gain_ci(span: Span | None) -> str:
        return _span(span, row.observed) if row.passed else ""

    speeds, ratios, whole, gate = row.tokens_per_second, row.speedup, row.speedup_end_to_end, row.lossless
    return Cells(
        row=row,
        suite=row.suite + (f" / {row.category}" if row.category != "all" else "") + (f" ({row.rule})" if name_rule else ""),
        temperature=f"{row.temperature:g}{' (own)' if row.defaults else ''}",
        batch=str(row.batch),
        lossless="PASS" if row.passed else FAIL,
        identical=_found(row),
        tau=f"{row.tau:.2f}",
        tau_ci=_span(row.tau_ci, row.prompts),
        acceptance=percent(row.acceptance_rate),
        speculative=speed(speeds.speculative) if row.passed else FAIL,
        engine=speed(speeds.engine),
        eager=speed(speeds.eager),
        speedup=gain(ratios.engine),
        speedup_ci=gain_ci(ratios.engine_ci),
        end_to_end=gain(whole.engine),
        end_to_end_ci=gain_ci(whole.engine_ci),
        vs_eager=gain(ratios.eager),
        vs_eager_ci=gain_ci(ratios.eager_ci),
        vs_assisted=gain(ratios.assisted),
        vs_assisted_ci=gain_ci(ratios.assisted_ci),
        ceiling=ABSENT if row.limits is None else gain(row.limits.ceiling),
        memory=ABSENT if row.memory is None else f"{number(row.memory.speculation)} MiB",
        reason=gate.reason or "",
    )


def all_cells(report: Report, times: str) -> list[Cells]:
    name_rule = len({row.rule for row in report.results}) > 1
    return [_cells(row, times=times, name_rule=name_rule) for row in report.results]


def other_cells(report: Report, times: str) -> list[tuple[str, list[Cells]]]:
    """Each other drafter's rows, its name in place of the suite's where there is one suite."""
    many = len({row.suite for row in report.results}) > 1
    found = []
    for other in report.others:
        rows = [_cells(row, times=times, name_rule=False) for row in other.results]
        found.append((other.drafter, [dataclasses.replace(c, suite=f"{other.drafter}, {c.suite}" if many else other.drafter) for c in rows]))
    return found


def gate_sentence(report: Report) -> str:
    """What the gate is, and what it found."""
    rows = report.overall
    ties = sum(len(row.lossless.ties) for row in rows)
    prompts = f"{sum(r.lossless.identical for r in rows):,} of {count(sum(r.lossless.checked for r in rows), 'output')}"
    found = f"{prompts} identical, {count(sum(r.lossless.tokens_checked for r in rows), 'token')} compared"
    if ties:
        found += f", {count(ties, 'near-tie')} where the target's two best tokens are closer than its own rounding"
    return f"The gate compares speculative with plain decoding, output by output, and a setting that changes one would show FAIL. It found {found}."


def drift_sentence(report: Report) -> str:
    """For a drafter that tunes its target: what the gate compares with, and how far that is from the original. Empty for all others."""
    drift = report.drift
    if drift is None:
        return ""
    return (
        "Not the original target: this drafter tunes it, and lossless means the same output as the tuned target's, for which everything here was "
        f"measured. How far that has moved, on {count(drift.prompts, 'held-out prompt')}: the original's own responses "
        f"({count(drift.tokens, 'token')}) have perplexity {drift.original_perplexity:.3f} for the original and {drift.tuned_perplexity:.3f} for "
        f"the tuned target; both have the same likeliest token at {percent(drift.same_argmax)} of their positions; "
        f"{percent(drift.same_generations)} of the greedy responses are identical."
    )


def choice_sentences(report: Report) -> list[str]:
    """Which draft was chosen for which machine, and where none pays."""
    return [f"{text[:1].upper()}{text[1:]}." for text in map(str, report.drafter.get("choice", []))]


def losses(report: Report) -> list[str]:
    """Rows in which plain decoding is as fast or faster, said plainly: the headline speaks of one temperature only."""
    found = []
    for row in report.overall:
        low, high = row.speedup.engine_ci
        if row.passed and (low < 1 if row.observed > 1 else row.speedup.engine < 1):
            verdict = "Speculation does not pay" if high < 1 and row.observed > 1 else "It is not certain that speculation pays"
            span = f" ({_span(row.speedup.engine_ci, row.observed)})" if row.observed > 1 else ""
            found.append(f"{verdict} at {setting(row)}: {row.speedup.engine:.2f}x the speed of plain decoding{span}.")
    return found


def reasons(report: Report) -> list[str]:
    """Why rows failed, beyond tokens that differ."""
    return [f"{FAIL}, {row.suite}, {setting(row)}: {row.lossless.reason}" for row in report.failed if row.lossless.reason]


def cost_words(report: Report) -> list[str]:
    """What the cost model says; nothing where a gate failed: it speaks of speed-ups."""
    return report.costs.words if report.costs is not None and not report.failed else []


def test_sentence(report: Report) -> str:
    """How losslessness was judged where output is not token-identical. Empty where it is everywhere."""
    tests = [row.lossless.test for row in report.overall if row.lossless.test is not None]
    if not tests:
        return ""
    least = max(test.detects_tv for test in tests)
    return (
        f"This rule draws its own sample, so that its tokens are tested for the target's distribution instead: chi-square over {tests[0].bins} bins, "
        f"level {tests[0].level:g}; a bias of {percent(least)} (total variation over the bins) would be found with probability {tests[0].power:g}."
    )


def engine_sentences(report: Report) -> list[str]:
    """What serving engines made of the exported drafter, a sentence each."""
    return [
        f"In {row['engine']}: {percent(row['acceptance_engine'])} of drafted tokens accepted, {percent(row['acceptance_ours'])} here on the same "
        f"prompts (chains of {row['tokens']}); output unchanged for {row['outputs_identical']} of {count(row['prompts'], 'prompt')}."
        for row in report.in_engine
    ]


def headline_words(report: Report) -> tuple[str, str, str]:
    """The large figure, its interval (may be empty), and the sentence below it."""
    row = report.headline
    if report.failed:
        places = "; ".join(f"{row.suite}{'' if row.category == 'all' else ' / ' + row.category}, {setting(row)}" for row in report.failed)
        return FAIL, "", f"not lossless: the output differs from plain decoding ({places}). A decoder that changes the output has no speed-up."
    if row is None:
        return ABSENT, "", "no results in this report."
    span = _span(row.speedup.engine_ci, row.observed)
    interval = f"95 % interval {span}" if span else "no interval: one prompt was timed"
    eager = "" if row.speedup.eager is None else f"; {row.speedup.eager:.2f}× that of transformers generate"  # noqa: RUF001
    where = f"{row.suite}, {setting(row)}, {_label(report.hardware, 'name', 'device')}"
    return f"{row.speedup.engine:.2f}×", interval, f"the speed of our own plain decoding ({where}){eager}."  # noqa: RUF001


def title_of(report: Report) -> str:
    return f"{_label(report.drafter, 'name', 'method')} for {_label(report.target, 'name', 'path')}"


def _flat(value: object, at: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, text) in their own order."""
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{at}.{key}" if at else key)]
    return [(at, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def settings_of(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    groups: list[tuple[str, dict[str, Any] | None]] = [
        ("target", report.target),
        ("drafter", report.drafter),
        ("hardware", report.hardware),
        ("protocol", report.protocol),
        ("training", report.training),
    ]
    return [(name, _flat(group)) for name, group in groups if group]


def mebibytes(value: float | None) -> str:
    return ABSENT if value is None else f"{number(value)} MiB"


def bucket_rows(report: Report, rows: Sequence[Cells]) -> list[tuple[str, ...]]:
    """tau by output position, where it says more than tau itself: rows with two buckets or more."""
    return [
        (*(c.suite, c.temperature, c.batch), f"{b.start:,}", "" if b.end is None else f"{b.end:,}", f"{b.tau:.2f}", f"{b.rounds:,}")
        for c in rows
        if len(c.row.tau_by_output_position) > 1
        for b in c.row.tau_by_output_position
    ]
