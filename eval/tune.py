"""The best draft for this drafter, target and machine: `draftsmith tune DRAFTER`, on development prompts, never on those that are reported.

First the draft's confidence is calibrated (`decode/calibration.py`). Then its offers at every position of the prompts' answers are surveyed
(`survey.py`), which tells the tau of every chain, dynamic and static tree without decoding them, and latencies are measured on this device, for
chains and trees, greedy and sampled, apart. From both follow the best chain, the best dynamic tree and the best static tree (Sequoia, 2402.12374: a
dynamic programme over nodes, depth and branch). Rounds of these and of the default are then timed in turns. The default stays unless another is
faster by more than the noise. The result is the drafter's tuning.json (`heads/tuning.py`).

A recipe with `eval.tune: true` does the same after training, in short: without static trees, and with fewer rounds timed.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import UserError
from ..decode.calibration import Temperatures
from ..decode.engine import Engine
from ..decode.prompts import eos_ids, render_prompt
from ..decode.proposer import Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..decode.trees import Follower
from ..heads.registry import Drafter, open_drafter
from ..heads.tuning import Tuning
from ..recipes.schema import Decode, Eval
from .cost_model import Condition, CostModel, fit
from .drafting import decode_settings, make_proposer
from .latency import BUCKETS, Clock, Shape, round_latencies, verify_latencies
from .machine import choose_threads, device_name
from .stats import Interval, expanded_tail
from .suites import Suite, load_suite
from .survey import Offer, calibrate, plain_texts, rounds_of, survey

LONGEST_CHAIN = 12  # tried where the drafter has no limit of its own
TOPK = 4
SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 19, 23, 27, 31, 39, 47, 63)  # draft nodes of dynamic trees
EXPLORED_NODES = 128  # of the tree with which acceptance by rank is measured
BATCH = 32
BRIEF_PROMPTS = 8  # of a tuning that follows a training
QUIET = 0.25  # the quantile of several times that is taken: what disturbs a measurement only adds to it
Progress = Callable[[str], None]


# The best static tree


def best_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> tuple[list[tuple[int, ...]], float]:
    """(paths, expected tokens a round) of the best tree of at most `nodes` draft nodes: Sequoia's dynamic programme, acceptance differing by depth.

    acceptance[d][r]: probability that the candidate of rank r is the token at depth d + 1, given its parent was accepted. The tree is as deep as the
    list at most. below[d][m]: the most tokens expected below an accepted node of depth d with m nodes; child[d][k][m]: the same of its children of
    rank k and higher alone. Raises UserError for probabilities that are none.
    """
    if not acceptance or nodes < 1 or any(not 0 <= p <= 1 for level in acceptance for p in level):
        raise UserError(f"tree: wanted nodes >= 1 and acceptance probabilities in [0, 1], got {nodes} and {[list(level) for level in acceptance]}")
    depths = len(acceptance)
    below = [[0.0] * (nodes + 1) for _ in range(depths + 1)]
    taken: list[list[list[int]]] = []  # [d][k][m]: nodes given to the child of rank k, itself counted
    for depth in reversed(range(depths)):
        ranks = len(acceptance[depth])
        child = [[0.0] * (nodes + 1) for _ in range(ranks + 1)]
        given = [[0] * (nodes + 1) for _ in range(ranks)]
        for rank in reversed(range(ranks)):
            p = acceptance[depth][rank]
            for m in range(nodes + 1):
                best, size = child[rank + 1][m], 0
                for own in range(1, m + 1):
                    value = p * (1 + below[depth + 1][own - 1]) + child[rank + 1][m - own]
                    if value > best + 1e-15:
                        best, size = value, own
                child[rank][m], given[rank][m] = best, size
        below[depth] = child[0]
        taken.insert(0, given)
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[tuple[int, ...], int]] = [((), nodes)]
    while waiting:
        path, m = waiting.pop()
        for rank, sizes in enumerate(taken[len(path)] if len(path) < depths else []):
            own = sizes[m]
            if own:
                paths.append((*path, rank))
                waiting.append(((*path, rank), own - 1))
                m -= own
    return sorted(paths, key=lambda path: (len(path), path)), 1 + below[0][nodes]


def expected_tokens(acceptance: Sequence[Sequence[float]], paths: Sequence[Sequence[int]]) -> float:
    """1 + the sum over the tree's nodes of their path probabilities."""
    return 1 + sum(math.prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in paths)


# Acceptance by rank and depth


def explored_paths(depth: int, most: int = EXPLORED_NODES) -> list[list[int]]:
    """Paths whose ranks add up to little: all places near the likeliest path get all candidates, the others fewer. At most `most` of them."""

    def paths(total: int, length: int) -> list[list[int]]:
        if length == 0:
            return [[]]
        return [[rank, *rest] for rank in range(total + 1) for rest in paths(total - rank, length - 1)]

    best: list[list[int]] = []
    for total in range(1, 32):
        found = [path for length in range(1, depth + 1) for path in paths(total, length)]
        if len(found) > most:
            break
        best = found
    return best or [[0] * length for length in range(1, depth + 1)]


def count_ranks(offers: Sequence[Offer], paths: frozenset[tuple[int, ...]], seen: list[list[int]], hits: list[list[int]]) -> None:
    """Add the places of these offers of trees of such paths: at each right node with children, which of them, by rank, is the text's next token."""
    branching: dict[tuple[int, ...], int] = {}
    for path in paths:
        branching[path[:-1]] = branching.get(path[:-1], 0) + 1
    for offer in offers:
        for depth in range(min(offer.left, len(offer.ranks) + 1)):
            children = branching.get(offer.ranks[:depth], 0)
            if not children:
                break
            while len(seen) <= depth:
                seen.append([])
                hits.append([])
            for table in (seen[depth], hits[depth]):
                table += [0] * (children - len(table))
            for rank in range(children):
                seen[depth][rank] += 1
            if depth < len(offer.ranks):
                hits[depth][offer.ranks[depth]] += 1


def shares(seen: Sequence[Sequence[int]], hits: Sequence[Sequence[int]]) -> list[list[float]]:
    """Acceptance by depth and rank; half a hit of one place is added to each, so that nothing is impossible."""
    return [[(h + 0.5) / (s + 1) for s, h in zip(row, own, strict=True)] for row, own in zip(seen, hits, strict=True)]


# Tuning


@dataclass(frozen=True)
class Gain:
    """How fast a draft is at one temperature: tau, the speed-up over plain decoding that the latencies predict, and the timed one."""

    tau: float
    predicted: float
    measured: Interval | None = None


@dataclass(frozen=True)
class Candidate:
    """A draft that was looked at. rounds[i]: those that row i takes; gains: by temperature, and `predicted`, of all temperatures together."""

    kind: str
    decode: Decode
    rounds: Sequence[int]
    gains: Mapping[float, Gain]
    predicted: float
    measured: Interval | None = None  # over plain decoding, rounds timed in turns
    over_default: Interval | None = None

    @property
    def shape(self) -> Shape:
        """Depth, draft nodes."""
        paths = self.decode.paths
        return (max(map(len, paths)), len(paths)) if paths else (self.decode.depth, self.decode.num_nodes)

    @property
    def words(self) -> str:
        """What it is, in words."""
        depth, nodes = self.shape
        tree = self.decode.tree.replace("_", "-")
        return f"a chain of {depth}" if tree == "chain" else f"a {tree} tree of {nodes} nodes, depth {depth}"


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """temperatures: those that decoding is tuned for, equally. most_nodes, deepest: of a dynamic tree. timed_prompts: at each temperature.

    static: look at static trees too, and measure acceptance by rank. sampled_latencies: measure those of sampled rows apart, not as greedy ones'.
    cautious: see `choose`. clock: time.process_time on a busy machine, with one thread.
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 64
    most_nodes: int = 63
    deepest: int = 8
    timed_prompts: int = 6
    timed_tokens: int = 48
    repeats: int = 3
    static: bool = True
    sampled_latencies: bool = True
    cautious: bool = True
    longest_chain: int = LONGEST_CHAIN
    calibration_rows: int = 24
    calibration_tokens: int = 64
    seed: int = 0
    clock: Clock = time.perf_counter


@dataclass
class _Row:
    """One prompt at one temperature, and what is answered."""

    prompt: list[int]
    params: SamplingParams
    text: list[int] = field(default_factory=list)


class Tuner:
    """Measures on the development prompts. default: the draft that stays unless another is surely faster (None: as without tuning)."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        suite: Suite,
        settings: TuneSettings,
        progress: Progress = lambda _: None,
        default: Decode | None = None,
    ) -> None:
        assert target.tokenizer is not None
        self.target, self.drafter, self.suite, self.settings, self.progress = target, drafter, suite, settings, progress
        prompts = [render_prompt(target.tokenizer, messages) for messages in suite.prompts]
        self.stops = eos_ids(target.model)
        self.rows = [
            _Row(prompt, SamplingParams(temperature=t, seed=settings.seed + i)) for i, prompt in enumerate(prompts) for t in settings.temperatures
        ]
        progress("plain decoding")
        texts = plain_texts(target, [r.prompt for r in self.rows], [r.params for r in self.rows], settings.max_new_tokens, self.stops, BATCH)
        for row, text in zip(self.rows, texts, strict=True):
            row.text = text
        # A prompt that ends with the first token, at any temperature, says nothing of drafts; pairs stay whole.
        width = len(settings.temperatures)
        groups = [self.rows[i : i + width] for i in range(0, len(self.rows), width)]
        self.rows = [row for group in groups if all(len(r.text) > 1 for r in group) for row in group]
        if not self.rows:
            raise UserError("tune: wanted development prompts that are answered with more than one token, got none; raise --max-new-tokens")
        self.middle = sorted((r.prompt for r in self.rows), key=len)[len(self.rows) // 2]
        self.longest: int = min(getattr(drafter, "longest", None) or settings.longest_chain, settings.longest_chain)
        self.default = default or decode_settings(drafter, None)
        self.temperatures = Temperatures()
        self.costs: dict[tuple[bool, bool], Condition] = {}  # (chain, sampled)

    # what it can do

    def make(self, decode: Decode) -> Proposer:
        """Its proposer."""
        return make_proposer(self.drafter, decode, self.target, self.middle)

    @property
    def can_tree(self) -> bool:
        """Whether it drafts dynamic trees whose size can be chosen."""
        if self.longest < 2:
            return False
        try:
            tree, chain = (self.drafter.proposer(tree=kind, depth=2, topk=TOPK, nodes=6) for kind in ("dynamic", "chain"))
        except UserError:
            return False
        return tree.num_nodes == 7 and chain.num_nodes == 3

    @property
    def nested(self) -> bool:
        """Whether a shallow draft is the beginning of a deep one. Blocks whose positions see each other are drafted otherwise for each depth."""
        return bool(getattr(self.make(Decode(depth=1)), "by_level", True))

    def most(self, depth: int) -> int:
        """Draft nodes of the largest tree of that depth."""
        return TOPK + (depth - 1) * TOPK * TOPK

    def dynamic_decode(self, depth: int, nodes: int) -> Decode:
        """Of a tree, the temperatures that were found with it."""
        found = {"greedy_temperatures": list(self.temperatures.greedy) or None, "sampled_temperatures": list(self.temperatures.sampled) or None}
        return Decode(tree="dynamic", depth=depth, topk=TOPK, nodes=nodes, **found)  # type: ignore[arg-type]

    # measurements

    def calibrate(self) -> Temperatures:
        """The temperatures of its trees, from now on; none for drafters of chains alone, and for those that rank by no probabilities."""
        self.progress("confidence")
        if self.can_tree:
            few = self.rows[: self.settings.calibration_rows]
            texts = [row.text[: self.settings.calibration_tokens] for row in few]
            depth = min(self.longest, 6)
            proposer = self.make(Decode(tree="dynamic", depth=depth, topk=TOPK, nodes=self.most(depth)))
            self.temperatures = calibrate(self.target, proposer, [r.prompt for r in few], [r.params for r in few], texts)
        return self.temperatures

    def latencies(self) -> None:
        """This device's, after the prompt in the middle: chains and trees, greedy and sampled, apart."""
        settings = self.settings
        self.progress("latencies")
        sizes = [n for n in BUCKETS if n <= max(8, 2 * settings.most_nodes)]
        verify = verify_latencies(self.target, self.middle, 2 * settings.repeats, sizes=sizes, quantile=QUIET, clock=settings.clock)
        chains = {(d, d) for d in (1, (self.longest + 1) // 2, self.longest)}
        trees = {(d, n) for d, n in ((2, 4), (3, 7), (4, 15), (5, 31), (6, 15)) if d <= self.longest and n <= settings.most_nodes}
        trees = trees if self.can_tree else set()
        kinds = {t > 0 for t in settings.temperatures}
        for sampled in sorted(kinds if settings.sampled_latencies else {min(kinds)}):
            makers: dict[tuple[str, Shape], Proposer | None] = {("plain", (0, 0)): None}
            makers |= {("chain", shape): self.make(Decode(depth=shape[0])) for shape in sorted(chains)}
            makers |= {("tree", shape): self.make(self.dynamic_decode(*shape)) for shape in sorted(trees)}
            temperature = max(settings.temperatures) if sampled else 0.0
            about: dict[str, Any] = {"new_tokens": 16, "temperature": temperature, "quantile": QUIET, "clock": settings.clock}
            found = round_latencies(self.target, makers, self.middle, repeats=settings.repeats, **about)
            t_ar = found.pop(("plain", (0, 0)))
            for name in ("chain", "tree"):
                known = [(*shape, ms) for (kind, shape), ms in found.items() if kind == name]
                if known:
                    about = {"batch": 1, "context": len(self.middle) + 8, "t_ar": t_ar, "verify": verify.items()}
                    self.costs[name == "chain", sampled] = fit(rounds=known, **about)

    def survey(self, decode: Decode, what: str) -> list[list[Offer]]:
        """Its offers at every position of every row."""
        every = len(self.rows)
        self.progress(what)
        rows = [r.prompt for r in self.rows], [r.params for r in self.rows], [r.text for r in self.rows]
        return survey(self.target, self.make(decode), *rows, batch=BATCH, note=lambda done: self.progress(f"{what}: {done} of {every} answers"))

    def rounds(self, decode: Decode) -> list[int]:
        """Of each row, by decoding it."""
        engine, found = Engine(self.target, self.make(decode)), list[int]()
        for start in range(0, len(self.rows), BATCH):
            part = self.rows[start : start + BATCH]
            out = engine.generate([r.prompt for r in part], [r.params for r in part], self.settings.max_new_tokens, eos_ids=self.stops)
            found += [len(rounds) for rounds in out.rounds]
        return found

    # candidates

    def candidate(self, kind: str, decode: Decode, rounds: Sequence[int]) -> Candidate:
        """With what the latencies predict."""
        depth, nodes = Candidate(kind, decode, rounds, {}, 0.0).shape
        gains, spent, plainly = {}, 0.0, 0.0
        for t in self.settings.temperatures:
            costs = self._costs(decode.tree == "chain", t > 0)
            places = [i for i, row in enumerate(self.rows) if row.params.temperature == t]
            tokens, taken = sum(len(self.rows[i].text) - 1 for i in places), sum(rounds[i] for i in places)
            gains[t] = Gain(tokens / taken, costs.speedup(tokens / taken, depth, nodes))
            spent, plainly = spent + taken * costs.round(depth, nodes), plainly + tokens * costs.t_ar
        return Candidate(kind, decode, rounds, gains, plainly / spent)

    def _costs(self, chain: bool, sampled: bool) -> Condition:
        """The latencies of such a draft, or of the next that was measured."""
        return next(self.costs[key] for key in ((chain, sampled), (True, sampled), (chain, not sampled), (True, not sampled)) if key in self.costs)

    def _counted(self, offers: Sequence[Sequence[Offer]], accepted: Callable[[Offer], int]) -> list[int]:
        return [rounds_of(len(row.text), [accepted(offer) for offer in own]) for row, own in zip(self.rows, offers, strict=True)]

    def chains(self) -> list[Candidate]:
        """All lengths; of drafters whose depths are not nested, some."""
        if self.nested:
            offers = self.survey(Decode(depth=self.longest), "chains")
            lengths = {d: self._counted(offers, lambda offer, d=d: offer.prefix(d)) for d in range(1, self.longest + 1)}  # type: ignore[misc]
        else:
            lengths = {}
            for d in sorted({1, 2, (self.longest + 1) // 2, self.longest}):
                lengths[d] = self._counted(self.survey(Decode(depth=d), f"chains of {d}"), lambda offer, d=d: offer.prefix(d))  # type: ignore[misc]
        return [self.candidate("chain", Decode(depth=d), rounds) for d, rounds in lengths.items()]

    def trees(self) -> list[Candidate]:
        """Dynamic trees of all depths and sizes up to the largest; of drafters whose depths are not nested, of the deepest."""
        if not self.can_tree:
            return []
        deepest = min(self.longest, self.settings.deepest)
        offers = self.survey(self.dynamic_decode(deepest, self.most(deepest)), "dynamic trees")
        found = []
        for depth in range(2 if self.nested else deepest, deepest + 1):
            for nodes in SIZES:
                if depth <= nodes <= min(self.settings.most_nodes, self.most(depth)):
                    rounds = self._counted(offers, lambda offer, d=depth, n=nodes: offer.kept(d, n))  # type: ignore[misc]
                    found.append(self.candidate("dynamic", self.dynamic_decode(depth, nodes), rounds))
        return found

    def calibrated_default(self, trees: Sequence[Candidate]) -> Candidate | None:
        """The default with the temperatures that were found, if it is one of these trees: calibrating a tree of the same size costs nothing."""
        shaped = self.dynamic_decode(self.default.depth, self.default.num_nodes)
        plain = replace(shaped, greedy_temperatures=None, sampled_temperatures=None)
        found = next((c for c in trees if c.decode == shaped and self.default == plain), None)
        return None if found is None else replace(found, kind="default")

    def ranks(self) -> tuple[dict[str, list[list[float]]], list[list[float]], list[list[Offer]]]:
        """({temperature: acceptance by depth and rank}, the same of all temperatures together, the offers behind them)."""
        paths = explored_paths(min(self.longest, 6))
        try:
            offers = self.survey(Decode(tree="static", paths=paths), "acceptance by rank")
        except UserError:  # it cannot follow a static tree: what it drafts anyway is what can be judged
            paths = [[0] * length for length in range(1, self.longest + 1)]
            offers = self.survey(Decode(depth=self.longest), "acceptance by rank")
        known = frozenset(tuple(path) for path in paths)
        tables: dict[str, tuple[list[list[int]], list[list[int]]]] = {}
        for row, own in zip(self.rows, offers, strict=True):
            for name in (f"{row.params.temperature:g}", "all"):
                count_ranks(own, known, *tables.setdefault(name, ([], [])))
        pooled = shares(*tables.pop("all"))
        return {name: [[round(p, 4) for p in level] for level in shares(*table)] for name, table in tables.items()}, pooled, offers

    def static(self, acceptance: Sequence[Sequence[float]], offers: Sequence[Sequence[Offer]]) -> list[Candidate]:
        """Static trees: for every depth and number of nodes, the best one by the dynamic programme."""
        if not self.can_tree or not self.nested or not isinstance(self.make(Decode(depth=1)), Follower):
            return []
        known: dict[frozenset[tuple[int, ...]], Candidate] = {}
        for depth in range(1, len(acceptance) + 1):
            for nodes in sorted({n for n in SIZES if n <= self.settings.most_nodes}):
                paths, _ = best_tree(acceptance[:depth], nodes)
                kept = frozenset(paths)
                if kept not in known:
                    decode = Decode(tree="static", depth=max(map(len, paths)), paths=[list(path) for path in paths])
                    known[kept] = self.candidate("static", decode, self._counted(offers, lambda offer, kept=kept: offer.within(kept)))  # type: ignore[misc]
        return list(known.values())

    # the race

    def race(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Time rounds of all of them and of plain decoding, in turns; the first candidate is the default that the others are compared with.

        A draft's speed is made of two parts that are measured apart: rounds, of all prompts, which no clock enters, and what a round takes, of some.
        """
        settings = self.settings
        engines = {c.kind: Engine(self.target, self.make(c.decode)) for c in candidates} | {"plain": Engine(self.target)}
        groups = [[row for row in self.rows if row.params.temperature == t][: settings.timed_prompts] for t in settings.temperatures]
        ms: dict[str, list[list[float]]] = {kind: [[] for _ in groups] for kind in engines}
        for engine in engines.values():
            engine.generate([groups[0][0].prompt], groups[0][0].params, 8, eos_ids=self.stops)
        order = list(engines)
        for place, group in enumerate(groups):
            for i, row in enumerate(group):
                self.progress(f"in turns: {place * len(group) + i + 1} of {sum(map(len, groups))} answers")
                for kind in order if i % 2 else order[::-1]:
                    ms[kind][place].append(self._round_ms(engines[kind], row))
        plain = [len(row.text) - 1 for row in self.rows]

        def over(c: Candidate, rounds: Sequence[int], kind: str, at: Sequence[int]) -> Interval:
            ours, theirs = (self._by_prompt(taken)[:, at] for taken in (c.rounds, rounds))
            return lead(ours, theirs, [ms[c.kind][t] for t in at], [ms[kind][t] for t in at])

        everywhere = list(range(len(groups)))
        first = candidates[0]
        return [
            replace(
                c,
                gains={t: replace(c.gains[t], measured=over(c, plain, "plain", [at])) for at, t in enumerate(settings.temperatures)},
                measured=over(c, plain, "plain", everywhere),
                over_default=over(c, first.rounds, first.kind, everywhere),
            )
            for c in candidates
        ]

    def _round_ms(self, engine: Engine, row: _Row) -> float:
        """What a round of this row takes, the prefill left out."""
        clock = self.settings.clock
        began = clock()
        engine.generate([row.prompt], row.params, 1, eos_ids=self.stops)
        middle = clock()
        out = engine.generate([row.prompt], row.params, self.settings.timed_tokens, eos_ids=self.stops)
        rounds = len(out.rounds[0])
        return 1e3 * ((clock() - middle) - (middle - began)) / max(1, rounds)

    def _by_prompt(self, rounds: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[prompts, temperatures]."""
        return np.array(rounds, dtype=np.float64).reshape(-1, len(self.settings.temperatures))


def lead(
    rounds_a: Any, rounds_b: Any, ms_a: Sequence[Sequence[float]], ms_b: Sequence[Sequence[float]], *, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Speed of A over speed of B on the same texts, with its 95 % bootstrap interval.

    rounds: [prompts, temperatures]; ms[t]: of a round at temperature t, of each answer that was timed, the same ones for both. A round takes their
    lower quartile (`QUIET`). Both prompts and timed answers are drawn again, those of A and B together.
    """
    generator = np.random.default_rng(seed)
    prompts, timed = len(rounds_a), min(map(len, ms_a))
    draws_rp = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    weights_rp = np.concatenate([np.ones((1, prompts)), draws_rp])
    chosen_rm = np.concatenate([np.arange(timed)[None], generator.integers(timed, size=(resamples, timed))])
    spent = []
    for rounds_pt, ms in ((rounds_a, ms_a), (rounds_b, ms_b)):
        quiet_rt = np.stack([np.quantile(np.asarray(own)[chosen_rm], QUIET, axis=1) for own in ms], axis=1)
        spent.append(((weights_rp @ rounds_pt) * quiet_rt).sum(1))
    ratios_r = spent[1] / spent[0]
    tail = expanded_tail(0.95, prompts)
    low, high = np.quantile(ratios_r[1:], [tail, 1 - tail])
    return Interval(float(ratios_r[0]), float(low), float(high))


def choose(raced: Sequence[Candidate], *, cautious: bool = True) -> Candidate:
    """The fastest of those that beat the default, the first, by more than the noise; else the default.

    Not cautious: of those that were faster in the race and are by the cost model too, as a brief race is seldom certain of anything.
    """

    def beats(c: Candidate) -> bool:
        assert c.over_default is not None
        return c.over_default.lo > 1 if cautious else c.over_default.value > 1 and c.predicted > raced[0].predicted

    better = [c for c in raced[1:] if beats(c)]
    return max(better, key=lambda c: c.over_default.value if c.over_default else 0.0, default=raced[0])


def tune(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    settings: TuneSettings,
    progress: Progress = lambda _: None,
    default: Decode | None = None,
) -> tuple[Tuning, list[Candidate], Candidate]:
    """(what goes into the drafter's folder, the raced candidates with their measurements, the chosen one). default: see `Tuner`."""
    tuner = Tuner(target, drafter, suite, settings, progress, default)
    temperatures = tuner.calibrate()
    tuner.latencies()
    chains, trees = tuner.chains(), tuner.trees()
    acceptance: dict[str, list[list[float]]] = {}
    static: list[Candidate] = []
    if settings.static:
        acceptance, pooled, offers = tuner.ranks()
        static = tuner.static(pooled, offers)
    first = tuner.calibrated_default(trees) if default is not None else None
    first = first or tuner.candidate("default", tuner.default, tuner.rounds(tuner.default))
    groups = [group for group in (chains, trees, static) if group]
    distinct = [first]
    for found in (max(group, key=lambda c: c.predicted) for group in groups):
        if all(found.decode != known.decode for known in distinct):
            distinct.append(found)
    raced = tuner.race(distinct)
    chosen = choose(raced, cautious=settings.cautious)
    everything = [first, *chains, *trees, *static]
    apart = {t: max(everything, key=lambda c: c.gains[t].predicted) for t in settings.temperatures}
    costs = tuner._costs(chosen.decode.tree == "chain", min(settings.temperatures) > 0)
    tuning = Tuning(
        device=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        target=target.fingerprint(),
        decode={k: v for k, v in asdict(chosen.decode).items() if v is not None},
        num_speculative_tokens=max(chains, key=lambda c: c.predicted).decode.depth,
        acceptance=acceptance,
        confidence={"greedy": list(temperatures.greedy), "sampled": list(temperatures.sampled)},
        measured={
            "chosen": chosen.kind,
            "words": words(raced, chosen, apart, len(tuner.rows) // len(settings.temperatures)),
            "candidates": [_described(c) for c in raced],
            "best_by_temperature": {f"{t:g}": _described(c) for t, c in apart.items()},
            "looked_at": len(everything),
        },
        costs=CostModel((costs,)).to_json(),
        prompts={"suite": suite.name, "split": "dev", "count": len(suite.prompts), "sha256": suite.digest},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return tuning, raced, chosen


def tune_briefly(target: Target, folder: Path, part: Eval, default: Decode, progress: Progress = lambda _: None) -> Tuning:
    """As a recipe with `eval.tune: true` does it, of a drafter that has just been trained: as short as it can be and still be of use."""
    suite = load_suite(part.suite, min(BRIEF_PROMPTS, part.dev_prompts), split="dev", prompt_chars=part.prompt_chars, seed=part.seed)
    drafter, _ = open_drafter(folder, target)
    assert target.tokenizer is not None
    choose_threads(target, render_prompt(target.tokenizer, suite.prompts[0]), part.threads)
    settings = TuneSettings(
        temperatures=part.temperatures, max_new_tokens=part.dev_tokens, static=False, sampled_latencies=False, cautious=False, deepest=6,
        longest_chain=8, most_nodes=31, calibration_rows=12, calibration_tokens=40, timed_prompts=4, timed_tokens=24, repeats=2, seed=part.seed,
    )  # fmt: skip
    return tune(target, drafter, suite, settings, progress, default)[0]


def words(raced: Sequence[Candidate], chosen: Candidate, apart: Mapping[float, Candidate], prompts: int) -> list[str]:
    """What was chosen and why, and where it does not pay, one sentence a line."""

    def told(interval: Interval | None) -> str:
        return "" if interval is None else f"{interval.value:.2f}x ({interval.lo:.2f}-{interval.hi:.2f})"

    speeds = ", ".join(f"{told(gain.measured)} at T={t:g}" for t, gain in chosen.gains.items())
    lines = [f"draft chosen for this machine on {prompts} development prompts: {chosen.words}, {speeds} against plain decoding"]
    first = raced[0]
    others = [c for c in raced if c is not chosen]
    if chosen is not first:
        lines[0] += f"; {told(chosen.over_default)} against {first.words}, the default"
    elif others:
        lines[0] += "; the default stays: " + ", ".join(f"{c.words} gives {told(c.over_default)} of its speed" for c in others)
    for t, gain in chosen.gains.items():
        found, best = gain.measured, apart[t]
        if found is None or found.lo >= 1:
            continue
        verdict = "speculation does not pay" if found.hi < 1 else "it is not certain that speculation pays"
        lines.append(
            f"at T={t:g} {verdict} on this machine: {told(found)}; the best of all drafts there is {best.words}, predicted "
            f"{best.gains[t].predicted:.2f}x"
        )
    return lines


def _described(c: Candidate) -> dict[str, Any]:
    depth, nodes = c.shape

    def span(interval: Interval | None) -> list[float] | None:
        return [round(x, 4) for x in interval] if interval else None

    gains = {f"{t:g}": {"tau": round(g.tau, 4), "predicted": round(g.predicted, 4), "measured": span(g.measured)} for t, g in c.gains.items()}
    about = {"kind": c.kind, "tree": c.decode.tree, "depth": depth, "nodes": nodes, "predicted": round(c.predicted, 4)}
    return about | {"measured": span(c.measured), "over_default": span(c.over_default), "by_temperature": gains}
