"""Kills a real training at random moments, again and again, and compares what comes out with an undisturbed one; and all engines with one process.

    python tests/train/faults.py                                    30 kills of one process, then the engines; prints "0 lost, 0 diverged"
    python tests/train/faults.py --kills 5 --processes 2            two processes, all killed at once

lost: a step that is missing in the curve, or there twice. diverged: a loss, gradient norm or measured tau that is not the undisturbed run's: to the
last bit, with one process or with as many as that had.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPE = [
    "quickstart/eagle3",
    "data.num_prompts=24",
    "data.response_tokens=16",
    "data.generation_batch=24",
    "data.prompt_chars=100",
    "train.steps=40",
    "train.log_every=1",
    "train.save_every=4",
    "train.keep_last=3",
    "eval.every=10",
    "eval.dev_prompts=2",
    "eval.tune=false",
    "eval.dev_tokens=8",
    "eval.num_prompts=1",
    "eval.max_new_tokens=8",
    "eval.timed_prompts=1",
    "eval.threads=1",
    "eval.eager=false",
    "eval.others=[]",
    "eval.bootstrap=10",
    "export.formats=[]",
]


def start(folder: Path, processes: int) -> subprocess.Popen[bytes]:
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, "-m", "draftsmith.train", *RECIPE, f"out={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({"ACCELERATE_USE_CPU": "true"} if processes > 1 else {})
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def curve(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be being written
    return [{key: line[key] for key in ("step", "loss", "gradient_norm", "measured_tau") if key in line} for line in lines]


def kill(process: subprocess.Popen[bytes], processes: int) -> None:
    """All of a run's processes at once, as a machine that goes away."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False).stdout.split()
    for pid in [process.pid, *(map(int, children) if processes > 1 else ())]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def kills(count: int, processes: int, root: Path, seed: int) -> tuple[int, int]:
    """(lost, diverged) after `count` kills at random moments of the training."""
    draw, whole, broken = random.Random(seed), root / "whole", root / "broken"
    if start(whole, processes).wait() != 0:
        raise SystemExit(f"the undisturbed run failed: {root / 'whole.log'}")
    wanted, done, lost, diverged = curve(whole), 0, 0, 0
    while done < count:
        if (broken / "drafter" / "config.json").is_file():  # one training does not last for so many kills: the next
            more_lost, more_diverged = judged(broken, whole)
            lost, diverged = lost + more_lost, diverged + more_diverged
            shutil.rmtree(broken)
        if not broken.exists():
            broken.mkdir()
            shutil.copytree(whole / "data", broken / "data")
        process = start(broken, processes)
        before, more = len(curve(broken)), draw.randint(1, 6)
        while process.poll() is None and not before < len(curve(broken)) - more and len(curve(broken)) <= len(wanted) - 1:
            time.sleep(0.02)
            if len(curve(broken)) < before:  # lines behind the checkpoint were cut off
                before = len(curve(broken))
        time.sleep(draw.random() * 0.5)
        if process.poll() is None:
            kill(process, processes)
            done += 1
            print(
                f"kill {done}: {len(curve(broken))} of {len(wanted)} lines, checkpoints {sorted(p.name for p in (broken / 'checkpoints').glob('*'))}"
            )
    if start(broken, processes).wait() != 0:
        raise SystemExit(f"the resumed run failed: {root / 'broken.log'}")
    more_lost, more_diverged = judged(broken, whole)
    return lost + more_lost, diverged + more_diverged


def judged(broken: Path, whole: Path) -> tuple[int, int]:
    """(lost, diverged) of a run that has ended: its curve and its drafter."""
    lost, diverged = compared(curve(broken), curve(whole))
    mine, theirs = ((folder / "drafter" / "model.safetensors").read_bytes() for folder in (broken, whole))
    return lost, diverged + (mine != theirs)


def compared(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[int, int]:
    keys = [(line["step"], "loss" in line) for line in got]
    lost = len({(line["step"], "loss" in line) for line in wanted} - set(keys)) + len(keys) - len(set(keys))
    return lost, sum(a != b for a, b in zip(got, wanted, strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", action=argparse.BooleanOptionalAction, default=True, help="the tests of DDP, FSDP2 and ZeRO too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lost, diverged = kills(options.kills, options.processes, Path(folder), options.seed)
    print(f"{options.kills} kills: {lost} lost, {diverged} diverged")
    if options.engines:
        diverged += subprocess.run([sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("test_engines.py"))], check=False).returncode
    print(f"{lost} lost, {diverged} diverged")
    return int(lost + diverged > 0)


if __name__ == "__main__":
    sys.exit(main())
