"""The best draft for this drafter, target and machine: `draftsmith tune DRAFTER`, on development prompts, never on those that are reported.

Acceptance is measured by rank and depth under the rule that is deployed, latencies on this device. From both follow the best chain, the best dynamic
tree and the best static tree (Sequoia, 2402.12374: a dynamic programme over nodes, depth and branch). The best of each kind and the defaults are then
decoded in turns, and the defaults stay unless another is faster by more than the noise. The result is the drafter's tuning.json (`heads/tuning.py`).
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import UserError
from ..decode.engine import Engine
from ..decode.growth import Grower
from ..decode.prompts import eos_ids, render_prompt
from ..decode.proposer import Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..decode.trees import Follower
from ..heads.registry import Drafter
from ..heads.tuning import Tuning
from ..recipes.schema import Decode
from .cost_model import Condition, CostModel, chain_tau
from .drafting import decode_settings, make_proposer
from .harness import device_name
from .latency import BUCKETS, Clock, Shape, fit_and_test
from .stats import Interval, paired_ratio_interval
from .suites import Suite
from .trace import TracedRound, trace

LONGEST_CHAIN = 12  # tried where the drafter has no limit of its own
EXPLORED_NODES = 128  # of the tree with which acceptance by rank is measured
BATCH = 16
TEMPERATURES = [0.5 * 1.1**i for i in range(20)]  # of the draft's confidence: 0.5 .. 3.06
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


def count_ranks(rounds: Sequence[TracedRound], seen: list[list[int]], hits: list[list[int]]) -> None:
    """Add the rounds' judged places: at each accepted node with children, which of them, by rank, is the token that followed."""
    for entry in rounds:
        for depth, node in enumerate(entry.path):
            children = entry.children(node)
            if not children or depth >= len(entry.emitted):
                break
            while len(seen) <= depth:
                seen.append([])
                hits.append([])
            for rank, child in enumerate(children):
                while len(seen[depth]) <= rank:
                    seen[depth].append(0)
                    hits[depth].append(0)
                seen[depth][rank] += 1
                hits[depth][rank] += entry.tokens[child] == entry.emitted[depth]


def shares(seen: Sequence[Sequence[int]], hits: Sequence[Sequence[int]]) -> list[list[float]]:
    """Acceptance by depth and rank; half a hit of one place is added to each, so that nothing is impossible."""
    return [[(h + 0.5) / (s + 1) for s, h in zip(row, own, strict=True)] for row, own in zip(seen, hits, strict=True)]


# Confidence


def confidence_temperatures(
    target: Target, proposer: Proposer, prompts: Sequence[Sequence[int]], new_tokens: int, stops: Sequence[int]
) -> list[float]:
    """By depth of a greedy chain: the temperature at which the draft's probabilities of the tokens that followed are likeliest.

    Above 1: the draft is too sure of itself. Empty for drafters that do not draft level by level.
    """
    if not isinstance(proposer, Grower) or not proposer.by_level or proposer.topk != 1:
        return []
    scores: list[Tensor] = []
    own = proposer._scores

    def recorded(*args: Any) -> Tensor:
        found = own(*args)
        scores.append(found[0, -1].float().cpu())
        return found

    setattr(proposer, "_scores", recorded)  # noqa: B010  # of this instance alone
    ids = proposer._draft_ids()
    place = {int(token): i for i, token in enumerate(ids.tolist())} if ids is not None else None
    judged: list[list[tuple[Tensor, int]]] = [[] for _ in range(proposer.max_depth)]
    try:
        for prompt in prompts:
            scores.clear()
            _, rounds = trace(target, proposer, prompt, SamplingParams(), new_tokens, eos_ids=stops)
            for number, entry in enumerate(rounds):
                levels = scores[number * proposer.max_depth : (number + 1) * proposer.max_depth]
                for depth, token in enumerate(entry.emitted[: len(levels)]):
                    column = token if place is None else place.get(token, -1)
                    if 0 <= column < len(levels[depth]):
                        judged[depth].append((levels[depth], column))
    finally:
        del proposer._scores
    return [round(_likeliest(pairs), 3) for pairs in judged if len(pairs) >= 8]


def _likeliest(pairs: Sequence[tuple[Tensor, int]]) -> float:
    logits_NV, columns_N = torch.stack([logits for logits, _ in pairs]), torch.tensor([column for _, column in pairs])
    return min(TEMPERATURES, key=lambda t: float(torch.nn.functional.cross_entropy(logits_NV / t, columns_N)))


# Tuning


@dataclass(frozen=True)
class Candidate:
    """A draft that was looked at: its settings, its measured (static: expected) tau, and the speed-up predicted from it."""

    kind: str
    decode: Decode
    tau: float
    predicted: float
    measured: Interval | None = None  # over plain decoding, decoded in turns
    over_default: Interval | None = None

    @property
    def shape(self) -> Shape:
        """Depth, draft nodes."""
        paths = self.decode.paths
        return (max(map(len, paths)), len(paths)) if paths else (self.decode.depth, self.decode.num_nodes)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """temperatures: those that decoding is tuned for, equally. most_nodes: of a tree. clock: time.process_time on a busy machine, with one thread."""

    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 64
    most_nodes: int = 63
    timed_prompts: int = 12
    seed: int = 0
    clock: Clock = time.perf_counter


class Tuner:
    """Measures on the development prompts."""

    def __init__(self, target: Target, drafter: Drafter, suite: Suite, settings: TuneSettings, progress: Progress = lambda _: None) -> None:
        assert target.tokenizer is not None
        self.target, self.drafter, self.suite, self.settings, self.progress = target, drafter, suite, settings, progress
        self.prompts = [render_prompt(target.tokenizer, messages) for messages in suite.prompts]
        self.stops = eos_ids(target.model)
        temperatures = settings.temperatures
        self.params = [SamplingParams(temperature=temperatures[i % len(temperatures)], seed=settings.seed + i) for i in range(len(self.prompts))]
        self.longest: int = getattr(drafter, "longest", None) or LONGEST_CHAIN
        self.default = decode_settings(drafter, None)

    def make(self, decode: Decode) -> Proposer:
        """Its proposer."""
        return make_proposer(self.drafter, decode, self.target, self.prompts[0])

    def rounds(self, decode: Decode) -> tuple[float, list[float]]:
        """(tau, conditional acceptance by position) over all development prompts, in batches: figures that no clock enters."""
        engine = Engine(self.target, self.make(decode))
        accepted: list[int] = []
        tokens = 0
        for start in range(0, len(self.prompts), BATCH):
            part = slice(start, start + BATCH)
            out = engine.generate(self.prompts[part], self.params[part], self.settings.max_new_tokens, eos_ids=self.stops)
            accepted += [entry.accepted for rounds in out.rounds for entry in rounds]
            tokens += sum(entry.emitted for rounds in out.rounds for entry in rounds)
        if not accepted:
            raise UserError("tune: wanted development prompts that are answered with more than one token, got none; raise --max-new-tokens")
        depth = engine.max_depth
        reached = [sum(count >= d for count in accepted) for d in range(depth + 1)]
        return tokens / len(accepted), [reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, depth + 1)]

    def condition(self) -> Condition:
        """This device's latencies, at the length of the prompt in the middle, from chains and trees of several shapes."""
        self.progress("latencies")
        middle = sorted(self.prompts, key=len)[len(self.prompts) // 2]
        chains = [(1, 1), (self.longest // 2 or 1,) * 2, (self.longest,) * 2]
        trees = [(min(3, self.longest), 7), (min(4, self.longest), 20), (min(3, self.longest), min(31, self.settings.most_nodes))]
        shapes = [*chains, *(shape for shape in trees if self.can_tree and shape[0] <= shape[1] <= self.most(shape[0]))]

        def make(shape: Shape) -> Proposer:
            tree = "chain" if shape[0] == shape[1] else "dynamic"
            return self.drafter.proposer(tree=tree, depth=shape[0], topk=4, nodes=shape[1])

        sizes = [n for n in BUCKETS if n <= max(8, 2 * self.settings.most_nodes)]
        found, _ = fit_and_test(self.target, make, list(dict.fromkeys(shapes)), [], middle, sizes=sizes, clock=self.settings.clock)
        return found

    @property
    def can_tree(self) -> bool:
        """Whether it drafts dynamic trees whose size can be chosen."""
        if self.longest < 2:
            return False
        try:
            tree, chain = (self.drafter.proposer(tree=kind, depth=2, topk=4, nodes=6) for kind in ("dynamic", "chain"))
        except UserError:
            return False
        return tree.num_nodes == 7 and chain.num_nodes == 3

    def most(self, depth: int) -> int:
        """Draft nodes of the largest tree of that depth, four children a node."""
        return min(self.settings.most_nodes, 4 + (depth - 1) * 16)

    def chain(self, costs: Condition) -> Candidate:
        """The best length: one run of the longest chain tells the acceptance of all shorter ones."""
        self.progress("chains")
        _, acceptance = self.rounds(Decode(tree="chain", depth=self.longest))
        length, predicted = costs.best_length(acceptance, self.longest)
        return Candidate("chain", Decode(tree="chain", depth=length), chain_tau(acceptance, length), predicted)

    def dynamic(self, costs: Condition) -> Candidate | None:
        """The best budget at a middling depth, then the best depth at that budget, then the best budget again."""
        if not self.can_tree:
            return None
        known: dict[Shape, float] = {}

        def look(depth: int, nodes: int) -> float:
            if (depth, nodes) not in known:
                self.progress(f"dynamic tree, depth {depth}, {nodes} nodes")
                known[depth, nodes] = self.rounds(Decode(tree="dynamic", depth=depth, topk=4, nodes=nodes))[0]
            return costs.speedup(known[depth, nodes], depth, nodes)

        def budgets(depth: int) -> list[int]:
            return sorted({n for n in (3, 5, 7, 10, 15, 23, 31, 47, 63) if depth <= n <= self.most(depth)} | {max(depth, min(7, self.most(depth)))})

        depth = min(4, self.longest)
        nodes = max(budgets(depth), key=lambda n: look(depth, n))
        depth = max((d for d in range(2, min(self.longest, 8) + 1) if d <= nodes <= self.most(d)), key=lambda d: look(d, nodes), default=depth)
        nodes = max((n for n in budgets(depth) if nodes / 2 <= n <= 2 * nodes), key=lambda n: look(depth, n), default=nodes)
        tau = known.get((depth, nodes)) or self.rounds(Decode(tree="dynamic", depth=depth, topk=4, nodes=nodes))[0]
        return Candidate("dynamic", Decode(tree="dynamic", depth=depth, topk=4, nodes=nodes), tau, costs.speedup(tau, depth, nodes))

    def acceptance(self) -> tuple[dict[str, list[list[float]]], list[list[float]]]:
        """({temperature: acceptance by depth and rank}, the same of all temperatures together), under the deployed rule."""
        paths = explored_paths(min(self.longest, 6))
        decode = Decode(tree="static", paths=paths)
        try:
            proposer = self.make(decode)
        except UserError:  # it cannot follow a static tree: what it drafts anyway is what can be judged
            proposer = self.make(Decode(tree="chain", depth=self.longest))
        seen: dict[float, tuple[list[list[int]], list[list[int]]]] = {t: ([], []) for t in self.settings.temperatures}
        for number, (prompt, params) in enumerate(zip(self.prompts, self.params, strict=True), 1):
            self.progress(f"acceptance by rank: {number} of {len(self.prompts)} prompts")
            _, rounds = trace(self.target, proposer, prompt, params, self.settings.max_new_tokens, eos_ids=self.stops)
            count_ranks(rounds, *seen[params.temperature])
        pooled = _pooled([table for table, _ in seen.values()]), _pooled([table for _, table in seen.values()])
        by_temperature = {f"{t:g}": _rounded(shares(*tables)) for t, tables in seen.items()}
        return by_temperature, shares(*pooled)

    def static(self, costs: Condition, acceptance: Sequence[Sequence[float]]) -> Candidate | None:
        """The static tree with the highest predicted speed-up: for every depth and every number of nodes, the best tree by the dynamic programme."""
        if not isinstance(self.make(Decode(tree="chain", depth=1)), Follower) or not self.can_tree:
            return None
        best: Candidate | None = None
        sizes = sorted({*costs.edges(self.settings.most_nodes), *range(2, min(16, self.settings.most_nodes) + 1)})
        for depth in range(1, len(acceptance) + 1):
            for nodes in sizes:
                paths, tokens = best_tree(acceptance[:depth], nodes)
                deep = max(map(len, paths))
                predicted = costs.speedup(tokens, deep, len(paths))
                if best is None or predicted > best.predicted:
                    decode = Decode(tree="static", depth=deep, paths=[list(path) for path in paths])
                    best = Candidate("static", decode, tokens, predicted)
        return best

    def race(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Decode some prompts by all of them and plainly, in turns; the first candidate is the default that the others are compared with."""
        engines = {c.kind: Engine(self.target, self.make(c.decode)) for c in candidates} | {"plain": Engine(self.target)}
        few = list(range(min(self.settings.timed_prompts, len(self.prompts))))
        tokens: dict[str, list[float]] = {kind: [] for kind in engines}
        seconds: dict[str, list[float]] = {kind: [] for kind in engines}
        for engine in engines.values():
            engine.generate([self.prompts[0]], self.params[0], 8, eos_ids=self.stops)
        order = list(engines)
        for i in few:
            self.progress(f"in turns: {i + 1} of {len(few)} prompts")
            for kind in order if i % 2 else order[::-1]:
                began = self.settings.clock()
                out = engines[kind].generate([self.prompts[i]], self.params[i], self.settings.max_new_tokens, eos_ids=self.stops)
                seconds[kind].append(self.settings.clock() - began)
                tokens[kind].append(float(len(out.tokens[0])))
        first = candidates[0].kind
        return [
            replace(
                c,
                measured=paired_ratio_interval(tokens[c.kind], seconds[c.kind], tokens["plain"], seconds["plain"]),
                over_default=paired_ratio_interval(tokens[c.kind], seconds[c.kind], tokens[first], seconds[first]),
            )
            for c in candidates
        ]


def _pooled(tables: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Sums of ragged tables."""
    out: list[list[int]] = []
    for table in tables:
        for depth, row in enumerate(table):
            out += [[] for _ in range(depth + 1 - len(out))]
            out[depth] += [0] * (len(row) - len(out[depth]))
            for rank, value in enumerate(row):
                out[depth][rank] += value
    return out


def _rounded(table: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(p, 4) for p in row] for row in table]


def choose(raced: Sequence[Candidate]) -> Candidate:
    """The fastest of those that beat the default, the first, by more than the noise; else the default."""
    better = [c for c in raced[1:] if c.over_default is not None and c.over_default.lo > 1]
    return max(better, key=lambda c: c.over_default.value if c.over_default else 0.0, default=raced[0])


def tune(
    target: Target, drafter: Drafter, suite: Suite, settings: TuneSettings, progress: Progress = lambda _: None
) -> tuple[Tuning, list[Candidate], Candidate]:
    """(what goes into the drafter's folder, all candidates with their measurements, the chosen one)."""
    tuner = Tuner(target, drafter, suite, settings, progress)
    costs = tuner.condition()
    chain = tuner.chain(costs)
    acceptance, pooled = tuner.acceptance()
    default_tau, _ = tuner.rounds(tuner.default)
    depth = tuner.default.depth
    default = Candidate("default", tuner.default, default_tau, costs.speedup(default_tau, depth, tuner.default.num_nodes))
    found = [default, chain, tuner.dynamic(costs), tuner.static(costs, pooled)]
    distinct: list[Candidate] = []
    for candidate in found:
        if candidate is not None and all(candidate.decode != known.decode for known in distinct):
            distinct.append(candidate)
    raced = tuner.race(distinct)
    chosen = choose(raced)
    progress("confidence")
    calibrated = tuner.make(Decode(tree="chain", depth=min(tuner.longest, 6)))
    few = tuner.prompts[: min(8, len(tuner.prompts))]
    temperatures = confidence_temperatures(target, calibrated, few, settings.max_new_tokens, tuner.stops)
    tuning = Tuning(
        device=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        target=target.fingerprint(),
        decode={k: v for k, v in asdict(chosen.decode).items() if v is not None},
        num_speculative_tokens=chain.decode.depth,
        acceptance=acceptance,
        confidence={"temperatures": temperatures},
        measured={"chosen": chosen.kind, "candidates": [_described(c) for c in raced]},
        costs=CostModel((costs,)).to_json(),
        prompts={"suite": suite.name, "split": "dev", "count": len(suite.prompts), "sha256": suite.digest},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return tuning, raced, chosen


def _described(c: Candidate) -> dict[str, Any]:
    depth, nodes = c.shape
    return {
        "kind": c.kind,
        "depth": depth,
        "nodes": nodes,
        "tau": round(c.tau, 4),
        "predicted": round(c.predicted, 4),
        "measured": [round(x, 4) for x in c.measured] if c.measured else None,
        "over_default": [round(x, 4) for x in c.over_default] if c.over_default else None,
    }
