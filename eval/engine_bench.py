"""Where the engine's time goes, and how it compares with transformers' own assisted generation: one table, and one JSON object as the last line.

    python -m draftsmith.eval.engine_bench                                                   # the built-in target, on this machine
    python -m draftsmith.eval.engine_bench --target meta-llama/Llama-3.1-8B-Instruct --drafter meta-llama/Llama-3.2-1B-Instruct
    python -m draftsmith.eval.engine_bench --random-shape 8b --dtype bfloat16 --device cuda  # latencies of a shape, no download

Everything runs in one process, interleaved prompt by prompt. Keys of the JSON: `t_ar_ms`, `t_verify_ms` (by tokens verified), `t_draft_ms`,
`overhead_ms` (of a round), `tau`, `speedup`, `efficiency` = speedup / (tau * t_ar / (t_draft + t_verify)), `ratios` (our tokens/s over theirs,
greedy, decoding and prefill together, each {value, lo, hi}): `plain_vs_generate`, `chain_vs_assisted`, `lookup_vs_prompt_lookup`; `hardware`.
`floor_ms` is the time that reading the weights takes at `bandwidth_gb_s`, `t_ar_over_floor` how many times that a plain step takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from .. import UserError, __version__
from ..decode.engine import Engine, Generation
from ..decode.free.lookup import PromptLookup
from ..decode.prompts import eos_ids, render_prompt
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..heads.registry import open_drafter
from ..heads.standalone import Standalone, early_exit
from ..recipes.schema import TargetRef
from .latency import verify_latencies
from .machine import choose_threads, short_name
from .roofline import read_bandwidth, weight_bytes
from .stats import mean_ratio_interval, paired_ratio_interval
from .suites import load_suite

SHAPES: dict[str, dict[str, int]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}
RANDOM_VOCABULARY = 128256
Run = Callable[[list[int]], tuple[int, float]]  # prompt -> (new tokens, seconds)


def random_target(shape: str, dtype: str, device: str) -> Target:
    """A Llama of that shape with random weights and Llama 3's vocabulary, for latencies only."""
    config = LlamaConfig(vocab_size=RANDOM_VOCABULARY, max_position_embeddings=8192, head_dim=SHAPES[shape]["hidden_size"] // 32, **SHAPES[shape])
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return Target(model, None, f"random-{shape}")


def _synchronise(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def _ours(engine: Engine, tokens: int, stops: Sequence[int], into: list[Generation]) -> Run:
    def run(prompt: list[int]) -> tuple[int, float]:
        out = engine.generate([prompt], SamplingParams(), tokens, eos_ids=stops)
        into.append(out)
        return len(out.tokens[0]), out.times.total

    return run


def _theirs(target: Target, tokens: int, stops: Sequence[int], **options: Any) -> Run:
    def run(prompt: list[int]) -> tuple[int, float]:
        ids = torch.tensor([prompt], device=target.device)
        _synchronise(target)
        began = time.perf_counter()
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=stops[0] if stops else 0,
            **options,
        )
        _synchronise(target)
        return out.shape[1] - len(prompt), time.perf_counter() - began

    return run


def _ratio(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> dict[str, float]:
    interval = paired_ratio_interval([n for n, _ in ours], [t for _, t in ours], [n for n, _ in theirs], [t for _, t in theirs])
    return {"value": round(interval.value, 4), "lo": round(interval.lo, 4), "hi": round(interval.hi, 4)}


def bench(target: Target, draft: Standalone, prompts: list[list[int]], *, tokens: int, depth: int, lookup: int, repeats: int) -> dict[str, Any]:
    """All figures of the module's docstring but `hardware`. Raises UserError if a prompt does not fit."""
    stops = eos_ids(target.model) if target.tokenizer is not None else []
    kept: dict[str, list[Generation]] = {"plain": [], "chain": [], "lookup": []}
    constant = {"assistant_model": draft.draft.model, "num_assistant_tokens": depth, "num_assistant_tokens_schedule": "constant"}
    for name, value in (("num_assistant_tokens", depth), ("num_assistant_tokens_schedule", "constant"), ("assistant_confidence_threshold", 0.0)):
        setattr(draft.draft.model.generation_config, name, value)  # transformers reads them from the assistant
    runs: dict[str, Run] = {
        "plain": _ours(Engine(target), tokens, stops, kept["plain"]),
        "generate": _theirs(target, tokens, stops),
        "chain": _ours(Engine(target, draft.proposer(depth=depth)), tokens, stops, kept["chain"]),
        "assisted": _theirs(target, tokens, stops, **constant),
        "lookup": _ours(Engine(target, PromptLookup(lookup)), tokens, stops, kept["lookup"]),
        "prompt_lookup": _theirs(target, tokens, stops, prompt_lookup_num_tokens=lookup),
    }
    measured: dict[str, list[tuple[int, float]]] = {name: [] for name in runs}
    order = list(runs)
    for prompt in [prompts[0], *prompts]:  # the first once more than is counted: warm-up
        target.set_taps(())
        for name in order:
            measured[name].append(runs[name](prompt))
        random.Random(len(measured["plain"])).shuffle(order)
    measured = {name: results[1:] for name, results in measured.items()}
    kept = {name: results[1:] for name, results in kept.items()}
    rounds = sum(len(g.rounds[0]) for g in kept["chain"])
    decoded = sum(len(g.tokens[0]) - 1 for g in kept["chain"])
    seconds, draft_s, verify_s = (sum(getattr(g.times, part) for g in kept["chain"]) for part in ("decode", "draft", "verify"))
    plain = mean_ratio_interval([g.times.decode for g in kept["plain"]], [len(g.tokens[0]) - 1 for g in kept["plain"]])
    tau, speedup = decoded / rounds, decoded / seconds * plain.value
    return {
        "target": short_name(target.name),
        "drafter": short_name(draft.draft.name),
        "depth": depth,
        "prompts": len(prompts),
        "max_new_tokens": tokens,
        "t_ar_ms": round(1e3 * plain.value, 4),
        "t_verify_ms": {str(n): round(ms, 4) for n, ms in verify_latencies(target, prompts[0], repeats).items()},
        "t_draft_ms": round(1e3 * draft_s / rounds, 4),
        "overhead_ms": round(1e3 * (seconds - draft_s - verify_s) / rounds, 4),
        "tau": round(tau, 4),
        "speedup": round(speedup, 4),
        "efficiency": round(speedup / (tau * plain.value * rounds / (draft_s + verify_s)), 4),
        "tokens_per_second": {name: round(sum(n for n, _ in r) / sum(t for _, t in r), 2) for name, r in measured.items()},
        "ratios": {
            "plain_vs_generate": _ratio(measured["plain"], measured["generate"]),
            "chain_vs_assisted": _ratio(measured["chain"], measured["assisted"]),
            "lookup_vs_prompt_lookup": _ratio(measured["lookup"], measured["prompt_lookup"]),
        },
    }


def _table(result: dict[str, Any]) -> Table:
    table = Table("figure", "value", box=None, title=f"{result['target']}, drafted for by {result['drafter']}")
    for name in ("t_ar_ms", "floor_ms", "t_ar_over_floor", "t_draft_ms", "overhead_ms", "tau", "speedup", "efficiency"):
        table.add_row(name, f"{result[name]:.3f}")
    table.add_row("t_verify_ms", "  ".join(f"{n}: {ms:.2f}" for n, ms in result["t_verify_ms"].items()))
    for name, speed in result["tokens_per_second"].items():
        table.add_row(f"{name}, tokens/s", f"{speed:.1f}")
    for name, ratio in result["ratios"].items():
        table.add_row(name, f"{ratio['value']:.2f}x ({ratio['lo']:.2f}-{ratio['hi']:.2f})")
    return table


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (2: bad input)."""
    parser = _Parser(prog="python -m draftsmith.eval.engine_bench", description="Where the engine's time goes.")
    parser.add_argument("--target", default="builtin:quickstart", help="folder, hub name or builtin:NAME")
    parser.add_argument("--drafter", help="a causal LM with the target's tokenizer; if not given, the target's first sixth of its layers")
    parser.add_argument("--random-shape", choices=SHAPES, help="a Llama of this shape with random weights, in place of a target")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--compile", action="store_true", help="torch.compile for the target's layers")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4, help="draft tokens of the draft model a round")
    parser.add_argument("--lookup", type=int, default=10, help="draft tokens of prompt lookup a round")
    parser.add_argument("--bandwidth", type=float, help="of the device's memory, GB/s; if not given, that of a matrix-vector product")
    parser.add_argument("--repeats", type=int, default=30, help="measurements of each verification size")
    console = Console()
    try:
        options = parser.parse_args(arguments)
        if options.bandwidth is not None and not 0 < options.bandwidth < float("inf"):
            raise UserError(f"--bandwidth: wanted GB/s above 0, got {options.bandwidth:g}")
        for name in ("num_prompts", "max_new_tokens", "depth", "lookup", "repeats"):
            if getattr(options, name) < 1 + (name == "max_new_tokens"):
                raise UserError(f"--{name.replace('_', '-')}: wanted at least {1 + (name == 'max_new_tokens')}, got {getattr(options, name)}")
        result = _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(_table(result))
    print(json.dumps(result))
    return 0


def open_target(options: argparse.Namespace, prompts: int) -> tuple[Target, list[list[int]]]:
    """(target, prompts) by the flags --target or --random-shape, --dtype and --device. Raises UserError for a device that is not there."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: wanted cpu, as this machine has no CUDA, got cuda")
    if options.random_shape:
        if options.random_shape not in SHAPES:
            raise UserError(f"--random-shape: wanted {' or '.join(SHAPES)}, got {options.random_shape}")
        dtype = ("bfloat16" if device.startswith("cuda") else "float32") if options.dtype == "auto" else options.dtype
        generator = torch.Generator().manual_seed(0)
        given = [torch.randint(5, 1000, (128,), generator=generator).tolist() for _ in range(prompts)]
        return random_target(options.random_shape, dtype, device), given
    target = Target.load(TargetRef(path=options.target).location, dtype=options.dtype, device=device)
    assert target.tokenizer is not None
    return target, [render_prompt(target.tokenizer, m) for m in load_suite("stdlib", prompts, split="test").prompts]


def _run(options: argparse.Namespace) -> dict[str, Any]:
    target, prompts = open_target(options, options.num_prompts)
    if options.drafter:
        draft, _ = open_drafter(options.drafter, target)
        if not isinstance(draft, Standalone):
            raise UserError(f"--drafter: wanted a causal LM, which transformers can use too, got a {draft.method} drafter")
    else:
        draft = early_exit(target, range(max(1, target.num_layers // 6)))
    if options.compile:
        target.compile()
    threads = choose_threads(target, prompts[0], None)
    rate = 1e9 * options.bandwidth if options.bandwidth else read_bandwidth(target.device, target.dtype)
    result = bench(target, draft, prompts, tokens=options.max_new_tokens, depth=options.depth, lookup=options.lookup, repeats=options.repeats)
    floor = 1e3 * weight_bytes(target) / rate
    result |= {"bandwidth_gb_s": round(rate / 1e9, 2), "floor_ms": round(floor, 4), "t_ar_over_floor": round(result["t_ar_ms"] / floor, 4)}
    return result | {
        "hardware": {
            "device": torch.cuda.get_device_name() if target.device.type == "cuda" else platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "compile": options.compile,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "draftsmith": __version__,
            **threads,
        }
    }


if __name__ == "__main__":
    sys.exit(main())
