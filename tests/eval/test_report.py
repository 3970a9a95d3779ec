"""The report: strict JSON, FAIL in place of every speed-up, escaped samples, no outside reference; and the gate that feeds it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine, Generation
from draftsmith.decode.free import PromptLookup
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.eval import harness
from draftsmith.eval.gate import kernel_bound, score_gap
from draftsmith.eval.machine import choose_threads
from draftsmith.eval.markdown import render_markdown
from draftsmith.eval.page import render_html
from draftsmith.eval.report import read_report, terminal_table, write_report
from draftsmith.eval.runs import Settings
from draftsmith.eval.schema import CostReport, Limits, Prediction, Report
from draftsmith.eval.suites import load_suite
from draftsmith.eval.wording import losses
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.recipes.schema import TargetRef
from rich.console import Console


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetRef().location)


def head_of(target: Target) -> Eagle3:
    torch.manual_seed(0)
    head = Eagle3(Eagle3Config.for_target(target)).bind(target).eval()
    head.set_draft_vocabulary(torch.arange(target.vocab_size), target)
    return head


@pytest.fixture(scope="module")
def report(target: Target) -> Report:
    suite = load_suite("stdlib", 3, split="test")
    settings = Settings(temperatures=(0.0, 1.0), max_new_tokens=16, bootstrap=50)
    measured = harness.evaluate(target, head_of(target).proposer(depth=2), suite, settings, others={"prompt_lookup": PromptLookup(3)})
    return harness.build_report(target, {"method": "eagle3"}, suite, settings, measured, None, {"threads": 1})


def failed(report: Report) -> Report:
    rows = [dataclasses.replace(row, lossless=dataclasses.replace(row.lossless, status="fail", identical=1)) for row in report.results]
    return dataclasses.replace(report, results=rows, others=[])


def terminal(report: Report) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  # closed with the console
    with console.file:
        console.print(terminal_table(report))
        return console.export_text()


def test_the_measured_report_adds_up(report: Report) -> None:
    for row in report.results:
        assert row.lossless.status == "pass" and row.lossless.identical == row.lossless.checked == row.prompts == 3
        assert sum(row.accepted_length_histogram) == row.rounds
        drafted = sum(i * n for i, n in enumerate(row.accepted_length_histogram))
        assert row.acceptance_rate == pytest.approx(drafted / (2 * row.rounds))
        assert row.tau == pytest.approx(row.tokens / row.rounds)
        split = row.time_split
        assert split.draft + split.verify + split.overhead == pytest.approx(1)
        assert row.speedup.engine == pytest.approx(row.tokens_per_second.speculative / row.tokens_per_second.engine)


def test_json_round_trip_is_strict(report: Report, tmp_path: Path) -> None:
    files = write_report(report, tmp_path)
    assert read_report(files["report.json"]) == report
    values = json.loads(files["report.json"].read_text())
    del values["results"][0]["tau"]
    files["report.json"].write_text(json.dumps(values))
    with pytest.raises(UserError, match="tau"):
        read_report(files["report.json"])


def test_a_failed_gate_shows_no_speed_up(report: Report) -> None:
    for render in (terminal, render_markdown, render_html):
        good, bad = render(report), render(failed(report))
        assert bad.count("FAIL") > good.count("FAIL") + 1  # one mention in the text explains the gate
        for row in report.results:
            shown = f"{row.speedup.engine:.2f}"
            assert shown in good and not re.search(rf"{re.escape(shown)}\s*[x\u00d7]", bad)


def test_other_drafters_are_measured_on_the_same_prompts(report: Report, tmp_path: Path) -> None:
    (other,) = report.others
    assert other.drafter == "prompt_lookup" and [row.temperature for row in other.results] == [0.0, 1.0]
    assert all(row.passed and row.prompts == 3 and row.lossless.identical == 3 for row in other.results)
    assert [row.tokens for row in other.results] == [row.tokens for row in report.results]  # lossless: the same texts
    for render in (terminal, render_markdown, render_html):
        shown = render(report)
        assert "prompt_lookup" in shown.replace("\\", "") and all(f"{row.tau:.2f}" in shown for row in other.results)
    broken = [dataclasses.replace(row, lossless=dataclasses.replace(row.lossless, status="fail")) for row in other.results]
    bad = dataclasses.replace(report, others=[dataclasses.replace(other, results=broken)])
    assert bad.failed == broken and bad.headline is None
    # Reports written before there were any are still read.
    values = report.to_json()
    del values["others"]
    assert Report.from_json(values) == dataclasses.replace(report, others=[])


def test_html_is_self_contained_and_escapes_generated_text(report: Report) -> None:
    sample = dataclasses.replace(report.samples[0], prompt="<script>alert(1)</script>")
    page = render_html(dataclasses.replace(report, samples=[sample]))
    assert "<script" not in page and "&lt;script&gt;" in page
    references = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(https?:)?//", page)
    assert not references


def test_what_limits_the_speed_up_is_told_and_drawn(report: Report) -> None:
    """With a cost model the page has its words, the latency staircase with the draft's size, and predictions beside measurements."""
    condition = {"batch": 1, "context": 90, "t_ar_ms": 5.0, "fixed_ms": 1.0, "level_ms": 0.5, "node_ms": 0.0, "verify_ms": [[1, 5.0], [8, 6.0]]}
    points = [Prediction(batch=1, context=90, depth=2, nodes=2, predicted_ms=7.1, measured_ms=7.4, fitted=kind) for kind in (True, False)]
    limits = Limits(
        depth=2, nodes=2, predicted=1.11, error=0.02, ceiling=2.22, break_even_tau=1.5, break_even_acceptance=0.4, best_length=3,
        best_length_speedup=1.3, fitted=False,
    )  # fmt: skip
    told = dataclasses.replace(
        report,
        results=[dataclasses.replace(row, limits=limits) for row in report.results],
        costs=CostReport(conditions=[condition], predictions=points, words=["even a perfect draft of this size gains at most 2.22x"]),
    )
    page = render_html(told)
    assert "Even a perfect draft of this size gains at most 2.22x." in page and "Latency of verification" in page
    assert page.count('class="ring c0"') == 1 and "this draft: 3" in page and "(fitted)" in page
    assert "perfect draft" in terminal(told) and "## What limits it" in render_markdown(told) and "## Memory" in render_markdown(told)
    assert Report.from_json(json.loads(json.dumps(told.to_json()))) == told
    assert "2.22×" not in render_html(failed(told))  # noqa: RUF001
    piece = told.samples[0].pieces[1]
    assert piece.offered and "the draft had: “" in page


def test_the_gate_fails_when_verification_is_broken(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that changes one token must not pass, nor one that stops early."""
    honest = Engine.generate

    def broken(self: Engine, *args: object, **kwargs: object) -> Generation:
        out = honest(self, *args, **kwargs)  # type: ignore[arg-type]
        if self.proposer:
            out.tokens[0][-1] = (out.tokens[0][-1] + 7) % 2048
        return out

    monkeypatch.setattr(Engine, "generate", broken)
    settings = Settings(temperatures=(1.0,), max_new_tokens=12, bootstrap=50, eager=False)
    rows = harness.evaluate(target, head_of(target).proposer(depth=2), load_suite("stdlib", 2, split="test"), settings).rows
    assert rows[0].lossless.status == "fail" and rows[0].lossless.identical == 0


def test_a_near_tie_is_measured_not_assumed(target: Target) -> None:
    prompt = list(range(20, 40))
    bound = kernel_bound(target, prompt, 6)
    assert 0 <= bound < 1e-2
    best = Engine(target).generate([prompt], SamplingParams(), 2).tokens[0]
    assert score_gap(target, prompt, best[:1], best[1], best[1], SamplingParams()) == 0
    assert score_gap(target, prompt, best[:1], best[1], (best[1] + 1) % 2048, SamplingParams()) > bound


def test_the_schema_page_names_every_key(report: Report) -> None:
    page = Path(harness.__file__).with_name("SCHEMA.md").read_text()
    documented = {part for name in re.findall(r"`([a-z_.]+)`", page) for part in name.split(".")}
    known: set[str] = set()

    def collect(kind: Any) -> None:
        for field in dataclasses.fields(kind):
            known.add(field.metadata.get("key", field.name))
            for part in (hint := typing.get_type_hints(kind)[field.name], *typing.get_args(hint)):
                if dataclasses.is_dataclass(part):
                    collect(part)

    collect(Report)
    assert known - documented == set()
    assert {"from", "ties", "t_ar_ms", "pieces", "origin"} <= known  # the walk went all the way down


def test_prompts_that_are_not_timed_count_for_gate_and_tau(target: Target) -> None:
    suite, head = load_suite("stdlib", 5, split="test"), head_of(target)
    settings: dict[str, Any] = {"temperatures": (1.0,), "max_new_tokens": 12, "bootstrap": 50, "eager": False}
    whole = harness.evaluate(target, head.proposer(depth=2), suite, Settings(**settings)).rows
    split = harness.evaluate(target, head.proposer(depth=2), suite, Settings(**settings, timed_prompts=2, gate_batch=2)).rows
    assert split[0].lossless == whole[0].lossless and split[0].lossless.checked == 5
    for name in ("tau", "tau_ci", "tokens", "rounds", "accepted_length_histogram", "acceptance_rate", "tau_by_output_position"):
        assert getattr(split[0], name) == getattr(whole[0], name), name


def test_the_thread_count_is_measured_or_taken_as_given(target: Target) -> None:
    before = torch.get_num_threads()
    try:
        prompt = list(range(5, 20))
        measured = choose_threads(target, prompt, None, steps=2)
        costs = measured["thread_calibration_ms"]
        assert str(measured["threads"]) == min(costs, key=lambda n: costs[n]) and set(costs) >= {"1", str(os.cpu_count())}
        assert torch.get_num_threads() == measured["threads"]
        assert choose_threads(target, prompt, 1) == {"threads": 1} and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_where_speculation_does_not_pay_is_said_in_every_rendering(report: Report) -> None:
    """The headline speaks of the lowest temperature alone."""
    slow = dataclasses.replace(report.results[1].speedup, engine=0.9, engine_ci=(0.8, 0.97))
    fast = dataclasses.replace(report.results[0].speedup, engine=1.3, engine_ci=(1.2, 1.4))
    rows = [dataclasses.replace(row, speedup=speedup) for row, speedup in zip(report.results, (fast, slow), strict=True)]
    told = dataclasses.replace(report, results=rows, drafter={**report.drafter, "choice": ["draft chosen for this machine: a chain of 2"]})
    shown = (str(terminal_table(told).renderables), render_markdown(told), render_html(told))
    assert losses(told) == ["Speculation does not pay at T=1, batch 1: 0.90x the speed of plain decoding (0.80–0.97)."]  # noqa: RUF001
    assert all("Speculation does not pay at T=1" in text and "Draft chosen for this machine: a chain of 2" in text for text in shown)
    alone = dataclasses.replace(told, results=[dataclasses.replace(row, observations=1) for row in rows])
    assert "no interval: one prompt was timed" in render_markdown(alone) and "It is not certain that speculation pays at T=1" in losses(alone)[0]
