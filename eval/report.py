"""The report of an evaluation as people read it (terminal, Markdown, HTML), and its files.

    report = Report(created=..., target=..., drafter=..., hardware=..., protocol=..., results=[Row(...)], samples=[Sample(...)], training=None)
    write_report(report, folder)                     # report.json, report.md, report.html, each whole or not at all
    rich.print(terminal_table(read_report(folder)))

A row whose losslessness gate failed shows FAIL in place of every speed-up, and of the speculative speed that one could divide, wherever it is shown.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import rich.box
import rich.console
import rich.markup
import rich.table

from .. import UserError
from .cost_model import CostModel
from .schema import SCHEMA, Report, Row, Span

FILES = ("report.json", "report.md", "report.html")
FAIL = "FAIL"
ABSENT = "–"  # noqa: RUF001  (the dash of a table cell: not measured)
MOST_CURVES = 4  # more than four curves in one small plot cannot be told apart

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


# ------------------------------------------------------------------------------------------------------------------------------ figures as text


def _number(value: float) -> str:
    """Three or more significant digits, without false precision: 0.42, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _speed(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _span(span: Span | None, prompts: int) -> str:
    """lo to hi; nothing when there was one prompt, whose bootstrap has no width and would read as certainty."""
    return "" if span is None or prompts < 2 else f"{span[0]:.2f}–{span[1]:.2f}"  # noqa: RUF001


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _label(described: Mapping[str, Any], *keys: str) -> str:
    """The first of `keys` that the object has; the renderers' titles must not depend on which of them the evaluation filled in."""
    return next((str(described[key]) for key in keys if described.get(key)), "not stated")


def _setting(row: Row) -> str:
    own = ", the model's own sampling" if row.defaults else ""
    return f"T={row.temperature:g}{own}, batch {row.batch}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cells:
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


def _cells(row: Row, *, times: str, name_rule: bool) -> _Cells:
    def gain(value: float | None) -> str:
        return FAIL if not row.passed else ABSENT if value is None else f"{value:.2f}{times}"

    def gain_ci(span: Span | None) -> str:
        return _span(span, row.prompts) if row.passed else ""

    speeds, ratios, whole, gate = row.tokens_per_second, row.speedup, row.speedup_end_to_end, row.lossless
    return _Cells(
        row=row,
        suite=row.suite + (f" / {row.category}" if row.category != "all" else "") + (f" ({row.rule})" if name_rule else ""),
        temperature=f"{row.temperature:g}{' (own)' if row.defaults else ''}",
        batch=str(row.batch),
        lossless="PASS" if row.passed else FAIL,
        identical=_found(row),
        tau=f"{row.tau:.2f}",
        tau_ci=_span(row.tau_ci, row.prompts),
        acceptance=_percent(row.acceptance_rate),
        speculative=_speed(speeds.speculative) if row.passed else FAIL,
        engine=_speed(speeds.engine),
        eager=_speed(speeds.eager),
        speedup=gain(ratios.engine),
        speedup_ci=gain_ci(ratios.engine_ci),
        end_to_end=gain(whole.engine),
        end_to_end_ci=gain_ci(whole.engine_ci),
        vs_eager=gain(ratios.eager),
        vs_eager_ci=gain_ci(ratios.eager_ci),
        vs_assisted=gain(ratios.assisted),
        vs_assisted_ci=gain_ci(ratios.assisted_ci),
        ceiling=ABSENT if row.limits is None else gain(row.limits.ceiling),
        memory=ABSENT if row.memory is None else f"{_number(row.memory.speculation)} MiB",
        reason=gate.reason or "",
    )


def _all_cells(report: Report, times: str) -> list[_Cells]:
    name_rule = len({row.rule for row in report.results}) > 1
    return [_cells(row, times=times, name_rule=name_rule) for row in report.results]


def _other_cells(report: Report, times: str) -> list[tuple[str, list[_Cells]]]:
    """Each other drafter's rows, its name in place of the suite's where there is one suite."""
    many = len({row.suite for row in report.results}) > 1
    found = []
    for other in report.others:
        rows = [_cells(row, times=times, name_rule=False) for row in other.results]
        found.append((other.drafter, [dataclasses.replace(c, suite=f"{other.drafter}, {c.suite}" if many else other.drafter) for c in rows]))
    return found


def _gate_sentence(report: Report) -> str:
    """What the gate is and what it found, in one sentence."""
    rows = report.overall
    ties = sum(len(row.lossless.ties) for row in rows)
    prompts = f"{sum(r.lossless.identical for r in rows):,} of {_count(sum(r.lossless.checked for r in rows), 'output')}"
    found = f"{prompts} identical, {_count(sum(r.lossless.tokens_checked for r in rows), 'token')} compared"
    if ties:
        found += f", {_count(ties, 'near-tie')} where the target's two best tokens are closer than its own rounding"
    return f"The gate compares speculative with plain decoding, output by output; a setting that changes the output shows FAIL: {found}."


def drift_sentence(report: Report) -> str:
    """For a drafter that tunes its target: what the gate compares with, and how far that is from the original. Empty for all others."""
    drift = report.drift
    if drift is None:
        return ""
    return (
        "Not the original target: this drafter tunes it, and lossless means the same output as the tuned target's, for which everything here was "
        f"measured. How far that has moved, on {_count(drift.prompts, 'held-out prompt')}: the original's own responses "
        f"({_count(drift.tokens, 'token')}) have perplexity {drift.original_perplexity:.3f} for the original and {drift.tuned_perplexity:.3f} for "
        f"the tuned target; both have the same likeliest token at {_percent(drift.same_argmax)} of their positions; "
        f"{_percent(drift.same_generations)} of the greedy responses are identical."
    )


def choice_sentences(report: Report) -> list[str]:
    """Which draft was chosen for which machine, and where none pays."""
    return [f"{text[:1].upper()}{text[1:]}." for text in map(str, report.drafter.get("choice", []))]


def losses(report: Report) -> list[str]:
    """Rows in which plain decoding is as fast or faster, said plainly: the headline speaks of one temperature only."""
    found = []
    for row in report.overall:
        low, high = row.speedup.engine_ci
        if row.passed and low < 1:
            verdict = "Speculation does not pay" if high < 1 else "It is not certain that speculation pays"
            span = f" ({_span(row.speedup.engine_ci, row.prompts)})" if row.prompts > 1 else ""
            found.append(f"{verdict} at {_setting(row)}: {row.speedup.engine:.2f}x the speed of plain decoding{span}.")
    return found


def _reasons(report: Report) -> list[str]:
    """Why rows failed, beyond tokens that differ."""
    return [f"{FAIL}, {row.suite}, {_setting(row)}: {row.lossless.reason}" for row in report.failed if row.lossless.reason]


def _words(report: Report) -> list[str]:
    """What the cost model says; nothing where a gate failed: it speaks of speed-ups."""
    return report.costs.words if report.costs is not None and not report.failed else []


def _test_sentence(report: Report) -> str:
    """How losslessness was judged where output is not token-identical. Empty where it is everywhere."""
    tests = [row.lossless.test for row in report.overall if row.lossless.test is not None]
    if not tests:
        return ""
    least = max(test.detects_tv for test in tests)
    return (
        f"This rule draws its own sample, so that its tokens are tested for the target's distribution instead: chi-square over {tests[0].bins} bins, "
        f"level {tests[0].level:g}; a bias of {_percent(least)} (total variation over the bins) would be found with probability {tests[0].power:g}."
    )


def engine_sentences(report: Report) -> list[str]:
    """What serving engines made of the exported drafter, a sentence each."""
    return [
        f"In {row['engine']}: {_percent(row['acceptance_engine'])} of drafted tokens accepted, {_percent(row['acceptance_ours'])} here on the same "
        f"prompts (chains of {row['tokens']}); output unchanged for {row['outputs_identical']} of {_count(row['prompts'], 'prompt')}."
        for row in report.in_engine
    ]


def _headline_words(report: Report) -> tuple[str, str, str]:
    """The large figure, its interval (may be empty), and the sentence below it."""
    row = report.headline
    if report.failed:
        places = "; ".join(f"{row.suite}{'' if row.category == 'all' else ' / ' + row.category}, {_setting(row)}" for row in report.failed)
        return FAIL, "", f"not lossless: the output differs from plain decoding ({places}). A decoder that changes the output has no speed-up."
    if row is None:
        return ABSENT, "", "no results in this report."
    span = _span(row.speedup.engine_ci, row.prompts)
    interval = f"95 % interval {span}" if span else "no interval: one prompt"
    eager = "" if row.speedup.eager is None else f"; {row.speedup.eager:.2f}× that of transformers generate"  # noqa: RUF001
    where = f"{row.suite}, {_setting(row)}, {_label(report.hardware, 'name', 'device')}"
    return f"{row.speedup.engine:.2f}×", interval, f"the speed of our own plain decoding ({where}){eager}."  # noqa: RUF001


def _title(report: Report) -> str:
    return f"{_label(report.drafter, 'name', 'method')} for {_label(report.target, 'name', 'path')}"


def _flat(value: object, at: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, text) in their own order."""
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{at}.{key}" if at else key)]
    return [(at, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def _settings(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    groups: list[tuple[str, dict[str, Any] | None]] = [
        ("target", report.target),
        ("drafter", report.drafter),
        ("hardware", report.hardware),
        ("protocol", report.protocol),
        ("training", report.training),
    ]
    return [(name, _flat(group)) for name, group in groups if group]


# ----------------------------------------------------------------------------------------------------------------------------------- terminal


def terminal_table(report: Report) -> rich.console.Group:
    """One row a result, intervals below their figures; another table for each other drafter. They fit 80 columns unless there are several suites."""
    suites = list(dict.fromkeys(row.suite for row in report.results))
    title = f"{_title(report)}, {suites[0]}" if len(suites) == 1 else _title(report)
    tables = [_terminal_rows(title, _all_cells(report, "x"), len(suites) > 1)]
    tables += [_terminal_rows(f"{name}, the same prompts", cells, len(suites) > 1) for name, cells in _other_cells(report, "x")]
    words = [
        rich.markup.escape(text)
        for text in [
            drift_sentence(report),
            *choice_sentences(report),
            *losses(report),
            *engine_sentences(report),
            *_reasons(report),
            *_words(report),
        ]
        if text
    ]
    return rich.console.Group(*tables, *words)


def _terminal_rows(title: str, rows: Sequence[_Cells], name_suites: bool) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0, pad_edge=False, title=rich.markup.escape(title))
    if name_suites:
        table.add_column("suite", overflow="fold")
    for name in ("T", "batch", "lossless", "tau", "accepted", "tok/s", "plain", "eager", "speed-up", "vs eager"):
        table.add_column(name, justify="left" if name == "lossless" else "right", no_wrap=True)
    for cells in rows:
        colour = "[green]" if cells.row.passed else "[bold red]"
        table.add_row(
            *([rich.markup.escape(cells.suite)] if name_suites else []),
            cells.temperature,
            cells.batch,
            f"{colour}{cells.lossless}[/] {rich.markup.escape(cells.row.lossless.lossless_class)}",
            f"{cells.tau}\n[dim]{cells.tau_ci}[/]",
            cells.acceptance,
            cells.speculative,
            cells.engine,
            cells.eager,
            f"[bold]{cells.speedup}[/]\n[dim]{cells.speedup_ci}[/]",
            cells.vs_eager,
            style="" if cells.row.passed else "red",
        )
    return table


# ----------------------------------------------------------------------------------------------------------------------------------- Markdown


def _markdown_cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A pipe table; the first `left` columns are flush left, figures right."""
    rule = [":--" if i < left else "--:" for i in range(len(head))]
    cells = [[_markdown_cell(cell) or " " for cell in row] for row in [head, *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], rule, *cells[1:]])


def render_markdown(report: Report) -> str:
    """The whole report as GitHub-flavoured Markdown; drafted tokens of the samples are bold."""
    figure, interval, sentence = _headline_words(report)
    rows = _all_cells(report, "×")  # noqa: RUF001
    results = [
        (
            *(c.suite, c.temperature, c.batch, f"{c.lossless} ({c.row.lossless.lossless_class}, {c.identical})"),
            *(f"{c.tau} ({c.tau_ci})" if c.tau_ci else c.tau, c.acceptance, c.speculative, c.engine, c.eager),
            *(f"{value} ({span})" if span else value for value, span in ((c.speedup, c.speedup_ci), (c.end_to_end, c.end_to_end_ci))),
            f"{c.vs_eager} ({c.vs_eager_ci})" if c.vs_eager_ci else c.vs_eager,
        )
        for c in [*rows, *(cells for _, others in _other_cells(report, "×") for cells in others)]  # noqa: RUF001
    ]
    head = ["suite", "T", "batch", "lossless", "tau", "acceptance", "tok/s speculative", "tok/s plain", "tok/s eager"]
    head += ["speed-up", "speed-up end to end", "speed-up vs eager"]
    parts = [
        f"# {_markdown_cell(_title(report))}",
        f"**{figure}** {_markdown_cell(sentence)}" + (f" {interval}." if interval else ""),
        _gate_sentence(report),
        *(f"**{text}**" for text in [_markdown_cell(drift_sentence(report))] if text),
        *map(_markdown_cell, [*choice_sentences(report), *losses(report), *engine_sentences(report)]),
        "## Results",
        _markdown_table(head, results, left=1),
        "## Drafting",
        _markdown_table(
            ["suite", "T", "batch", "conditional acceptance at draft position 1, 2, ..", "rounds that accepted 0, 1, .. draft tokens"],
            [
                (
                    *(c.suite, c.temperature, c.batch, ", ".join(f"{share:.2f}" for share in c.row.conditional_acceptance)),
                    ", ".join(f"{count:,}" for count in c.row.accepted_length_histogram),
                )
                for c in rows
            ],
        ),
        *_markdown_costs(report, rows),
        "## Where the time goes",
        _markdown_table(
            ["suite", "T", "batch", "draft", "verify", "overhead", "plain step, ms", "verification, ms", "draft, ms"],
            [
                (
                    *(c.suite, c.temperature, c.batch),
                    *(_percent(share) for share in (c.row.time_split.draft, c.row.time_split.verify, c.row.time_split.overhead)),
                    *(_number(ms) for ms in (c.row.cost.t_ar_ms, c.row.cost.t_verify_ms, c.row.cost.t_draft_ms)),
                )
                for c in rows
            ],
        ),
    ]
    buckets = _bucket_rows(report, rows)
    if buckets:
        parts += ["## tau by output position", _markdown_table(["suite", "T", "batch", "from", "to", "tau", "rounds"], buckets)]
    if report.samples:
        parts.append("## Samples\n\nBold: drafted and accepted. Plain: the target's own token.")
    for sample in report.samples:
        text = "".join(f"<b>{html.escape(piece.text)}</b>" if piece.origin == "drafted" else html.escape(piece.text) for piece in sample.pieces)
        parts.append(f"T={sample.temperature:g}\n\n<pre><i>{html.escape(sample.prompt)}</i>{text}</pre>")
    parts.append("## Definitions\n\n" + "\n".join(f"- **{term}**: {_markdown_cell(meaning)}" for term, meaning in DEFINITIONS))
    parts.append("## Settings")
    for name, pairs in _settings(report):
        parts.append(_markdown_table([name, ""], pairs, left=2))
    parts.append(f"{SCHEMA}, {report.created}")
    return "\n\n".join(parts) + "\n"


def _markdown_costs(report: Report, rows: Sequence[_Cells]) -> list[str]:
    """What limits the speed-up, and memory."""
    limited = [c for c in rows if c.row.limits is not None and c.row.passed]
    parts = []
    if limited:
        table = [
            (
                *(c.suite, c.temperature, c.batch, f"{limits.depth}", f"{limits.nodes:.1f}".removesuffix(".0")),
                *(f"{limits.predicted:.2f}×", f"{100 * limits.error:+.0f} %", c.ceiling, f"{limits.break_even_tau:.2f}"),  # noqa: RUF001
            )
            for c in limited
            if (limits := c.row.limits) is not None
        ]
        head = ["suite", "T", "batch", "depth", "nodes", "predicted", "error", "ceiling", "break-even tau"]
        words = _words(report)
        parts += ["## What limits it", *(_markdown_cell(word) for word in words), _markdown_table(head, table)]
    held = [(c, c.row.memory) for c in rows if c.row.memory is not None and c.row.category == "all"]
    if held:
        shown = [
            (
                *(c.suite, c.temperature, c.batch, _mebibytes(memory.speculative_peak), _mebibytes(memory.engine_peak)),
                *(_mebibytes(memory.speculation), _mebibytes(memory.drafter)),
                ", ".join(f"{name} {float(seconds):.1f} s" for name, seconds in c.row.load_seconds.items()) or ABSENT,
            )
            for c, memory in held
        ]
        head = ["suite", "T", "batch", "peak, speculative", "peak, plain", "speculation needs", "of that weights", "loading"]
        parts += ["## Memory", _markdown_table(head, shown)]
    return parts


def _mebibytes(value: float | None) -> str:
    return ABSENT if value is None else f"{_number(value)} MiB"


def _bucket_rows(report: Report, rows: Sequence[_Cells]) -> list[tuple[str, ...]]:
    """tau by output position, where it says more than tau itself: rows with two buckets or more."""
    return [
        (*(c.suite, c.temperature, c.batch), f"{b.start:,}", "" if b.end is None else f"{b.end:,}", f"{b.tau:.2f}", f"{b.rounds:,}")
        for c in rows
        if len(c.row.tau_by_output_position) > 1
        for b in c.row.tau_by_output_position
    ]


# --------------------------------------------------------------------------------------------------------------------------------------- HTML


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Curve:
    """A row of the two small plots about drafting. Shares are of rounds."""

    name: str
    shares: list[float]
    conditional: list[float]


def _curves(report: Report) -> list[_Curve]:
    """One a (suite, rule, temperature), at its smallest batch: acceptance does not depend on the batch."""
    smallest: dict[tuple[str, str, float], Row] = {}
    for row in report.overall:
        if row.category == "all":
            key = (row.suite, row.rule, row.temperature)
            smallest[key] = min(smallest.get(key, row), row, key=lambda candidate: candidate.batch)
    many_suites = len({suite for suite, _, _ in smallest}) > 1
    many_rules = len({rule for _, rule, _ in smallest}) > 1
    curves = []
    for (suite, rule, temperature), row in smallest.items():
        name = " ".join([*([suite] if many_suites else []), f"T={temperature:g}", *([rule] if many_rules else []), *([] if row.passed else [FAIL])])
        shares = [count / max(1, row.rounds) for count in row.accepted_length_histogram]
        curves.append(_Curve(name=name, shares=shares, conditional=row.conditional_acceptance))
    return curves


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stairs:
    """The plots of the cost model, of one condition. points: (tokens verified, ms); chosen: tokens of the row's verification."""

    name: str
    points: list[tuple[float, float]]
    chosen: float
    chosen_ms: float
    t_ar: float


def _stairs(report: Report) -> _Stairs | None:
    """Of the headline's batch."""
    row = report.headline or next(iter(report.overall), None)
    if row is None or row.limits is None or report.costs is None:
        return None
    conditions = [c for c in CostModel.from_json(report.costs.conditions).conditions if c.batch == row.batch]
    if not conditions:
        return None
    c = conditions[0]
    tokens = row.limits.nodes + 1
    shown = [(float(n), ms) for n, ms in c.verify]
    return _Stairs(name=f"batch {c.batch}, context {c.context:.0f}", points=shown, chosen=tokens, chosen_ms=c.t_verify(tokens), t_ar=c.t_ar)


def _by_output(report: Report) -> list[tuple[str, list[tuple[str, float]]]]:
    """tau by output position: (setting, [(positions, tau)]) of the rows that have a bucket or more."""
    return [
        (_setting(row), [(f"{b.start:,}–{b.end:,}" if b.end else f"{b.start:,}+", b.tau) for b in row.tau_by_output_position])  # noqa: RUF001
        for row in report.overall
        if row.batch == 1 and len(row.tau_by_output_position) > 1
    ][:MOST_CURVES]


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_html(report: Report) -> str:
    """One self-contained page: styles and plots inline, no script, nothing fetched."""
    figure, interval, sentence = _headline_words(report)
    rows, curves = _all_cells(report, "×"), _curves(report)  # noqa: RUF001
    overall = [cells for cells in rows if cells.row in report.overall]
    many_suites = len({cells.suite for cells in overall}) > 1
    environment = _environment()
    environment.filters |= {"percent": _percent, "number": _number, "speed": _speed, "mib": _mebibytes, "tick": lambda value: f"{value:.3g}"}
    environment.globals |= {"log2": math.log2}
    return environment.get_template(
        "report.html.j2"
    ).render(
        report=report,
        title=_title(report),
        figure=figure,
        interval=interval,
        sentence=sentence,
        gate=_gate_sentence(report),
        drift=drift_sentence(report),
        told=[*choice_sentences(report), *losses(report)],
        in_engine=engine_sentences(report),
        headline=report.headline,
        rows=rows,
        listed=[*rows, *(cells for _, others in _other_cells(report, "×") for cells in others)],  # noqa: RUF001
        overall=overall,
        overall_names=[f"{cells.suite}, {_setting(cells.row)}" if many_suites else _setting(cells.row) for cells in overall],
        buckets=_bucket_rows(report, rows),
        curves=curves[:MOST_CURVES],
        curves_left_out=len(curves[MOST_CURVES:]),
        settings=_settings(report),
        definitions=DEFINITIONS,
        test=_test_sentence(report),
        reasons=_reasons(report),
        stairs=_stairs(report),
        by_output=_by_output(report),
        predictions=report.costs.predictions if report.costs else [],
        words=_words(report),
        assisted=any(row.speedup.assisted is not None for row in report.results),
        ties=[(cells, tie) for cells in rows for tie in cells.row.lossless.ties],
    )


# -------------------------------------------------------------------------------------------------------------------------------------- files


def write_report(report: Report, folder: Path) -> dict[str, Path]:
    """Writes report.json, report.md and report.html into `folder` (made if need be); returns their paths by file name.

    Everything is rendered and on disk under temporary names before the first rename: on any error the old files stay as they were.
    Raises UserError when the report holds what from_json would refuse (an integer of numpy, a value that is not finite), naming its place.
    """
    data = report.to_json()
    Report.from_json(data)
    texts = (json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n", render_markdown(report), render_html(report))
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / name for name in FILES}
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in FILES}
    try:
        for name, text in zip(FILES, texts, strict=True):
            with temporary[name].open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for name in FILES:
            os.replace(temporary[name], paths[name])
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return paths


def read_report(path: Path) -> Report:
    """A report.json, or the folder that holds one. Raises UserError naming the file and the place in it."""
    file = path / FILES[0] if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"wanted a report.json, or a folder with one, got {path}; run draftsmith eval first")
    try:
        return Report.from_json(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:  # UserError is one; so are bad JSON and bad UTF-8
        raise UserError(f"{file}: {error}") from error
