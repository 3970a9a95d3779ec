"""Measure a drafter: the losslessness gate and the timings, on the same prompts, in one process, interleaved prompt by prompt.

A *unit* is what is timed as one: a prompt at batch 1, a group of prompts that are decoded together at larger batches. Units are what the intervals
draw again.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import UserError, __version__
from ..decode.engine import Engine, Generation, Round
from ..decode.prompts import eos_ids, render_prompt
from ..decode.proposer import Extent, Proposer
from ..decode.sampling import Sampler, SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree
from ..decode.verify import RULES
from .baselines import Timed, assisted, eager, model_default
from .distribution import places, uniformity
from .memory import MIB, Peak, speculation_bytes
from .schema import (
    Cost,
    CostReport,
    Drift,
    Lossless,
    Memory,
    Other,
    OutputBucket,
    Piece,
    Report,
    Row,
    Sample,
    Speedup,
    SpeedupEndToEnd,
    Tie,
    TimeSplit,
    TokensPerSecond,
)
from .stats import mean_ratio_interval, paired_ratio_interval
from .suites import ALL, Suite
from .trace import trace

TIE_FACTOR = 4.0  # a tie is a gap below this many times the largest difference seen between the N-token and the 1-token kernels
TIES_PER_TOKEN = 1e-4  # more than one tie in 10^4 tokens fails the gate
BUCKETS = (0, 256, 1024, 2048, None)
RULE = "shared_noise"
TURN_BATCH = 16  # conversations whose earlier answers are generated together


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    timed_prompts: how many prompts are timed at batch 1 (None: all). The others are decoded in ragged batches of `gate_batch`, by both engines:
    they count for the gate and for tau. batches: sizes that get rows beside batch 1. rule: how drafts are judged. default_sampling: a row more,
    sampled as the model's own generation_config says. eager: also time transformers' `generate`. threads: CPU threads (None: measured, the fastest
    is taken).
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 128
    eager: bool = True
    timed_prompts: int | None = None
    gate_batch: int = 8
    batches: Sequence[int] = (1,)
    rule: str = RULE
    default_sampling: bool = False
    threads: int | None = None
    bootstrap: int = 2000
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Of the intervals."""
        return {"resamples": self.bootstrap, "seed": self.seed}


@dataclass(frozen=True)
class _Item:
    """One prompt as token ids. turn: how many answers of the target precede it in its conversation."""

    ids: list[int]
    category: str
    turn: int


@dataclass(frozen=True)
class _Sampling:
    """One way to sample. params: of every prompt, seeds apart."""

    label: str
    params: SamplingParams
    default: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What the report says of it: those settings that are not off."""
        off = vars(SamplingParams())
        shown = {name: value for name, value in vars(self.params).items() if name not in ("seed", "logit_bias") and value != off[name]}
        return {"temperature": self.params.temperature, **shown, **({"model_default": True} if self.default else {})}


@dataclass
class _Runs:
    """What decoding gave, unit by unit. ours: by drafter, "" being the one that is measured. base: plain decoding. Peaks are MiB."""

    units: list[list[int]]  # the items of each
    ours: dict[str, list[Generation]]
    base: list[Generation] = field(default_factory=list)
    eager: list[Timed] = field(default_factory=list)
    assisted: list[Timed] = field(default_factory=list)
    peaks: dict[str, float | None] = field(default_factory=dict)


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
    target: Target,
    items: Sequence[_Item],
    plain: list[list[int]],
    spec: list[list[int]],
    params: Sequence[SamplingParams],
    nodes: int,
    rule: str,
    reasons: Sequence[str] = (),
) -> Lossless:
    """By equality where the output must be plain decoding's, else by distribution. reasons: of failure that are known already."""
    kind = RULES[rule].lossless
    if rule not in (RULE, "greedy") and params[0].temperature > 0:
        return _distribution_gate(target, items, spec, params, kind, reasons)
    ties, identical, failed, bound = [], 0, bool(reasons), None
    for index, (want, got) in enumerate(zip(plain, spec, strict=True)):
        if want == got:
            identical += 1
            continue
        bound = kernel_bound(target, items[index].ids, nodes) if bound is None else bound
        place = next((i for i, (x, y) in enumerate(zip(want, got, strict=False)) if x != y), None)
        if place is None:
            failed = True  # one is a prefix of the other: no near-tie explains that
            continue
        gap = score_gap(target, items[index].ids, want[:place], want[place], got[place], params[index])
        failed |= gap > bound
        ties.append(Tie(prompt=index, position=place, gap=gap, bound=bound))
    checked = sum(len(t) for t in plain)
    failed |= target.dtype == torch.float32 and len(ties) > max(1.0, TIES_PER_TOKEN * checked)
    return Lossless(
        lossless_class=kind,
        status="fail" if failed else "pass",
        checked=len(plain),
        identical=identical,
        ties=ties,
        tokens_checked=checked,
        reason="; ".join(reasons) or None,
    )


def _distribution_gate(
    target: Target, items: Sequence[_Item], spec: list[list[int]], params: Sequence[SamplingParams], kind: str, reasons: Sequence[str]
) -> Lossless:
    """A rule that is lossy by design (L3) fails whatever the test says: that it was not noticed is no proof."""
    values = [u for i, tokens in enumerate(spec) for u in places(target, items[i].ids, tokens, params[i], seed=i)]
    test = uniformity(values)
    known = [*reasons]
    if test is None:
        known.append(f"{len(values)} tokens are too few to test a distribution")
    elif not test.passed:
        known.append(f"the tokens do not follow the target's distribution (p = {test.p_value:.2g})")
    if kind == "L3":
        known.append("the rule is lossy by design")
    return Lossless(
        lossless_class=kind,
        status="fail" if known else "pass",
        checked=len(spec),
        identical=0,
        ties=[],
        tokens_checked=len(values),
        test=test,
        reason="; ".join(known) or None,
    )


def audit(generation: Generation, stops: Sequence[int], limit: int) -> str | None:
    """What is wrong with the counts of a generation, if anything: every token after the first belongs to a round, and none follows the end.

    Harnesses that count what the engine proposed or accepted, rather than what was returned, count tokens past the end.
    """
    for tokens, rounds in zip(generation.tokens, generation.rounds, strict=True):
        emitted = sum(r.emitted for r in rounds)
        if emitted != len(tokens) - 1:
            return f"rounds count {emitted} tokens, {len(tokens) - 1} were returned"
        if len(tokens) > limit or any(token in stops for token in tokens[:-1]):
            return "tokens were returned past the end of the text"
        if any(not 0 <= r.accepted <= r.emitted <= r.accepted + 1 for r in rounds):
            return "a round counts more tokens than it accepted and one"
    return None


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
    """What an evaluation found: a row a sampling, batch and category, and one sample text a sampling; rows of the other drafters."""

    rows: list[Row]
    samples: list[Sample]
    others: list[Other]


Progress = Callable[[str, int, int], None]


class _Bench:
    """The engines, and what they decode."""

    def __init__(
        self, target: Target, proposer: Proposer, suite: Suite, settings: Settings, others: Mapping[str, Proposer], assistant: Any, weights: float
    ) -> None:
        self.target, self.suite, self.settings, self.assistant, self.weights = target, suite, settings, assistant, weights
        self.stops = eos_ids(target.model)
        self.plain = Engine(target)
        self.engines = {"": Engine(target, proposer, rule=settings.rule)}
        for name, other in others.items():
            usable = "deterministic" in RULES[settings.rule].kinds and RULES[settings.rule].lossless != "L3"
            self.engines[name] = Engine(target, other, rule=settings.rule if usable else RULE)
        self.peak = Peak(target.device)

    def items(self, sampling: _Sampling) -> list[_Item]:
        """All prompts; those of later turns with the answers that plain decoding gives to the earlier ones."""
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        found: list[_Item] = []
        open_ = [(list(c.opening), list(c.later), c.category) for c in self.suite.conversations]
        turn = 0
        while open_:
            rendered = [_Item(render_prompt(tokenizer, messages), category, turn) for messages, _, category in open_]
            found += rendered
            going = [i for i, (_, later, _) in enumerate(open_) if later]
            for start in range(0, len(going), TURN_BATCH):
                part = going[start : start + TURN_BATCH]
                params = [replace(sampling.params, seed=self.settings.seed + i) for i in part]
                out = self.plain.generate([rendered[i].ids for i in part], params, self.settings.max_new_tokens, eos_ids=self.stops)
                for i, tokens in zip(part, out.tokens, strict=True):
                    messages, later, _ = open_[i]
                    messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
                    messages.append({"role": "user", "content": later.pop(0)})
            open_ = [open_[i] for i in going]
            turn += 1
        return found

    def warm_up(self, items: Sequence[_Item], params: Sequence[SamplingParams]) -> None:
        """All that will be timed, once, short."""
        few = min(16, self.settings.max_new_tokens)
        prompts = [item.ids for item in items]
        for engine in (self.plain, *self.engines.values()):
            engine.generate(prompts, params, few, eos_ids=self.stops)
        if self.settings.eager:
            eager(self.target, prompts, params[0], few, self.stops)
        if self.assistant is not None and len(items) == 1:
            assisted(self.target, self.assistant, prompts[0], params[0], few, self.stops, self.engines[""].max_depth)

    def timed(
        self,
        items: Sequence[_Item],
        params: Sequence[SamplingParams],
        units: list[list[int]],
        names: Sequence[str],
        note: Callable[[int], None],
    ) -> _Runs:
        """Decode all units by all engines in turns."""
        runs = _Runs(units, {name: [] for name in names})
        self.warm_up([items[i] for i in units[0]], [params[i] for i in units[0]])
        for index, unit in enumerate(units):
            prompts, own = [items[i].ids for i in unit], [params[i] for i in unit]
            turns = [*((name, self.engines[name], runs.ours[name]) for name in names), ("plain", self.plain, runs.base)]
            for name, engine, into in turns if index % 2 else turns[::-1]:  # neither side always runs on the other's warm caches
                if index == 0:
                    self.peak.reset()
                into.append(engine.generate(prompts, own, self.settings.max_new_tokens, eos_ids=self.stops))
                if index == 0:
                    runs.peaks[name] = self.peak.mebibytes()
            if self.settings.eager:
                runs.eager.append(eager(self.target, prompts, own[0], self.settings.max_new_tokens, self.stops))
            if self.assistant is not None and len(unit) == 1:
                depth = self.engines[""].max_depth
                runs.assisted.append(assisted(self.target, self.assistant, prompts[0], own[0], self.settings.max_new_tokens, self.stops, depth))
            note(index)
        return runs

    def untimed(self, items: Sequence[_Item], params: Sequence[SamplingParams], rest: Sequence[int], note: Callable[[int], None]) -> _Runs:
        """Decode the other items in ragged batches, for the gate and for tau."""
        runs = _Runs([[i] for i in rest], {"": []})
        for start in range(0, len(rest), self.settings.gate_batch):
            part = rest[start : start + self.settings.gate_batch]
            for engine, into in ((self.engines[""], runs.ours[""]), (self.plain, runs.base)):
                prompts, own = [items[i].ids for i in part], [params[i] for i in part]
                out = engine.generate(prompts, own, self.settings.max_new_tokens, eos_ids=self.stops)
                into += [Generation([tokens], [rounds]) for tokens, rounds in zip(out.tokens, out.rounds, strict=True)]
            note(part[-1])
        return runs

    def gate(self, name: str, items: Sequence[_Item], params: Sequence[SamplingParams], parts: Sequence[_Runs]) -> Lossless:
        """Over all units of these runs. Both sides' counts are audited first."""
        order = [i for part in parts for unit in part.units for i in unit]
        want = [tokens for part in parts for g in part.base for tokens in g.tokens]
        got = [tokens for part in parts for g in part.ours[name] for tokens in g.tokens]
        reasons = dict.fromkeys(
            f"{who}: {wrong}"
            for part in parts
            for who, generations in (("speculative", part.ours[name]), ("plain", part.base))
            for g in generations
            if (wrong := audit(g, self.stops, self.settings.max_new_tokens)) is not None
        )
        engine = self.engines[name]
        return _gate(self.target, [items[i] for i in order], want, got, [params[i] for i in order], engine.num_nodes, engine.rule, list(reasons))

    def memory(self, name: str, runs: _Runs, batch: int) -> Memory:
        """Of one drafter's runs."""
        weights = self.weights if name == "" else 0.0
        extra = speculation_bytes(self.engines[name], batch) / MIB
        return Memory(speculative_peak=runs.peaks.get(name), engine_peak=runs.peaks.get("plain"), speculation=weights + extra, drafter=weights)


def evaluate(
    target: Target,
    proposer: Proposer,
    suite: Suite,
    settings: Settings,
    progress: Progress = lambda *_: None,
    others: Mapping[str, Proposer] | None = None,
    *,
    assistant: Any = None,
    weights: float = 0.0,
    load_seconds: Mapping[str, float] | None = None,
) -> Measured:
    """Measure a proposer, and `others` on the timed prompts in the same turns. progress(label, done, all) is called after every prompt.

    assistant: the draft model, if transformers' own assisted generation is to be timed too. weights: MiB of the drafter's own weights.
    load_seconds: of target and drafter, for the report.
    """
    assert target.tokenizer is not None
    bench = _Bench(target, proposer, suite, settings, others or {}, assistant, weights)
    measured = Measured([], [], [Other(drafter=name, results=[]) for name in others or {}])
    for sampling in samplings(target, settings):
        _measure_sampling(bench, sampling, measured, progress, dict(load_seconds or {}))
    return measured


def _measure_sampling(bench: _Bench, sampling: _Sampling, measured: Measured, progress: Progress, load_seconds: dict[str, float]) -> None:
    """All rows of one way to sample."""
    settings, label = bench.settings, sampling.label
    items = bench.items(sampling)
    every = len(items)
    params = [replace(sampling.params, seed=settings.seed + i) for i in range(every)]
    count = every if settings.timed_prompts is None else min(settings.timed_prompts, every)

    def note(index: int) -> None:
        progress(label, index + 1, every)

    def row(gate: Lossless, runs: _Runs, rest: _Runs | None, name: str = "", **more: Any) -> Row:
        memory = bench.memory(name, runs, more.get("batch", 1))
        drafted_by = bench.engines[name]
        return _row(bench.suite.name, sampling, gate, runs, rest, name, settings, drafted_by, memory=memory, load_seconds=load_seconds, **more)

    runs = bench.timed(items, params, [[i] for i in range(count)], list(bench.engines), note)
    for other in measured.others:
        other.results.append(row(bench.gate(other.drafter, items, params, [runs]), runs, None, other.drafter))
    rest = bench.untimed(items, params, range(count, every), note)
    measured.rows.append(row(bench.gate("", items, params, [runs, rest]), runs, rest))
    names = list(dict.fromkeys(item.category for item in items))
    for name in names if len(names) > 1 else []:
        part, other_part = _only(runs, items, name), _only(rest, items, name)
        # A category without a timed prompt says nothing of speed: it has no row.
        if any(_decoded(a) and _decoded(b) for a, b in zip(part.ours[""], part.base, strict=True)):
            gate = bench.gate("", items, params, [part, other_part])
            measured.rows.append(row(gate, part, other_part, category=name))
    measured.samples.append(_sample(bench, items, params, [*runs.ours[""], *rest.ours[""]], sampling))
    for batch in sorted({size for size in settings.batches if size > 1}):
        if batch > len(items):
            raise UserError(f"eval.batch: wanted at most {len(items)}, as there are so many prompts, got {batch}; ask for more prompts")
        units = [list(range(k * batch, (k + 1) * batch)) for k in range(max(1, count // batch))]
        label, every = f"{sampling.label}, batch {batch}", len(units)
        grouped = bench.timed(items, params, units, [""], note)
        measured.rows.append(row(bench.gate("", items, params, [grouped]), grouped, None, batch=batch))


def samplings(target: Target, settings: Settings) -> list[_Sampling]:
    """The temperatures, then the model's own way to sample, unless that is one of them."""
    found = [_Sampling(f"T={t:g}", SamplingParams(temperature=t)) for t in settings.temperatures]
    default = model_default(target) if settings.default_sampling else None
    if default is not None and all(default != known.params for known in found):
        found.append(_Sampling("the model's default sampling", default, True))
    return found


def _only(runs: _Runs, items: Sequence[_Item], category: str) -> _Runs:
    """The units of one category."""
    kept = [k for k, unit in enumerate(runs.units) if items[unit[0]].category == category]

    def pick(values: list[Any]) -> list[Any]:
        return [values[k] for k in kept] if values else []

    ours = {name: pick(generations) for name, generations in runs.ours.items()}
    return _Runs(pick(runs.units), ours, pick(runs.base), pick(runs.eager), pick(runs.assisted), runs.peaks)


def _decoded(generation: Generation) -> int:
    """Tokens after the first of each row, which the prefill gives."""
    return sum(len(tokens) - 1 for tokens in generation.tokens)


def _row(
    suite: str,
    sampling: _Sampling,
    gate: Lossless,
    runs: _Runs,
    rest: _Runs | None,
    name: str,
    settings: Settings,
    engine: Engine,
    *,
    memory: Memory,
    load_seconds: dict[str, float],
    batch: int = 1,
    category: str = ALL,
) -> Row:
    """tau and acceptance over all prompts, speed over the timed units; a prompt that ends with its first token says nothing of either."""
    ours, base, options = runs.ours[name], runs.base, settings.options
    every = [*ours, *(rest.ours[name] if rest is not None else [])]
    pairs = [(tokens, rounds) for g in every for tokens, rounds in zip(g.tokens, g.rounds, strict=True) if len(tokens) > 1]
    if not pairs:
        raise UserError("prompts: wanted some that the target answers with more than one token, got none; raise max_new_tokens, or give others")
    entries = [r for _, rounds in pairs for r in rounds]
    tau = mean_ratio_interval([len(tokens) - 1 for tokens, _ in pairs], [len(rounds) for _, rounds in pairs], **options)
    clocked = [k for k in range(len(runs.units)) if _decoded(ours[k]) > 0 and _decoded(base[k]) > 0]
    if not clocked:
        raise UserError("prompts: wanted a timed one that the target answers with more than one token, got none; time more prompts")
    tokens, base_tokens = [_decoded(ours[k]) for k in clocked], [_decoded(base[k]) for k in clocked]
    seconds, base_seconds = [ours[k].times.decode for k in clocked], [base[k].times.decode for k in clocked]
    whole_tokens, base_whole_tokens = ([n + len(runs.units[k]) for n, k in zip(x, clocked, strict=True)] for x in (tokens, base_tokens))
    whole_seconds, base_whole_seconds = ([x[k].times.total for k in clocked] for x in (ours, base))
    speed = paired_ratio_interval(tokens, seconds, base_tokens, base_seconds, **options)
    whole = paired_ratio_interval(whole_tokens, whole_seconds, base_whole_tokens, base_whole_seconds, **options)
    eagerly = [p for p, k in enumerate(clocked) if k < len(runs.eager) and runs.eager[k].tokens > 0]
    helped = [p for p, k in enumerate(clocked) if k < len(runs.assisted) and runs.assisted[k].tokens > 0]
    theirs, aided = [runs.eager[clocked[p]] for p in eagerly], [runs.assisted[clocked[p]] for p in helped]
    against = helping = None
    if theirs:
        mine = [tokens[p] for p in eagerly], [seconds[p] for p in eagerly]
        against = paired_ratio_interval(*mine, [t.tokens for t in theirs], [t.seconds for t in theirs], **options)
    if aided:
        mine = [whole_tokens[p] for p in helped], [whole_seconds[p] for p in helped]
        helping = paired_ratio_interval(*mine, [t.tokens for t in aided], [t.seconds for t in aided], **options)
    max_depth = max(engine.max_depth, max(r.accepted for r in entries))
    reached = [sum(r.accepted >= d for r in entries) for d in range(max_depth + 1)]
    draft, verify, total = (sum(getattr(ours[k].times, part) for k in clocked) for part in ("draft", "verify", "decode"))
    # A group's rounds are those of its longest row; steps of plain decoding likewise.
    timed_rounds = sum(max(len(rounds) for rounds in ours[k].rounds) for k in clocked)
    steps = sum(max(len(row) - 1 for row in base[k].tokens) for k in clocked)
    proposed = sum(r.proposed for r in entries)
    return Row(
        suite=suite,
        temperature=sampling.params.temperature,
        batch=batch,
        rule=engine.rule,
        category=category,
        lossless=gate,
        tau=tau.value,
        tau_ci=(tau.lo, tau.hi),
        acceptance_rate=sum(r.accepted for r in entries) / proposed if proposed else 0.0,
        conditional_acceptance=[reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, max_depth + 1)],
        tokens=sum(len(row) - 1 for row, _ in pairs),
        tokens_per_second=TokensPerSecond(
            speculative=sum(tokens) / sum(seconds),
            engine=sum(base_tokens) / sum(base_seconds),
            eager=sum(t.tokens for t in theirs) / sum(t.seconds for t in theirs) if theirs else None,
            assisted=sum(t.tokens for t in aided) / sum(t.seconds for t in aided) if aided else None,
        ),
        speedup=Speedup(
            engine=speed.value,
            engine_ci=(speed.lo, speed.hi),
            eager=against.value if against else None,
            eager_ci=(against.lo, against.hi) if against else None,
            assisted=helping.value if helping else None,
            assisted_ci=(helping.lo, helping.hi) if helping else None,
        ),
        speedup_end_to_end=SpeedupEndToEnd(engine=whole.value, engine_ci=(whole.lo, whole.hi)),
        # The prefill's own observe() is part of the prefill, so draft and verify belong to the decode time entirely.
        time_split=TimeSplit(draft=draft / total, verify=verify / total, overhead=max(0.0, 1 - draft / total - verify / total)),
        accepted_length_histogram=[sum(r.accepted == d for r in entries) for d in range(max_depth + 1)],
        tau_by_output_position=_by_position([rounds for _, rounds in pairs]),
        prompts=len(every) if batch == 1 else sum(len(g.tokens) for g in every),
        rounds=len(entries),
        cost=Cost(
            t_ar_ms=1e3 * sum(base_seconds) / steps,
            t_verify_ms=1e3 * verify / timed_rounds,
            t_draft_ms=1e3 * draft / timed_rounds,
            overhead_ms=1e3 * max(0.0, total - draft - verify) / timed_rounds,
        ),
        sampling=sampling.settings,
        observations=len(clocked),
        memory=memory,
        load_seconds=load_seconds,
    )


def _by_position(texts: Sequence[Sequence[Round]]) -> list[OutputBucket]:
    emitted, rounds = [0] * (len(BUCKETS) - 1), [0] * (len(BUCKETS) - 1)
    for text in texts:
        at = 1
        for entry in text:
            bucket = sum(at >= edge for edge in BUCKETS[1:-1] if edge is not None)
            emitted[bucket] += entry.emitted
            rounds[bucket] += 1
            at += entry.emitted
    return [
        OutputBucket(start=BUCKETS[i] or 0, end=BUCKETS[i + 1], tau=emitted[i] / rounds[i], rounds=rounds[i]) for i in range(len(rounds)) if rounds[i]
    ]


def _sample(bench: _Bench, items: Sequence[_Item], params: Sequence[SamplingParams], ours: list[Generation], sampling: _Sampling) -> Sample:
    """The longest text, token by token, with what the drafter offered at each place: the text is decoded once more for that, untimed."""
    target, engine = bench.target, bench.engines[""]
    tokenizer = target.tokenizer
    assert tokenizer is not None and engine.proposer is not None
    best = max(range(len(ours)), key=lambda i: len(ours[i].tokens[0]))
    new, rounds = trace(target, engine.proposer, items[best].ids, params[best], bench.settings.max_new_tokens, eos_ids=bench.stops, rule=engine.rule)
    pieces = [Piece(text=tokenizer.decode(new[:1]), origin="target", round=0)]
    for number, entry in enumerate(rounds, 1):
        for place, token in enumerate(entry.emitted):
            drafted = place < len(entry.path) - 1
            offered = [tokenizer.decode([entry.tokens[i]]) for i in entry.children(entry.path[place])] if place < len(entry.path) else []
            pieces.append(Piece(text=tokenizer.decode([token]), origin="drafted" if drafted else "target", round=number, offered=offered))
    return Sample(prompt=tokenizer.decode(items[best].ids), temperature=sampling.params.temperature, pieces=pieces)


def build_report(
    target: Target,
    drafter: dict[str, Any],
    suite: Suite,
    settings: Settings,
    measured: Measured,
    training: dict[str, Any] | None,
    threads: dict[str, Any],
    drift: Drift | None = None,
    costs: CostReport | None = None,
) -> Report:
    """The report, with everything recorded that can change a number. threads: what `choose_threads` said. drift: of a target that was tuned."""
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
            "device": device_name(target.device),
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
            "batch": sorted({1, *settings.batches}),
            "rule": settings.rule,
            "order": "interleaved prompt by prompt, order of the engines alternating",
            "timed": "decoding only, from the first token; total tokens over total seconds",
            "categories": len(set(suite.categories)),
            "turns": sum(1 + len(later) for later in suite.later) or len(suite.prompts),
            "timed_prompts": len(suite.prompts) if settings.timed_prompts is None else min(settings.timed_prompts, len(suite.prompts)),
            "gate_batch": settings.gate_batch,
            "tie_factor": TIE_FACTOR,
        },
        results=measured.rows,
        samples=measured.samples,
        training=training,
        others=measured.others,
        drift=drift,
        costs=costs,
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


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
