"""The benchmark of a GPU that needs no download: a target trained from scratch, drafters for it, one table. In pieces, each of some minutes.

    python -m draftsmith.train.gpu_bench target --minutes 6                  an H200's minutes; recipes/gpu-bench/target.yaml has the arithmetic
    python -m draftsmith.train.gpu_bench eagle3 medusa --minutes 1.2         each
    python -m draftsmith.train.gpu_bench dflash dspark draft --minutes 1.2   then the table over all that are there, and gpu-bench.json
    python -m draftsmith.train.gpu_bench --toy --out runs/gpu-toy            the very same pieces, all of them, at toy size on a CPU

Each piece is `draftsmith train gpu-bench/PIECE` in a process of its own. What is finished in the folder is not done again; what was killed goes on
from its last checkpoint. Evaluation: held-out code, T=0 and T=1, batch 1, 4 and 16, against our own plain decoding in the same process.
Exits with 1 if a piece failed or is not lossless, with 2 for wrong input.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from .. import UserError, __version__
from ..eval.compare import comparison_table, gather
from ..eval.report import read_report
from . import contest

TARGET, DRAFTERS = "target", ("eagle3", "medusa", "dflash", "dspark", "draft")
MINUTES = 1.2  # of training a drafter; the target's are in its recipe
TOY_MINUTES = 0.05

TOY_TARGET = [
    "model.vocab_size=512", "model.hidden_size=48", "model.intermediate_size=96", "model.num_hidden_layers=6", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.head_dim=12", "model.max_position_embeddings=512", "train.steps=30", "train.max_hours=null",
    "train.corpus_mib=0.5", "train.batch_size=4", "train.micro_batch_size=2", "train.sequence_length=192", "train.warmup_steps=5",
    "train.eval_every=15", "train.mixed_precision=no",
]  # fmt: skip
TOY_DRAFTER = [
    "target.dtype=float32", "data.num_prompts=24", "data.prompt_chars=80", "data.response_tokens=24", "data.generation_batch=24",
    "data.sequence_length=192", "train.batch_size=4", "train.micro_batch_size=4", "train.mixed_precision=no", "train.keep_features_gib=0.05",
    "eval.every=1000", "eval.dev_prompts=2", "eval.dev_tokens=8", "eval.prompt_chars=80", "eval.num_prompts=6", "eval.max_new_tokens=12",
    "eval.timed_prompts=4", "eval.gate_batch=2", "eval.batch=[1,2]", "eval.bootstrap=50", "eval.threads=1",
]  # fmt: skip

console = Console()


def run(pieces: Sequence[str], minutes: float | None, out: Path, toy: bool) -> int:
    """Do the pieces, in their order, then the table over all that are finished. Returns the exit code."""
    if TARGET in pieces:
        hours = [] if minutes is None else [f"train.max_hours={minutes / 60}"]
        command = [sys.executable, "-m", "draftsmith", "train", f"gpu-bench/{TARGET}", *(TOY_TARGET if toy else hours), f"out={out / TARGET}"]
        if code := subprocess.run(command, check=False).returncode:
            return code
    if not (out / TARGET / "model" / "training.json").is_file():
        raise UserError(f"--out: wanted a folder with a finished target, got {out}; run the piece {TARGET} first")
    names = [f"gpu-bench/{piece}" for piece in pieces if piece != TARGET]
    code = 0
    if names:
        budget = (TOY_MINUTES if toy else MINUTES) if minutes is None else minutes
        code = contest.run(names, [*(TOY_DRAFTER if toy else ()), f"target.path={out / TARGET / 'model'}"], budget / 60, out)
    found = [piece for piece in DRAFTERS if (out / piece / "eval" / "report.json").is_file()]
    if set(found) - set(pieces):
        console.print(comparison_table(gather([out / piece for piece in found])), soft_wrap=True)
    if found:
        result = {"command": shlex.join(["python", "-m", "draftsmith.train.gpu_bench", *sys.argv[1:]]), **summary(out, found)}
        path = out / "gpu-bench.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        console.print(f"figures: {path.resolve()}", soft_wrap=True, highlight=False)
    return code


def summary(out: Path, found: Sequence[str]) -> dict[str, Any]:
    """What a table needs of the target's training and of each report: overall rows, without their distributions."""
    kept = ("temperature", "batch", "rule", "tau", "tau_ci", "tokens_per_second", "speedup", "time_split", "cost", "prompts")
    drafters = {}
    for piece in found:
        report = read_report(out / piece / "eval").to_json()
        rows = [row for row in report["results"] if row["category"] == "all"]
        drafters[piece] = {
            "parameters": report["drafter"].get("parameters"),
            "training": report["training"],
            "rows": [{"lossless": row["lossless"]["status"], **{key: row[key] for key in kept}} for row in rows],
        }
        hardware, protocol = report["hardware"], report["protocol"]
    return {
        "draftsmith": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "hardware": hardware,
        "protocol": protocol,
        "target": json.loads((out / TARGET / "model" / "training.json").read_text()),
        "drafters": drafters,
    }


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.train.gpu_bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{TARGET}, {', '.join(DRAFTERS)}; none: all of them")
    parser.add_argument(
        "--minutes", type=float, help=f"of training, for each piece; if not given {MINUTES:g} for drafters, the recipe's for the target"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-bench"))
    parser.add_argument("--toy", action="store_true", help="the same pieces at toy size")
    given = parser.parse_args(arguments)
    try:
        if given.minutes is not None and not given.minutes > 0:
            raise UserError(f"--minutes: wanted more than 0, got {given.minutes:g}")
        if unknown := [piece for piece in given.pieces if piece not in (TARGET, *DRAFTERS)]:
            raise UserError(f"piece: wanted {TARGET}, {', '.join(DRAFTERS)}, got {unknown[0]}")
        return run(given.pieces or [TARGET, *DRAFTERS], given.minutes, given.out, given.toy)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
