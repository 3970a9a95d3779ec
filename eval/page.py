"""The report as one self-contained page: styles and plots inline, no script, nothing fetched."""

from __future__ import annotations

import dataclasses
import math

import jinja2

from .cost_model import CostModel
from .schema import Report, Row
from .wording import (
    DEFINITIONS,
    FAIL,
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
    reasons,
    setting,
    settings_of,
    speed,
    test_sentence,
    title_of,
)

MOST_CURVES = 4  # more than four curves in one small plot cannot be told apart


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
        (setting(row), [(f"{b.start:,}–{b.end:,}" if b.end else f"{b.start:,}+", b.tau) for b in row.tau_by_output_position])  # noqa: RUF001
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
    figure, interval, sentence = headline_words(report)
    rows, curves = all_cells(report, "×"), _curves(report)  # noqa: RUF001
    overall = [cells for cells in rows if cells.row in report.overall]
    many_suites = len({cells.suite for cells in overall}) > 1
    environment = _environment()
    environment.filters |= {"percent": percent, "number": number, "speed": speed, "mib": mebibytes, "tick": lambda value: f"{value:.3g}"}
    environment.globals |= {"log2": math.log2}
    return environment.get_template(
        "report.html.j2"
    ).render(
        report=report,
        title=title_of(report),
        figure=figure,
        interval=interval,
        sentence=sentence,
        gate=gate_sentence(report),
        drift=drift_sentence(report),
        choice=choice_sentences(report),
        losses=losses(report),
        in_engine=engine_sentences(report),
        headline=report.headline,
        rows=rows,
        listed=[*rows, *(cells for _, others in other_cells(report, "×") for cells in others)],  # noqa: RUF001
        overall=overall,
        overall_names=[f"{cells.suite}, {setting(cells.row)}" if many_suites else setting(cells.row) for cells in overall],
        buckets=bucket_rows(report, rows),
        curves=curves[:MOST_CURVES],
        curves_left_out=len(curves[MOST_CURVES:]),
        settings=settings_of(report),
        definitions=DEFINITIONS,
        test=test_sentence(report),
        reasons=reasons(report),
        stairs=_stairs(report),
        by_output=_by_output(report),
        predictions=report.costs.predictions if report.costs else [],
        words=cost_words(report),
        assisted=any(row.speedup.assisted is not None for row in report.results),
        ties=[(cells, tie) for cells in rows for tie in cells.row.lossless.ties],
    )
