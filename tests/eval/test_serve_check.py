"""What `serve_check` says of its cases; engines are stood in for. That faults are noticed in real ones is what it runs for."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.eval import in_engine, serve_check
from draftsmith.eval.contrast import contrast_head
from draftsmith.eval.in_engine import InEngine
from draftsmith.heads.eagle3 import Eagle3
from draftsmith.heads.export.write import export
from draftsmith.recipes.schema import TargetRef

GOOD = InEngine("e", {}, "m", 1, 2, 2, 94, 94, 0.40, 0.40)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, InEngine], *flags: str) -> tuple[int, dict[str, Any]]:
    """The command with measurements that are given, by the last part of the folder's name, in place of engines."""
    monkeypatch.setattr(serve_check, "run_engine", lambda *job: {})

    def measure(source: Any, engine: str, folder: Path, *arguments: Any) -> InEngine:
        return found.get(folder.name, GOOD)

    monkeypatch.setattr(serve_check, "measure", measure)
    code = serve_check.main(["--out", str(tmp_path / "out"), "--prompts", "2", *flags])
    return code, json.loads((tmp_path / "out" / "serve_check.json").read_text())


def test_cases_pass_and_fail_by_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few, other = dataclasses.replace(GOOD, drafts_equal=39, drafts_compared=39), dataclasses.replace(GOOD, drafts_equal=93)
    flags = ("--engine", f"vllm={sys.executable}", "--methods", "medusa,eagle3,mtp,draft_model", "--drafter", "early_exit:0-3")
    code, result = run(tmp_path, monkeypatch, {"vllm-medusa": few, "vllm-mtp": other}, *flags)
    passed = {(case["method"], case["kind"]): case["passed"] for case in result["cases"]}
    assert (
        code == 1
        and not result["passed"]
        and passed
        == {
            ("draft_model", "random"): True,
            ("medusa", "random"): False,  # too few rounds to say anything
            ("eagle3", "random"): True,
            ("mtp", "random"): False,  # one draft is another
            ("eagle3", "fault: layers shifted by one"): False,  # the fault was not noticed
            ("eagle3", "fault: a norm dropped"): False,
            ("eagle3", "fault: absolute d2t"): False,
            ("draft_model", "trained: early_exit:0-3"): True,
        }
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    card = (tmp_path / "out" / "serve_check.md").read_text()
    assert "| method | vllm | speculators | sglang | tensorrt-llm | tgi | llamacpp | openvino | transformers |" in card
    assert "| draft_model | 94/94, 0.400 = 0.400 | - | rules | rules | - | rules | rules | rules |" in card
    assert "| medusa | FAIL, 39/39 | - | - | - | rules | - | - | - |" in card


def test_what_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--engine", f"llamacpp={sys.executable}", "--methods", "draft_model,dflash", "--kinds", "random")
    code, _ = run(tmp_path, monkeypatch, {"llamacpp-dfl": dataclasses.replace(GOOD, drafts_equal=1)}, *flags)
    assert code == 1
    runs: list[str] = []

    def again(self: serve_check.Checker, method: str, fault: str | None = None) -> serve_check.Case:
        runs.append(method)
        return serve_check.Case("llamacpp", method, "random", True, "")

    monkeypatch.setattr(serve_check.Checker, "random", again)
    code, result = run(tmp_path, monkeypatch, {}, *flags, "--resume")
    assert code == 0 and runs == ["dflash"] and len(result["cases"]) == 2


def test_a_contrast_head_must_be_accepted_and_its_faults_must_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.eval.contrast.STEPS", 1)
    flags = ("--engine", f"openvino={sys.executable}", "--methods", "eagle3")
    found = {"openvino-eg3-contrast": dataclasses.replace(GOOD, acceptance_engine=1.0), "openvino-eg3-broken": GOOD}
    _, result = run(tmp_path, monkeypatch, found, *flags)
    assert [case["passed"] for case in result["cases"]] == [True, False, False, False]
    found = {"openvino-eg3-contrast": GOOD, "openvino-eg3-broken": dataclasses.replace(GOOD, acceptance_engine=0.0)}
    _, result = run(tmp_path, monkeypatch, found, *flags)
    assert [case["passed"] for case in result["cases"]] == [False, True, True, True]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine", "sglang=python"], "--engine: wanted NAME=PYTHON with a name of vllm, .*, got sglang"),
        ([], "got nothing"),
        (["--engine", "vllm=/none"], "--engine-python: wanted the python of the environment of vllm, got /none"),
        (["--engine", "transformers", "--kinds", "randon"], "--kinds: wanted some of random, contrast, fault, trained, got randon"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, flags: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        serve_check.main(["--out", str(tmp_path / "out"), "--prompts", "1", *flags])


def test_a_contrast_head_tells_its_layers_from_those_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.eval.contrast.STEPS", 60)
    target, prompt = Target.load(TargetRef().location, dtype="float32", device="cpu"), [20, 27, 34, 41, 48, 900]
    head, accepted = contrast_head(target, [prompt], 16), {}
    for shift in (0, 1, -1):
        read = Eagle3(dataclasses.replace(head.config, taps=tuple(k + shift for k in head.taps)))
        read.load_state_dict(head.state_dict())
        rounds = Engine(target, read.eval().bind(target).proposer(depth=1)).generate([prompt], SamplingParams(), 16).rounds[0]
        accepted[shift] = sum(done.accepted for done in rounds) / len(rounds)
    assert accepted[0] > 0.8 and accepted[1] < 0.2 and accepted[-1] < 0.2


def test_drafts_are_compared_as_far_as_texts_agree_with_a_target_that_was_trained_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt, jobs = Target.load(TargetRef().location, dtype="float32", device="cpu"), [20, 27, 34, 41, 48, 900], []
    source, folder = serve_check.random_source("draft_model", "transformers", target, 2), tmp_path / "out"
    export(source, "transformers", folder)
    (outputs,), (drafts,) = in_engine.chain_drafts(source, "transformers", [prompt], 2, 16)
    other = [*outputs[:8], *((token + 1) % 2048 for token in outputs[8:])]

    def engine(name: str, python: str, job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        return {"outputs": [other], "drafts": [drafts], "versions": {}}

    monkeypatch.setattr(in_engine, "run_engine", engine)
    result = in_engine.measure(source, "transformers", folder, "python", [prompt], 16)
    places = [at for _, at in in_engine.placed([outputs], [drafts]) if at <= 8]
    assert result.drafts_compared == result.drafts_equal <= len(places) < len(in_engine.placed([outputs], [drafts]))
    assert [job["target"] for job in jobs] == [target.name] * 2
    (folder / "target").mkdir()
    in_engine.measure(source, "transformers", folder, "python", [prompt], 16)
    assert [job["target"] for job in jobs[2:]] == [str(folder / "target")] * 2
