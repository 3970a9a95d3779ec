"""The report of an evaluation in the terminal, and its files.

report = Report(created=..., target=..., drafter=..., hardware=..., protocol=..., results=[Row(...)], samples=[Sample(...)], training=None)
write_report(report, folder)                     # report.json, report.md, report.html, each whole or not at all
rich.print(terminal_table(read_report(folder)))
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import rich.box
import rich.console
import rich.markup
import rich.table

from .. import UserError
from .markdown import render_markdown
from .page import render_html
from .schema import Report
from .wording import Cells, all_cells, choice_sentences, cost_words, drift_sentence, engine_sentences, losses, other_cells, reasons, title_of

FILES = ("report.json", "report.md", "report.html")


def terminal_table(report: Report) -> rich.console.Group:
    """One row a result, intervals below their figures; another table for each other drafter. They fit 80 columns unless there are several suites."""
    suites = list(dict.fromkeys(row.suite for row in report.results))
    title = f"{title_of(report)}, {suites[0]}" if len(suites) == 1 else title_of(report)
    tables = [_terminal_rows(title, all_cells(report, "x"), len(suites) > 1)]
    tables += [_terminal_rows(f"{name}, the same prompts", cells, len(suites) > 1) for name, cells in other_cells(report, "x")]
    words = [
        rich.markup.escape(text)
        for text in [
            drift_sentence(report),
            *choice_sentences(report),
            *losses(report),
            *engine_sentences(report),
            *reasons(report),
            *cost_words(report),
        ]
        if text
    ]
    return rich.console.Group(*tables, *words)


def _terminal_rows(title: str, rows: Sequence[Cells], name_suites: bool) -> rich.table.Table:
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
