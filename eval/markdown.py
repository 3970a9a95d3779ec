"""The whole report as GitHub-flavoured Markdown."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .schema import SCHEMA, Report
from .wording import (
    ABSENT,
    DEFINITIONS,
    Cells,
    all_cells,
    bucket_rows,
    choice_sentences,
    cost_words,
    drift_sentence,
    engine_sentences,
    gate_sentence,
    headline_words,
    losses,
    mebibytes,
    number,
    other_cells,
    percent,
    settings_of,
    title_of,
)


def _markdown_cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A pipe table; the first `left` columns are flush left, figures right."""
    rule = [":--" if i < left else "--:" for i in range(len(head))]
    cells = [[_markdown_cell(cell) or " " for cell in row] for row in [head, *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], rule, *cells[1:]])


def render_markdown(report: Report) -> str:
    """The whole report as GitHub-flavoured Markdown; drafted tokens of the samples are bold."""
    figure, interval, sentence = headline_words(report)
    rows = all_cells(report, "×")  # noqa: RUF001
    results = [
        (
            *(c.suite, c.temperature, c.batch, f"{c.lossless} ({c.row.lossless.lossless_class}, {c.identical})"),
            *(f"{c.tau} ({c.tau_ci})" if c.tau_ci else c.tau, c.acceptance, c.speculative, c.engine, c.eager),
            *(f"{value} ({span})" if span else value for value, span in ((c.speedup, c.speedup_ci), (c.end_to_end, c.end_to_end_ci))),
            f"{c.vs_eager} ({c.vs_eager_ci})" if c.vs_eager_ci else c.vs_eager,
        )
        for c in [*rows, *(cells for _, others in other_cells(report, "×") for cells in others)]  # noqa: RUF001
    ]
    head = ["suite", "T", "batch", "lossless", "tau", "acceptance", "tok/s speculative", "tok/s plain", "tok/s eager"]
    head += ["speed-up", "speed-up end to end", "speed-up vs eager"]
    parts = [
        f"# {_markdown_cell(title_of(report))}",
        f"**{figure}** {_markdown_cell(sentence)}" + (f" {interval}." if interval else ""),
        gate_sentence(report),
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
                    *(percent(share) for share in (c.row.time_split.draft, c.row.time_split.verify, c.row.time_split.overhead)),
                    *(number(ms) for ms in (c.row.cost.t_ar_ms, c.row.cost.t_verify_ms, c.row.cost.t_draft_ms)),
                )
                for c in rows
            ],
        ),
    ]
    buckets = bucket_rows(report, rows)
    if buckets:
        parts += ["## tau by output position", _markdown_table(["suite", "T", "batch", "from", "to", "tau", "rounds"], buckets)]
    if report.samples:
        parts.append("## Samples\n\nBold: drafted and accepted. Plain: the target's own token.")
    for sample in report.samples:
        text = "".join(f"<b>{html.escape(piece.text)}</b>" if piece.origin == "drafted" else html.escape(piece.text) for piece in sample.pieces)
        parts.append(f"T={sample.temperature:g}\n\n<pre><i>{html.escape(sample.prompt)}</i>{text}</pre>")
    parts.append("## Definitions\n\n" + "\n".join(f"- **{term}**: {_markdown_cell(meaning)}" for term, meaning in DEFINITIONS))
    parts.append("## Settings")
    for name, pairs in settings_of(report):
        parts.append(_markdown_table([name, ""], pairs, left=2))
    parts.append(f"{SCHEMA}, {report.created}")
    return "\n\n".join(parts) + "\n"


def _markdown_costs(report: Report, rows: Sequence[Cells]) -> list[str]:
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
        words = cost_words(report)
        parts += ["## What limits it", *(_markdown_cell(word) for word in words), _markdown_table(head, table)]
    held = [(c, c.row.memory) for c in rows if c.row.memory is not None and c.row.category == "all"]
    if held:
        shown = [
            (
                *(c.suite, c.temperature, c.batch, mebibytes(memory.speculative_peak), mebibytes(memory.engine_peak)),
                *(mebibytes(memory.speculation), mebibytes(memory.drafter)),
                ", ".join(f"{name} {float(seconds):.1f} s" for name, seconds in c.row.load_seconds.items()) or ABSENT,
            )
            for c, memory in held
        ]
        head = ["suite", "T", "batch", "peak, speculative", "peak, plain", "speculation needs", "of that weights", "loading"]
        parts += ["## Memory", _markdown_table(head, shown)]
    return parts
