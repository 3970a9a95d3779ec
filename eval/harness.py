"""Measure a drafter: the losslessness gate and the timings, on the same prompts, in one process, interleaved prompt by prompt."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..decode.engine import Engine, Generation
from ..decode.prompts import eos_ids, render_prompt
from ..decode.proposer import Extent, Proposer
from ..decode.sampling import Sampler, SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree
from .schema import Cost, Drift, Lossless, Other, OutputBucket, Piece, Report, Row, Sample, Speedup, SpeedupEndToEnd, Tie, TimeSplit, TokensPerSecond
from .stats import mean_ratio_interval, paired_ratio_interval
from .suites import Suite

TIE_FACTOR = 4.0  # a tie is a gap below this many times the largest difference seen between the N-token and the 1-token kernels
TIES_PER_TOKEN = 1e-4  # more than one tie in 10^4 tokens fails the gate
BUCKETS = (0, 256, 1024, 2048, None)
RULE = "shared_noise"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    timed_prompts: how many prompts are timed, at batch 1 (None: all). The others are decoded in ragged batches of `gate_batch`, by both engines:
    they count for the gate and for tau. eager: also time transformers' `generate`. threads: CPU threads (None: measured, the fastest is taken).
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 128
    eager: bool = True
    timed_prompts: int | None = None
    gate_batch: int = 8
    threads: int | None = None
    bootstrap: int = 2000
    seed: int = 0


@torch.no_grad()
def kernel_bound(target: Target, prompt: Sequence[int], nodes: int) -> float:
    """Largest difference between the logits of one N-token pass and of N one-token passes, times TIE_FACTOR: below it two candidates are a tie."""
    ids = torch.tensor([list(prompt)], device=target.device)
    nodes = min(nodes, ids.shape[1] - 1)
    base = ids.shape[1] - nodes
    length = torch.tensor([base], device=target.device)
    target.allocate(1, ids.shape[1] + nodes + 1)
    target.prefill(ids[:, :base], length)

    def logits(tree: DraftTree, at: int) -> torch.Tensor:
        return target.logits(target.verify(tree, length + (at - base), Extent(at, True)).hidden_BNH)

    many = logits(DraftTree.chain(ids[:, base:]), base)
    one = [logits(DraftTree.root_only(ids[:, base + i]), base + i)[:, 0] for i in range(nodes)]
    return float((many - torch.stack(one, 1)).abs().max()) * TIE_FACTOR


@torch.no_grad()
def score_gap(target: Target, prompt: Sequence[int], common: Sequence[int], a: int, b: int, params: SamplingParams) -> float:
    """|score(a) - score(b)| of the plain sampler after prompt + common, in units of logits."""
    ids = torch.tensor([[*prompt, *common]], device=target.device)
    length = torch.tensor([ids.shape[1]], device=target.device)
    target.allocate(1, ids.shape[1] + 2)
    sampler = Sampler([params], target.device)
    logits = target.logits(target.prefill(ids, length).hidden_BNH[:, -1:])
    scores = sampler.scores(logits, sampler.noise(length, 1, target.vocab_size))[0, 0]
    return float((scores[a] - scores[b]).abs()) * (params.temperature or 1.0)


def _gate(
    target: Target, prompts: list[list[int]], plain: list[list[int]], spec: list[list[int]], params: list[SamplingParams], nodes: int
) -> Lossless:
    ties, identical, failed, bound = [], 0, False, None
    for index, (want, got) in enumerate(zip(plain, spec, strict=True)):
        if want == got:
            identical += 1
            continue
        bound = kernel_bound(target, prompts[index], nodes) if bound is None else bound
        place = next((i for i, (x, y) in enumerate(zip(want, got, strict=False)) if x != y), None)
        if place is None:
            failed = True  # one is a prefix of the other: no near-tie explains that
            continue
        gap = score_gap(target, prompts[index], want[:place], want[place], got[place], params[index])
        failed |= gap > bound
        ties.append(Tie(prompt=index, position=place, gap=gap, bound=bound))
    checked = sum(len(t) for t in plain)
    failed |= target.dtype == torch.float32 and len(ties) > max(1.0, TIES_PER_TOKEN * checked)
    return Lossless(
        lossless_class="L1", status="fail" if failed else "pass", checked=len(plain), identical=identical, ties=ties, tokens_checked=checked
    )


class _FirstToken:
    """A stopping criterion that never stops, and notes when the first token came: decoding is timed from there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at = time.perf_counter() if self.at is None else self.at
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _eager(target: Target, prompt: list[int], params: SamplingParams, settings: Settings, stops: list[int]) -> tuple[int, float]:
    """(tokens after the first, seconds after the first) of transformers' own generate, with its dynamic cache."""
    first = _FirstToken()
    torch.manual_seed(params.seed)
    ids = torch.tensor([prompt], device=target.device)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": params.temperature, "top_k": 0} if params.temperature else {"do_sample": False}
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        stopping_criteria=[first],
        **sampling,
    )
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    assert first.at is not None
    return out.shape[1] - len(prompt) - 1, time.perf_counter() - first.at


def choose_threads(target: Target, prompt: Sequence[int], settings: Settings, steps: int = 24) -> dict[str, Any]:
    """Set the number of CPU threads to settings.threads, or to the fastest at plain decoding; say which, and what was measured (ms a token)."""
    if target.device.type != "cpu":
        return {}
    cores, milliseconds = os.cpu_count() or 1, {}
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
        return {"threads": settings.threads}
    engine = Engine(target)
    for threads in dict.fromkeys([1, *(2**i for i in range(1, cores.bit_length()) if 2**i < cores), cores]):
        torch.set_num_threads(threads)
        engine.generate([prompt], SamplingParams(), 6)  # the pool starts, caches warm
        times = [engine.generate([prompt], SamplingParams(), steps + 1).times.decode for _ in range(3)]
        milliseconds[threads] = 1e3 * min(times) / steps
    best = min(milliseconds, key=lambda n: milliseconds[n])
    torch.set_num_threads(best)
    return {"threads": best, "thread_calibration_ms": {str(n): round(ms, 2) for n, ms in milliseconds.items()}}


@dataclass(frozen=True)
class Measured:
    """What an evaluation found: one row a temperature at batch 1, and one sample text each; rows of the other drafters."""

    rows: list[Row]
    samples: list[Sample]
    others: list[Other]


def evaluate(
    target: Target,
    proposer: Proposer,
    suite: Suite,
    settings: Settings,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    others: Mapping[str, Proposer] | None = None,
) -> Measured:
    """Measure a proposer, and `others` on the timed prompts in the same turns. progress(label, done, all) is called after every prompt."""
    assert target.tokenizer is not None
    prompts = [render_prompt(target.tokenizer, messages) for messages in suite.prompts]
    stops = eos_ids(target.model)
    engines = {"": Engine(target, proposer)} | {name: Engine(target, other) for name, other in (others or {}).items()}
    plain = Engine(target)
    measured = Measured([], [], [Other(drafter=name, results=[]) for name in others or {}])
    for temperature in settings.temperatures:
        label = f"T={temperature:g}"
        params = [SamplingParams(temperature=temperature, seed=settings.seed + i) for i in range(len(prompts))]
        timed = len(prompts) if settings.timed_prompts is None else min(settings.timed_prompts, len(prompts))
        for engine in (plain, *engines.values()):  # warm-up
            engine.generate([prompts[0]], params[0], min(16, settings.max_new_tokens), eos_ids=stops)
        if settings.eager:
            _eager(target, prompts[0], params[0], Settings(max_new_tokens=min(16, settings.max_new_tokens)), stops)
        ours: dict[str, list[Generation]] = {name: [] for name in engines}
        base: list[Generation] = []
        eager: list[tuple[int, float]] = []
        for index, prompt in enumerate(prompts[:timed]):
            turns = [*((engine, ours[name]) for name, engine in engines.items()), (plain, base)]
            for engine, into in turns if index % 2 else turns[::-1]:  # neither side always runs on the other's warm caches
                into.append(engine.generate([prompt], params[index], settings.max_new_tokens, eos_ids=stops))
            if settings.eager:
                eager.append(_eager(target, prompt, params[index], settings, stops))
            progress(label, index + 1, len(prompts))
        for other in measured.others:
            want, got = ([g.tokens[0] for g in generations[:timed]] for generations in (base, ours[other.drafter]))
            gate = _gate(target, prompts[:timed], want, got, params[:timed], engines[other.drafter].num_nodes)
            depth = engines[other.drafter].max_depth
            other.results.append(_row(suite.name, temperature, gate, ours[other.drafter], base, eager, timed, settings, depth))
        for start in range(timed, len(prompts), settings.gate_batch):
            stop = min(start + settings.gate_batch, len(prompts))
            for engine, into in ((engines[""], ours[""]), (plain, base)):
                out = engine.generate(prompts[start:stop], params[start:stop], settings.max_new_tokens, eos_ids=stops)
                into += [Generation([tokens], [rounds]) for tokens, rounds in zip(out.tokens, out.rounds, strict=True)]
            progress(label, stop, len(prompts))
        gate = _gate(target, prompts, [g.tokens[0] for g in base], [g.tokens[0] for g in ours[""]], params, proposer.num_nodes)
        measured.rows.append(_row(suite.name, temperature, gate, ours[""], base, eager, timed, settings, proposer.max_depth))
        measured.samples.append(_sample(target, suite, prompts, ours[""], temperature))
    return measured


def _decoded(generation: Generation) -> int:
    """Tokens after the first, which the prefill gives."""
    return len(generation.tokens[0]) - 1


def _row(
    suite: str,
    temperature: float,
    gate: Lossless,
    ours: list[Generation],
    base: list[Generation],
    eager: list[tuple[int, float]],
    timed: int,
    settings: Settings,
    max_depth: int,
) -> Row:
    """tau and acceptance over all prompts, speed over the first `timed`; a prompt that ends with its first token says nothing of either."""
    kept = [g for g in ours if _decoded(g) > 0]
    rounds = [r for g in kept for r in g.rounds[0]]
    options = {"resamples": settings.bootstrap, "seed": settings.seed}
    tau = mean_ratio_interval([_decoded(g) for g in kept], [len(g.rounds[0]) for g in kept], **options)
    clocked = [i for i in range(timed) if _decoded(ours[i]) > 0 and _decoded(base[i]) > 0]
    ours_timed, base_timed = [ours[i] for i in clocked], [base[i] for i in clocked]
    tokens, base_tokens = [_decoded(g) for g in ours_timed], [_decoded(g) for g in base_timed]
    seconds, base_seconds = [g.times.decode for g in ours_timed], [g.times.decode for g in base_timed]
    speed = paired_ratio_interval(tokens, seconds, base_tokens, base_seconds, **options)
    whole = paired_ratio_interval(
        [n + 1 for n in tokens], [g.times.total for g in ours_timed], [n + 1 for n in base_tokens], [g.times.total for g in base_timed], **options
    )
    measured = [(position, eager[i]) for position, i in enumerate(clocked) if i < len(eager) and eager[i][0] > 0]
    against = None
    if measured:
        against = paired_ratio_interval(
            [tokens[p] for p, _ in measured],
            [seconds[p] for p, _ in measured],
            [n for _, (n, _) in measured],
            [t for _, (_, t) in measured],
            **options,
        )
    reached = [sum(r.accepted >= d for r in rounds) for d in range(max_depth + 1)]
    draft, verify, total = (sum(getattr(g.times, name) for g in ours_timed) for name in ("draft", "verify", "decode"))
    timed_rounds = sum(len(g.rounds[0]) for g in ours_timed)
    # The prefill's own observe() is part of the prefill, so draft and verify belong to the decode time entirely.
    proposed = sum(r.proposed for r in rounds)
    return Row(
        suite=suite,
        temperature=temperature,
        batch=1,
        rule=RULE,
        category="all",
        lossless=gate,
        tau=tau.value,
        tau_ci=(tau.lo, tau.hi),
        acceptance_rate=sum(r.accepted for r in rounds) / proposed if proposed else 0.0,
        conditional_acceptance=[reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, max_depth + 1)],
        tokens=sum(_decoded(g) for g in kept),
        tokens_per_second=TokensPerSecond(
            speculative=sum(tokens) / sum(seconds),
            engine=sum(base_tokens) / sum(base_seconds),
            eager=sum(n for _, (n, _) in measured) / sum(t for _, (_, t) in measured) if measured else None,
        ),
        speedup=Speedup(
            engine=speed.value,
            engine_ci=(speed.lo, speed.hi),
            eager=against.value if against else None,
            eager_ci=(against.lo, against.hi) if against else None,
        ),
        speedup_end_to_end=SpeedupEndToEnd(engine=whole.value, engine_ci=(whole.lo, whole.hi)),
        time_split=TimeSplit(draft=draft / total, verify=verify / total, overhead=max(0.0, 1 - draft / total - verify / total)),
        accepted_length_histogram=[sum(r.accepted == d for r in rounds) for d in range(max_depth + 1)],
        tau_by_output_position=_by_position(kept),
        prompts=len(ours),
        rounds=len(rounds),
        cost=Cost(t_ar_ms=1e3 * sum(base_seconds) / sum(base_tokens), t_verify_ms=1e3 * verify / timed_rounds, t_draft_ms=1e3 * draft / timed_rounds),
    )


def _by_position(generations: list[Generation]) -> list[OutputBucket]:
    emitted, rounds = [0] * (len(BUCKETS) - 1), [0] * (len(BUCKETS) - 1)
    for generation in generations:
        at = 1
        for entry in generation.rounds[0]:
            bucket = sum(at >= edge for edge in BUCKETS[1:-1] if edge is not None)
            emitted[bucket] += entry.emitted
            rounds[bucket] += 1
            at += entry.emitted
    return [
        OutputBucket(start=BUCKETS[i] or 0, end=BUCKETS[i + 1], tau=emitted[i] / rounds[i], rounds=rounds[i]) for i in range(len(rounds)) if rounds[i]
    ]


def _sample(target: Target, suite: Suite, prompts: list[list[int]], ours: list[Generation], temperature: float) -> Sample:
    """The longest text; each round's accepted tokens as one drafted piece, then the target's own token."""
    assert target.tokenizer is not None
    best = max(range(len(ours)), key=lambda i: len(ours[i].tokens[0]))
    tokens, rounds = ours[best].tokens[0], ours[best].rounds[0]
    pieces, at = [Piece(text=target.tokenizer.decode(tokens[:1]), origin="target", round=0)], 1
    for number, entry in enumerate(rounds, 1):
        for count, origin in ((entry.accepted, "drafted"), (entry.emitted - entry.accepted, "target")):
            if count:
                pieces.append(Piece(text=target.tokenizer.decode(tokens[at : at + count]), origin=origin, round=number))  # type: ignore[arg-type]
            at += count
    return Sample(prompt=target.tokenizer.decode(prompts[best]), temperature=temperature, pieces=pieces)


def build_report(
    target: Target,
    drafter: dict[str, Any],
    suite: Suite,
    settings: Settings,
    measured: Measured,
    training: dict[str, Any] | None,
    threads: dict[str, Any],
    drift: Drift | None = None,
) -> Report:
    """The report, with everything recorded that can change a number. threads: what `choose_threads` said. drift: of a target that was tuned."""
    device = torch.cuda.get_device_name() if target.device.type == "cuda" else _cpu_name()
    return Report(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        target={
            "name": short_name(target.name),
            "fingerprint": target.fingerprint(),
            "layers": target.num_layers,
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "attention": str(target.model.config._attn_implementation),
        },
        drafter=drafter,
        hardware={
            "device": device,
            "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            **threads,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "draftsmith": __version__,
        },
        protocol={
            "suite": suite.name,
            "prompts": len(suite.prompts),
            "prompts_sha256": suite.digest,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
            "bootstrap": settings.bootstrap,
            "batch": 1,
            "rule": RULE,
            "order": "interleaved prompt by prompt, order of the engines alternating",
            "timed": "decoding only, from the first token; total tokens over total seconds",
            "timed_prompts": len(suite.prompts) if settings.timed_prompts is None else min(settings.timed_prompts, len(suite.prompts)),
            "gate_batch": settings.gate_batch,
            "tie_factor": TIE_FACTOR,
        },
        results=measured.rows,
        samples=measured.samples,
        training=training,
        others=measured.others,
        drift=drift,
    )


def short_name(name: str) -> str:
    """A model's name without this machine's folders: hub names as they are, else the last folder, or the one above if that is a mere "target"."""
    path, comma, rest = name.partition(",")
    folder = Path(path)
    if not folder.is_absolute():
        return name
    return (folder.parent.name if folder.name == "target" else folder.name) + comma + rest


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except FileNotFoundError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()
