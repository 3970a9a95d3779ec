"""Reports side by side: order, verdicts and their intervals by hand, FAIL in place of every speed, and the command."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.cli import app
from draftsmith.eval.compare import comparison_markdown, comparison_plot, gather, verdicts
from draftsmith.eval.report import write_report
from draftsmith.eval.schema import Cost, Lossless, Memory, Other, Report, Row, Speedup, SpeedupEndToEnd, TimeSplit, TokensPerSecond
from typer.testing import CliRunner


def row(temperature: float, tau: float, speedup: float, width: float, *, passed: bool = True) -> Row:
    interval = (speedup / width, speedup * width)
    return Row(
        suite="s",
        temperature=temperature,
        batch=1,
        rule="shared_noise",
        category="all",
        lossless=Lossless(
            lossless_class="L1", status="pass" if passed else "fail", checked=4, identical=4 if passed else 3, ties=[], tokens_checked=40
        ),
        tau=tau,
        tau_ci=(tau - 0.1, tau + 0.1),
        acceptance_rate=0.25,
        conditional_acceptance=[0.5],
        tokens=40,
        tokens_per_second=TokensPerSecond(speculative=100 * speedup, engine=100.0, eager=None),
        speedup=Speedup(engine=speedup, engine_ci=interval, eager=None, eager_ci=None),
        speedup_end_to_end=SpeedupEndToEnd(engine=speedup, engine_ci=interval),
        time_split=TimeSplit(draft=0.5, verify=0.4, overhead=0.1),
        accepted_length_histogram=[5, 5],
        tau_by_output_position=[],
        prompts=4,
        rounds=10,
        cost=Cost(t_ar_ms=1.0, t_verify_ms=1.0, t_draft_ms=1.0),
    )


def save(folder: Path, method: str, rows: list[Row], prompts: str = "p", others: list[Other] | None = None) -> Path:
    report = Report(
        created="2026-11-21T00:00:00+00:00",
        target={"name": "t", "fingerprint": {"weights": "w"}},
        drafter={"method": method, "parameters": 2_000_000},
        hardware={"device": "d", "dtype": "float32"},
        protocol={"prompts_sha256": prompts, "max_new_tokens": 10, "timed_prompts": 4},
        results=rows,
        samples=[],
        training={"train_seconds": 90.0},
        others=others or [],
    )
    write_report(report, folder / "eval")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    lookup = Other(drafter="prompt_lookup", results=[row(0.0, 1.2, 1.1, 1.05)])
    return [
        save(tmp_path / "a", "medusa", [row(0.0, 2.5, 1.2, 1.1), row(1.0, 2.0, 1.1, 1.02)], others=[lookup]),
        save(tmp_path / "b", "eagle3", [row(0.0, 2.4, 1.5, 1.2), row(1.0, 2.6, 1.05, 1.02)], others=[lookup]),
    ]


def test_the_fastest_is_first_and_its_lead_has_an_interval(runs: list[Path]) -> None:
    entries = gather(runs)
    assert [entry.name for entry in entries] == ["a (medusa)", "prompt_lookup", "b (eagle3)"]  # lookup once
    by_pair = {(v.temperature, v.slower): v for v in verdicts(entries)}
    lead = by_pair[0.0, "a (medusa)"]
    spread = math.exp(math.hypot(math.log(1.2), math.log(1.1)))
    assert lead.faster == "b (eagle3)" and lead.ratio == pytest.approx(1.5 / 1.2)
    assert (lead.lo, lead.hi) == pytest.approx((1.25 / spread, 1.25 * spread))
    assert lead.tau_says_otherwise and "has the higher tau" in str(lead) and lead.lo > 1 and "not certain" not in str(lead)
    other = by_pair[1.0, "b (eagle3)"]
    assert other.faster == "a (medusa)" and other.ratio == pytest.approx(1.1 / 1.05) and other.tau_says_otherwise
    text = comparison_markdown(entries)
    assert text.index("| b (eagle3) | 0") < text.index("| a (medusa) | 0") < text.index("| prompt_lookup | 0") < text.index("| a (medusa) | 1")
    assert "| 2.00 M | 1.5 min |" in text and "Not comparable" not in text


def test_memory_stands_beside_the_size_and_a_model_s_own_sampling_is_left_out(tmp_path: Path) -> None:
    plain = row(0.7, 2.0, 1.2, 1.1)
    rich = dataclasses.replace(plain, memory=Memory(speculative_peak=None, engine_peak=None, speculation=12.34, drafter=8.0))
    own = dataclasses.replace(plain, sampling={"temperature": 0.7, "top_p": 0.9, "model_default": True})
    entries = gather([save(tmp_path / "a", "medusa", [rich]), save(tmp_path / "b", "hydra", [plain, own])])
    assert [len(entry.rows) for entry in entries] == [1, 1]
    assert "| 2.00 M (12.3 MiB) | 1.5 min |" in comparison_markdown(entries)
    comparison_plot(entries, tmp_path / "plot.svg")
    assert "<!-- memory, MiB -->" in (tmp_path / "plot.svg").read_text()


def test_runs_of_one_name_are_all_compared_and_one_prompt_proves_nothing(tmp_path: Path) -> None:
    lone = dataclasses.replace(row(0.0, 2.5, 1.5, 1.0), observations=1)  # its interval has no width, which is no certainty
    runs = [save(tmp_path / "x" / "run", "medusa", [lone]), save(tmp_path / "y" / "run", "medusa", [row(0.0, 2.0, 1.2, 1.01)])]
    entries = gather([*runs, runs[0]])
    assert [entry.name for entry in entries] == [f"run (medusa) in {run}" for run in runs]
    (verdict,) = verdicts(entries)
    assert verdict.ratio == pytest.approx(1.25) and verdict.lo == 0 and str(verdict).endswith("not certain")


def test_what_failed_the_gate_has_no_speed_and_wins_nothing(runs: list[Path], tmp_path: Path) -> None:
    bad = save(tmp_path / "c", "dflash", [row(0.0, 4.0, 3.0, 1.1, passed=False)])
    entries = gather([*runs, bad])
    line = next(line for line in comparison_markdown(entries).splitlines() if line.startswith("| c (dflash)"))
    assert line.count("FAIL") == 3 and "3.00" not in line
    assert all("dflash" not in str(verdict) for verdict in verdicts(entries))


def test_figures_of_other_prompts_are_said_not_to_be_comparable(runs: list[Path], tmp_path: Path) -> None:
    other = save(tmp_path / "d", "hydra", [row(0.0, 2.0, 1.3, 1.1)], prompts="q")
    assert "- d (hydra) was measured with prompts q, a (medusa) with prompts p" in comparison_markdown(gather([*runs, other]))


def test_the_command_writes_table_and_plot(runs: list[Path], tmp_path: Path) -> None:
    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(app, ["compare", *map(str, arguments)])

    done = run(*runs, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "b (eagle3) over a (medusa): 1.25x" in done.output
    assert (tmp_path / "out" / "compare.md").read_text().startswith("| drafter |")
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    bad = save(tmp_path / "c", "dflash", [row(0.0, 4.0, 3.0, 1.1, passed=False)])
    assert run(*runs, bad).exit_code == 1
    with pytest.raises(UserError, match="at least two drafters, got 1"):
        gather([bad])
    with pytest.raises(UserError, match="that passed the losslessness gate for a plot"):
        comparison_plot(gather([bad, save(tmp_path / "e", "x", [row(0.0, 4.0, 3.0, 1.1, passed=False)])]), tmp_path / "plot.png")
