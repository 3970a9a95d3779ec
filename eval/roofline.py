"""Where a round's time goes against the roofline: by stage and by kind of operation, beside the time that reading the weights takes.

    python -m draftsmith.eval.roofline                                       # the built-in target, drafted for by its own first layers
    python -m draftsmith.eval.roofline --drafter runs/quickstart/drafter --depth 5
    python -m draftsmith.eval.roofline --random-shape 8b --dtype bfloat16 --bandwidth 4800       # a GPU, and its data sheet's GB/s

Milliseconds of stages are those of rounds as users get them (captured as graphs on CUDA). Shares by kind of operation come from torch's profiler,
over the same rounds uncaptured, by the device's own time. Products are judged by the bytes of the matrices that they read, as their shapes tell; the
floor is these bytes at the bandwidth. Without --bandwidth that of a matrix-vector product is measured, over more memory than caches hold, so that a
small model, which they do hold, can be faster than its floor. The last line is one JSON object: `bandwidth_gb_s`; `plain` and `round`, each with
`ms`, `by_stage_ms`, `by_kind` (shares), `matrices_mb`, `floor_ms`, `over_floor`; of the target `weights_mb`, `weights_floor_ms`; `hardware`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from .. import UserError, __version__
from ..decode.engine import Engine, Generation
from ..decode.proposer import Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from .machine import short_name

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::linear")
COPIES = ("copy", "cat", "gather", "scatter", "index", "fill", "zero", "contiguous", "clone", "repeat", "stack", "arange", "select_backward")
KINDS = ("products", "attention", "copies", "other")
PROBE_BYTES = {"cpu": 2**28, "cuda": 2**31}  # of the matrix that bandwidth is measured with


def read_bandwidth(device: torch.device, dtype: torch.dtype, *, size: int | None = None, repeats: int = 5) -> float:
    """Bytes a second that a matrix-vector product reads, the best of `repeats`."""
    width = math.isqrt((size or PROBE_BYTES.get(device.type, 2**28)) // dtype.itemsize)
    matrix, vector = torch.ones(width, width, dtype=dtype, device=device), torch.ones(width, dtype=dtype, device=device)
    best = math.inf
    for _ in range(repeats + 1):
        _synchronise(device)
        began = time.perf_counter()
        matrix @ vector
        _synchronise(device)
        best = min(best, time.perf_counter() - began)
    return width * width * dtype.itemsize / best


def weight_bytes(target: Target) -> int:
    """What one token reads: all parameters but the embeddings, of which it takes a row, unless they are the output layer too."""
    tied = target.lm_head.weight is target.embeddings.weight
    count: int = sum(p.numel() * p.element_size() for p in target.model.parameters())
    return count if tied else count - sum(p.numel() * p.element_size() for p in target.embeddings.parameters())


def kind_of(name: str) -> str:
    """One of KINDS for an operation of the profiler."""
    if name in PRODUCTS:
        return "products"
    if "attention" in name:
        return "attention"
    return "copies" if any(word in name for word in COPIES) else "other"


def product_bytes(shapes: Sequence[Sequence[int]], itemsize: int) -> int:
    """Of the largest operand of a product: the matrix, where tokens are few."""
    return max((math.prod(shape) for shape in shapes if shape), default=0) * itemsize


def profiled(engine: Engine, prompt: list[int], tokens: int) -> tuple[dict[str, float], int]:
    """(milliseconds by kind, bytes of the matrices that products read) of decoding `tokens` tokens; the prefill's are in it, and few."""
    gpu = engine.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        engine.generate([prompt], SamplingParams(), tokens)
    kinds: dict[str, float] = defaultdict(float)
    read = 0
    for event in profiler.key_averages(group_by_input_shape=True):
        if not event.key.startswith("aten::"):
            continue
        kinds[kind_of(event.key)] += (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3
        if event.key in PRODUCTS and event.key != "aten::linear":  # which calls one of the others
            read += event.count * product_bytes(event.input_shapes, engine.target.dtype.itemsize)
    return {kind: kinds[kind] for kind in KINDS}, read


def measure(target: Target, proposer: Proposer | None, prompt: list[int], *, tokens: int, repeats: int, bandwidth: float) -> dict[str, Any]:
    """The figures of one round, plain without a proposer."""
    engine = Engine(target, proposer)
    runs: list[Generation] = [engine.generate([prompt], SamplingParams(), tokens) for _ in range(repeats + 2)][2:]  # two warm up and capture
    best = min(runs, key=lambda out: out.times.decode)
    rounds = len(best.rounds[0])
    stages = {"draft": best.times.draft, "verify": best.times.verify}
    stages["rest"] = best.times.decode - sum(stages.values())
    loose = Engine(target, proposer, overlap=False)
    loose.generate([prompt], SamplingParams(), tokens)
    few, many = (profiled(loose, prompt, count) for count in (1, tokens))
    kinds = {kind: max(0.0, many[0][kind] - few[0][kind]) for kind in KINDS}  # less the prefill
    read = (many[1] - few[1]) / rounds
    ms, floor = 1e3 * best.times.decode / rounds, 1e3 * read / bandwidth
    whole = sum(kinds.values()) or 1.0
    return {
        "ms": round(ms, 4),
        "rounds": rounds,
        "tokens_a_round": round((len(best.tokens[0]) - 1) / rounds, 3),
        "by_stage_ms": {name: round(1e3 * seconds / rounds, 4) for name, seconds in stages.items()},
        "by_kind": {kind: round(spent / whole, 4) for kind, spent in kinds.items()},
        "matrices_mb": round(read / 1e6, 3),
        "floor_ms": round(floor, 4),
        "over_floor": round(ms / floor, 3),
    }


def analyse(target: Target, proposer: Proposer, prompt: list[int], *, tokens: int, repeats: int, bandwidth: float | None) -> dict[str, Any]:
    """All figures but `hardware`. bandwidth: bytes a second; None: measured."""
    rate = bandwidth or read_bandwidth(target.device, target.dtype)
    settings: dict[str, Any] = {"tokens": tokens, "repeats": repeats, "bandwidth": rate}
    plain = measure(target, None, prompt, **settings)
    return {
        "target": short_name(target.name),
        "bandwidth_gb_s": round(rate / 1e9, 2),
        "bandwidth": "measured" if bandwidth is None else "given",
        "weights_mb": round(weight_bytes(target) / 1e6, 3),
        "weights_floor_ms": round(1e3 * weight_bytes(target) / rate, 4),
        "plain": plain,
        "round": measure(target, proposer, prompt, **settings),
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(result: dict[str, Any]) -> Table:
    table = Table("", "plain step", "round", box=None)
    both = (result["plain"], result["round"])
    table.add_row("ms", *(f"{one['ms']:.3f}" for one in both))
    table.add_row("tokens", *(f"{one['tokens_a_round']:.2f}" for one in both))
    for stage in ("draft", "verify", "rest"):
        table.add_row(f"  {stage}, ms", *(f"{one['by_stage_ms'][stage]:.3f}" for one in both))
    for kind in KINDS:
        table.add_row(f"  {kind}", *(f"{one['by_kind'][kind]:.0%}" for one in both))
    table.add_row("matrices read, MB", *(f"{one['matrices_mb']:.1f}" for one in both))
    table.add_row("floor, ms", *(f"{one['floor_ms']:.3f}" for one in both))
    table.add_row("over the floor", *(f"{one['over_floor']:.2f}x" for one in both))
    return table


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (2: bad flags)."""
    parser = _Parser(prog="python -m draftsmith.eval.roofline", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="builtin:quickstart", help="folder, hub name or builtin:NAME")
    parser.add_argument("--drafter", help="as draftsmith eval takes; if not given, the target's own first layers")
    parser.add_argument("--random-shape", help="as engine_bench takes: a Llama with random weights, in place of a target")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--depth", type=int, default=4, help="draft tokens of a chain")
    parser.add_argument("--tokens", type=int, default=96, help="that are decoded")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, help="of the memory, GB/s; measured if not given")
    try:
        options = parser.parse_args(arguments)
        for name, least in (("depth", 1), ("tokens", 8), ("repeats", 1)):
            if getattr(options, name) < least:
                raise UserError(f"--{name}: wanted at least {least}, got {getattr(options, name)}")
        if options.bandwidth is not None and not 0 < options.bandwidth < math.inf:
            raise UserError(f"--bandwidth: wanted GB/s above 0, got {options.bandwidth:g}")
        result = _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    words = f"{result['target']}: {result['weights_mb']:.1f} MB of weights, {result['weights_floor_ms']:.3f} ms to read"
    console.print(f"{words} at {result['bandwidth_gb_s']:g} GB/s ({result['bandwidth']})", soft_wrap=True, highlight=False)
    console.print(_table(result))
    print(json.dumps(result))
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    from ..heads.registry import open_drafter
    from ..heads.standalone import early_exit
    from ..recipes.schema import Decode
    from .drafting import make_proposer
    from .engine_bench import open_target

    target, prompts = open_target(options, 1)
    head = early_exit(target, range(max(1, target.num_layers // 6)))
    drafter = head if options.drafter is None else open_drafter(options.drafter, target)[0]
    proposer = make_proposer(drafter, Decode(depth=options.depth), target, prompts[0])
    given = None if options.bandwidth is None else 1e9 * options.bandwidth
    result = analyse(target, proposer, prompts[0], tokens=options.tokens, repeats=options.repeats, bandwidth=given)
    return result | {
        "drafter": options.drafter or "its first layers",
        "depth": options.depth,
        "hardware": {
            "device": torch.cuda.get_device_name() if target.device.type == "cuda" else platform.processor() or platform.machine(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "draftsmith": __version__,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
