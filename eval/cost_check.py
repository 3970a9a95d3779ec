"""How well the cost model predicts rounds of tree sizes that it was not fitted to: one table, and one JSON object as the last line.

    python -m draftsmith.eval.cost_check runs/quickstart/drafter                                   # on a quiet machine
    python -m draftsmith.eval.cost_check runs/quickstart/drafter --cpu-time --threads 1            # beside other work
    python -m draftsmith.eval.cost_check prompt/to/draft --tree chain --fit 1 4 8 --hold-out 2 6 --batch 1 4 --context 64 256

Keys of the JSON: `conditions` (see SCHEMA.md), `points` ({batch, context, depth, nodes, predicted_ms, measured_ms, error, fitted}), `worst` (the
largest error of a shape that was not fitted, a share), `tolerance`. Exits with 1 if `worst` exceeds the tolerance, 0.15 if not given.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import UserError
from ..decode.prompts import render_prompt
from ..decode.proposer import Proposer
from ..decode.target import Target
from ..heads.registry import Drafter, open_drafter
from ..recipes.schema import TargetRef
from .cost_model import Condition, CostModel
from .latency import BUCKETS, Shape, fit_and_test
from .suites import load_suite

TOLERANCE = 0.15


def prompt_of(target: Target, length: int) -> list[int]:
    """Token ids of exactly this length, of the embedded suite's development prompts."""
    assert target.tokenizer is not None
    ids: list[int] = []
    for messages in load_suite("stdlib", 64, split="dev").prompts:
        ids += render_prompt(target.tokenizer, messages)
        if len(ids) >= length:
            return ids[:length]
    raise UserError(f"--context: wanted at most {len(ids)} tokens, which the development prompts have, got {length}")


def check(
    target: Target, drafter: Drafter, *, tree: str, depth: int, topk: int, fitted: Sequence[int], held: Sequence[int], batches: Sequence[int],
    contexts: Sequence[int], cpu_time: bool, repeats: int, new_tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """All figures of the module's docstring but the tolerance."""

    def shape(nodes: int) -> Shape:
        return (nodes, nodes) if tree == "chain" else (min(depth, nodes), nodes)

    def make(wanted: Shape) -> Proposer:
        return drafter.proposer(tree=tree, depth=wanted[0], topk=topk, nodes=wanted[1])

    clock = time.process_time if cpu_time else time.perf_counter
    conditions: list[Condition] = []
    points: list[dict[str, Any]] = []
    for batch in batches:
        for context in contexts:
            condition, measured = fit_and_test(
                target, make, [shape(n) for n in fitted], [shape(n) for n in held], prompt_of(target, context), batch=batch,
                sizes=BUCKETS, repeats=repeats, new_tokens=new_tokens, clock=clock,
            )  # fmt: skip
            conditions.append(condition)
            for (deep, nodes), ms in measured.items():
                guess = condition.round(deep, nodes)
                about = {"batch": batch, "context": round(condition.context), "depth": deep, "nodes": nodes}
                points.append(about | {"predicted_ms": guess, "measured_ms": ms, "error": guess / ms - 1, "fitted": nodes in fitted})
    worst = max((abs(point["error"]) for point in points if not point["fitted"]), default=0.0)
    return {"conditions": CostModel(tuple(conditions)).to_json(), "points": points, "worst": worst}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.eval.cost_check", description="Predicted against measured rounds.")
    parser.add_argument("drafter", help="as for draftsmith eval")
    parser.add_argument("--target", default="builtin:quickstart", help="folder, hub name or builtin:NAME")
    parser.add_argument("--tree", default="dynamic", choices=("dynamic", "chain"))
    parser.add_argument("--depth", type=int, default=4, help="of dynamic trees")
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--fit", type=int, nargs="+", default=[3, 7, 15, 31], help="draft nodes of the rounds that are fitted")
    parser.add_argument("--hold-out", type=int, nargs="+", default=[5, 11, 23, 40], help="draft nodes of the rounds that are predicted")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[96])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of the wall clock: for a machine with other work, with one thread")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args(arguments)
    try:
        numbers = [options.depth, options.topk, options.repeats, options.threads, *options.fit, *options.hold_out, *options.batch, *options.context]
        if min(numbers) < 1 or options.new_tokens < 2:
            raise UserError("cost check: wanted sizes of at least 1 (new tokens: 2), got a smaller one")
        if options.cpu_time and options.threads != 1:
            raise UserError(f"--cpu-time: wanted --threads 1, as CPU time adds up over threads, got {options.threads}")
        torch.set_num_threads(options.threads)
        target = Target.load(TargetRef(path=options.target).location)
        drafter, _ = open_drafter(options.drafter, target)
        result = check(
            target, drafter, tree=options.tree, depth=options.depth, topk=options.topk, fitted=options.fit, held=options.hold_out,
            batches=options.batch, contexts=options.context, cpu_time=options.cpu_time, repeats=options.repeats, new_tokens=options.new_tokens,
        )  # fmt: skip
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("batch", "context", "depth", "nodes", "", "predicted, ms", "measured, ms", "error", box=None)
    for p in result["points"]:
        kind = "fitted" if p["fitted"] else "predicted"
        figures = (f"{p['predicted_ms']:.2f}", f"{p['measured_ms']:.2f}", f"{100 * p['error']:+.1f} %")
        table.add_row(*(str(p[name]) for name in ("batch", "context", "depth", "nodes")), kind, *figures)
    console = Console()
    console.print(table)
    good = result["worst"] <= options.tolerance
    verdict = "within" if good else "NOT within"
    console.print(f"worst error of an unseen size: {100 * result['worst']:.1f} %, {verdict} {100 * options.tolerance:.0f} %", highlight=False)
    print(json.dumps(result | {"tolerance": options.tolerance}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
