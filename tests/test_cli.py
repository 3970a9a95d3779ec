"""The command as users run it: one whole small run, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = [
    "data.num_prompts=8",
    "data.response_tokens=24",
    "data.generation_batch=8",
    "train.steps=6",
    "train.batch_size=4",
    "train.micro_batch_size=2",
    "eval.every=3",
    "eval.dev_prompts=2",
    "eval.dev_tokens=12",
    "eval.num_prompts=3",
    "eval.max_new_tokens=16",
    "eval.bootstrap=50",
    "eval.costs=false",  # measured by the tests of the evaluation
    "eval.tune=false",  # takes longer than such a training; one run does it
    "eval.threads=1",  # measuring the best number takes long where other tests run beside
]


def draftsmith(*arguments: str, module: str = "draftsmith", launcher: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher, "-m", module, *arguments] if launcher else [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", **env}, timeout=300)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "r"
    done = draftsmith("train", "quickstart/eagle3", f"out={folder}", *SMALL, "eval.tune=true")
    assert done.returncode == 0, done.stderr
    assert "draft chosen for this machine" in " ".join(done.stdout.split())
    assert "PASS" in done.stdout and "report.html" in done.stdout
    return folder


def test_a_run_leaves_what_the_plan_promises(run_folder: Path) -> None:
    report = json.loads((run_folder / "eval" / "report.json").read_text())
    assert [row["temperature"] for row in report["results"]] == [0.0, 1.0]
    for row in report["results"]:
        assert row["lossless"]["status"] == "pass" and row["lossless"]["identical"] == row["lossless"]["checked"] == 3
        assert row["tau"] >= 1 and row["tokens_per_second"]["eager"] > 0
    tuned = json.loads((run_folder / "drafter" / "tuning.json").read_text())
    assert report["drafter"]["choice"] == tuned["measured"]["words"] and tuned["prompts"]["split"] == "dev"
    recorded = json.loads((run_folder / "drafter" / "acceptance.json").read_text())
    assert recorded["decode"].get("greedy_temperatures") == tuned["decode"].get("greedy_temperatures")  # check measures the chosen draft
    names = {str(path.relative_to(run_folder)) for path in run_folder.rglob("*") if path.is_file()}
    wanted = {"recipe.yaml", "provenance.json", "metrics.jsonl", "drafter/config.json", "drafter/model.safetensors", "drafter/contract.json"}
    assert wanted | {"eval/report.md", "eval/report.html", "export/vllm/model.safetensors"} <= names and not any("partial" in name for name in names)
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "measured_tau" in m] == [3, 6]


def test_a_second_run_skips_what_is_done(run_folder: Path) -> None:
    """A run that was cut off behind its report makes the rest."""
    before = (run_folder / "eval" / "report.json").stat().st_mtime_ns
    shutil.rmtree(run_folder / "export")
    done = draftsmith("train", "quickstart/eagle3", f"out={run_folder}", *SMALL, "eval.tune=true")
    assert done.returncode == 0 and "report.html" in done.stdout
    assert (run_folder / "eval" / "report.json").stat().st_mtime_ns == before and (run_folder / "export" / "vllm" / "config.json").is_file()


def test_generate_streams_and_prints_tau(run_folder: Path) -> None:
    done = draftsmith("generate", str(run_folder / "drafter"), "--prompt", "def main():", "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert "tau" in done.stdout and "tokens/s" in done.stdout


def test_eval_measures_a_drafter(run_folder: Path, tmp_path: Path) -> None:
    small = ["--num-prompts", "2", "--max-new-tokens", "8", "--threads", "1", "--no-eager", "--tree", "dynamic", "--depth", "2", "--nodes", "8"]
    done = draftsmith("eval", str(run_folder / "drafter"), "--out", str(tmp_path), *small)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["drafter"]["nodes"] == 8 and report["results"][1]["lossless"]["identical"] == 2
    assert draftsmith("eval", str(run_folder / "drafter"), "--out", str(tmp_path), "--tree", "bush").returncode == 2


def test_eval_takes_drafters_that_need_no_training(tmp_path: Path) -> None:
    small = ["--num-prompts", "2", "--max-new-tokens", "12", "--threads", "1", "--no-eager", "--depth", "3", "--temperature", "0"]
    target = str(Path(__file__).parents[1] / "recipes" / "quickstart" / "target")
    for drafter, method in (("prompt_lookup", "prompt_lookup"), (target, "draft_model")):
        done = draftsmith("eval", drafter, "--out", str(tmp_path / method), *small)
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / method / "report.json").read_text())
        assert report["drafter"]["method"] == method and report["results"][0]["lossless"]["status"] == "pass"
    assert report["results"][0]["tau"] > 3  # the target as its own draft: a chain of 3 and the bonus token, but for the last round
    done = draftsmith("eval", "no_such_drafter", "--out", str(tmp_path / "x"))
    assert done.returncode == 2 and "wanted a drafter's folder" in done.stderr and "Traceback" not in done.stderr


def test_two_processes_train_together(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517")
    arguments = ["quickstart/eagle3", f"out={tmp_path / 'r'}", *SMALL]
    done = draftsmith(*arguments, module="draftsmith.train", launcher=launcher, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r" / "training.json").read_text())["processes"] == 2
    assert "PASS" in done.stdout


def test_the_quickstart_runs_on_all_cores(tmp_path: Path) -> None:
    """`draftsmith quickstart` starts its own processes; their exit codes and their one line of error come through."""
    done = draftsmith("quickstart", f"out={tmp_path / 'r'}", *SMALL, "train.trackers=[tensorboard]")
    assert done.returncode == 0, done.stderr
    wanted = max(n for n in range(1, min(os.cpu_count() or 1, 4) + 1) if 4 % n == 0)
    assert json.loads((tmp_path / "r" / "training.json").read_text())["processes"] == wanted
    assert done.stdout.count("report.html") == 1 and list((tmp_path / "r").rglob("events.out.tfevents.*"))
    bad = draftsmith("quickstart", f"out={tmp_path / 'x'}", *SMALL, "drafter.taps=[3,99]")
    assert bad.returncode == 2 and [line for line in bad.stderr.splitlines() if line.startswith("error: drafter.taps: wanted")], bad.stderr
    assert "Traceback" not in bad.stderr


def test_bad_input_is_one_line_and_exit_2(run_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "llama"}')
    blocked = tmp_path / "file"
    blocked.touch()
    for arguments, says in (
        (("train", "quickstart/eagel3"), "did you mean quickstart/eagle3"),
        (("train", "quickstart/eagle3", "train.stepz=3"), "train.steps"),
        (("train", "quickstart/eagle3", "eval.temperatures=[-1.0]"), "eval.temperatures"),
        (("train", "quickstart/eagle3", f"target.path={bare}", f"out={tmp_path / 'x'}"), "tokenizer"),
        (("train", "quickstart/eagle3", f"out={blocked / 'x'}"), "wanted a folder that can be written"),
        (("train", "quickstart/eagle3", f"out={tmp_path / 'y'}", "target.device=cuda", "target.dtype=float32"), "target.device: wanted auto or cpu"),
        (("train", "quickstart/eagle3", f"out={run_folder}"), "holds a run of another recipe"),
        (("generate", str(tmp_path / "none"), "--prompt", "x"), "wanted a drafter's folder"),
        (("generate", str(run_folder / "drafter"), "--prompt", "x", "--temperature", "-1"), "temperature: wanted a finite number >= 0"),
    ):
        done = draftsmith(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("error: ") and says in last, (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    assert "quickstart/eagle3" in draftsmith("recipes", "list").stdout
    assert draftsmith("recipes", "copy", "quickstart/eagle3", str(tmp_path / "mine.yaml")).returncode == 0
    assert (tmp_path / "mine.yaml").read_text() == draftsmith("recipes", "show", "quickstart/eagle3").stdout
    assert draftsmith("recipes", "copy", "quickstart/eagle3", str(tmp_path / "mine.yaml")).returncode == 2


def test_processes_that_accelerate_drops_are_noticed(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")
    done = draftsmith("quickstart/eagle3", f"out={tmp_path / 'r'}", *SMALL, module="draftsmith.train", launcher=launcher)
    assert done.returncode != 0 and "processes: wanted 2, got 1" in done.stderr
    assert not (tmp_path / "r").exists()
