"""Measure a drafter: the losslessness gate and the timings, on the same prompts, in one process, interleaved prompt by prompt.

A *unit* is what is timed as one: a prompt at batch 1, a group of prompts that are decoded together at larger batches. Intervals draw units again;
turns of one conversation together, as they are not independent.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from .. import UserError, __version__
from ..decode.engine import Engine, Generation
from ..decode.prompts import eos_ids, render_prompt
from ..decode.proposer import Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..decode.verify import RULES
from .baselines import assisted, eager, model_default
from .gate import TIE_FACTOR, audit, gate_of
from .machine import device_name, short_name
from .memory import MIB, Peak, speculation_bytes
from .rows import decoded, only, row_of
from .runs import RULE, Item, Runs, Sampling, Settings
from .schema import CostReport, Drift, Lossless, Memory, Other, Piece, Report, Row, Sample
from .suites import Suite
from .trace import trace

TURN_BATCH = 16  # conversations whose earlier answers are generated together


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

    def items(self, sampling: Sampling) -> list[Item]:
        """All prompts, conversation by conversation; those of later turns with the answers that plain decoding gives to the earlier ones."""
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        found: list[Item] = []
        open_ = [(list(c.opening), list(c.later), c.category, number) for number, c in enumerate(self.suite.conversations)]
        turn = 0
        while open_:
            rendered = [Item(render_prompt(tokenizer, messages), category, number, turn) for messages, _, category, number in open_]
            found += rendered
            going = [i for i, (_, later, _, _) in enumerate(open_) if later]
            for start in range(0, len(going), TURN_BATCH):
                part = going[start : start + TURN_BATCH]
                params = [replace(sampling.params, seed=self.settings.seed + rendered[i].conversation) for i in part]
                out = self.plain.generate([rendered[i].ids for i in part], params, self.settings.max_new_tokens, eos_ids=self.stops)
                for i, tokens in zip(part, out.tokens, strict=True):
                    messages, later, *_ = open_[i]
                    messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
                    messages.append({"role": "user", "content": later.pop(0)})
            open_ = [open_[i] for i in going]
            turn += 1
        return sorted(found, key=lambda item: (item.conversation, item.turn))

    def warm_up(self, items: Sequence[Item], params: Sequence[SamplingParams]) -> None:
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
        items: Sequence[Item],
        params: Sequence[SamplingParams],
        units: list[list[int]],
        names: Sequence[str],
        note: Callable[[int], None],
    ) -> Runs:
        """Decode all units by all engines in turns."""
        alone = all(len(unit) == 1 for unit in units)
        owners = [items[unit[0]].conversation if alone else number for number, unit in enumerate(units)]
        runs = Runs(units, owners, {name: [] for name in names})
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

    def untimed(self, items: Sequence[Item], params: Sequence[SamplingParams], rest: Sequence[int], note: Callable[[int], None]) -> Runs:
        """Decode the other items in ragged batches, for the gate and for tau."""
        runs = Runs([[i] for i in rest], [items[i].conversation for i in rest], {"": []})
        for start in range(0, len(rest), self.settings.gate_batch):
            part = rest[start : start + self.settings.gate_batch]
            for engine, into in ((self.engines[""], runs.ours[""]), (self.plain, runs.base)):
                prompts, own = [items[i].ids for i in part], [params[i] for i in part]
                out = engine.generate(prompts, own, self.settings.max_new_tokens, eos_ids=self.stops)
                into += [Generation([tokens], [rounds]) for tokens, rounds in zip(out.tokens, out.rounds, strict=True)]
            note(part[-1])
        return runs

    def gate(self, name: str, items: Sequence[Item], params: Sequence[SamplingParams], parts: Sequence[Runs]) -> Lossless:
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
        return gate_of(self.target, [items[i] for i in order], want, got, [params[i] for i in order], engine.num_nodes, engine.rule, list(reasons))

    def memory(self, name: str, runs: Runs, batch: int) -> Memory:
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


def _measure_sampling(bench: _Bench, sampling: Sampling, measured: Measured, progress: Progress, load_seconds: dict[str, float]) -> None:
    """All rows of one way to sample."""
    settings, label = bench.settings, sampling.label
    items = bench.items(sampling)
    every = len(items)
    params = [replace(sampling.params, seed=settings.seed + item.conversation) for item in items]  # as the answers in its history were drawn
    count = every if settings.timed_prompts is None else min(settings.timed_prompts, every)

    def note(index: int) -> None:
        progress(label, index + 1, every)

    def row(gate: Lossless, runs: Runs, rest: Runs | None, name: str = "", **more: Any) -> Row:
        memory = bench.memory(name, runs, more.get("batch", 1))
        drafted_by = bench.engines[name]
        return row_of(bench.suite.name, sampling, gate, runs, rest, name, settings, drafted_by, memory=memory, load_seconds=load_seconds, **more)

    runs = bench.timed(items, params, [[i] for i in range(count)], list(bench.engines), note)
    for other in measured.others:
        other.results.append(row(bench.gate(other.drafter, items, params, [runs]), runs, None, other.drafter))
    rest = bench.untimed(items, params, range(count, every), note)
    measured.rows.append(row(bench.gate("", items, params, [runs, rest]), runs, rest))
    names = list(dict.fromkeys(item.category for item in items))
    for name in names if len(names) > 1 else []:
        part, other_part = only(runs, items, name), only(rest, items, name)
        # A category without a timed prompt says nothing of speed: it has no row.
        if any(decoded(a) and decoded(b) for a, b in zip(part.ours[""], part.base, strict=True)):
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


def samplings(target: Target, settings: Settings) -> list[Sampling]:
    """The temperatures, then the model's own way to sample, unless that is one of them."""
    found = [Sampling(f"T={t:g}", SamplingParams(temperature=t)) for t in settings.temperatures]
    default = model_default(target) if settings.default_sampling else None
    if default is not None and all(default != known.params for known in found):
        found.append(Sampling("the model's default sampling", default, True))
    return found


def _sample(bench: _Bench, items: Sequence[Item], params: Sequence[SamplingParams], ours: list[Generation], sampling: Sampling) -> Sample:
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
