"""Latencies as the cost model wants them: verifications of several sizes, plain steps, and whole rounds of several shapes of draft.

They do not depend on what is accepted: a round costs what it costs. All in milliseconds. `clock` may be time.process_time on a machine that is busy
with other work: with one thread, CPU time is what the wall clock would show on a quiet one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from ..decode.engine import Engine
from ..decode.proposer import Extent, Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree
from .cost_model import Condition, fit

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # tokens of one verification that are measured, and that cost-aware trees come in
Clock = Callable[[], float]
Shape = tuple[int, int]  # depth, draft nodes
Name = TypeVar("Name", bound=Hashable)


@torch.no_grad()
def verify_latencies(
    target: Target,
    prompt: Sequence[int],
    repeats: int,
    *,
    sizes: Sequence[int] = BUCKETS,
    batch: int = 1,
    quantile: float = 0.5,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """{tokens a row: ms} of one verification forward with logits after `prompt`; the sizes take turns, so that drift hits all alike.

    quantile: the median, or a lower one, as what disturbs a measurement only adds to it.
    """
    length = torch.tensor([len(prompt)] * batch, device=target.device)
    target.set_taps(())
    target.allocate(batch, len(prompt) + max(sizes) + 1)
    target.prefill(torch.tensor([list(prompt)] * batch, device=target.device), length)
    trees = {n: DraftTree.chain(torch.full((batch, n), 7, device=target.device)) for n in sizes}
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for repeat in range(repeats + 2):
        for n, tree in trees.items():
            _synchronise(target)
            began = clock()
            target.logits(target.verify(tree, length, Extent(len(prompt), True)).hidden_BNH)
            _synchronise(target)
            if repeat >= 2:  # warm-up
                times[n].append(clock() - began)
    return {n: 1e3 * float(np.quantile(t, quantile)) for n, t in times.items()}


def _synchronise(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def round_latencies(
    target: Target,
    proposers: Mapping[Name, Proposer | None],
    prompt: Sequence[int],
    *,
    batch: int = 1,
    repeats: int = 3,
    new_tokens: int = 24,
    temperature: float = 0.0,
    quantile: float = 0.5,
    clock: Clock = time.perf_counter,
) -> dict[Name, float]:
    """{name: ms of a round}; a proposer of None decodes plainly. They take turns. The prefill is measured apart and left out. quantile: as above.

    A request's rounds are over when its last row's are: what rows that finish earlier cost, and save, is in the figure as it is in reality.
    """
    prompts = [list(prompt)] * batch
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(batch)]
    engines = {name: Engine(target, proposer) for name, proposer in proposers.items()}
    found: dict[Name, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            _synchronise(target)
            began = clock()
            engine.generate(prompts, params, 1)
            _synchronise(target)
            middle = clock()
            out = engine.generate(prompts, params, new_tokens)
            _synchronise(target)
            spent = (clock() - middle) - (middle - began)
            if repeat:  # warm-up
                found[name].append(1e3 * spent / max(len(rounds) for rounds in out.rounds))
    return {name: float(np.quantile(values, quantile)) for name, values in found.items()}


def fit_and_test(
    target: Target,
    make: Callable[[Shape], Proposer],
    fitted: Sequence[Shape],
    held: Sequence[Shape],
    prompt: Sequence[int],
    *,
    batch: int = 1,
    sizes: Sequence[int] = BUCKETS,
    repeats: int = 5,
    new_tokens: int = 24,
    clock: Clock = time.perf_counter,
) -> tuple[Condition, dict[Shape, float]]:
    """(condition of this batch and of `prompt`'s length, fitted to drafts of the shapes `fitted`; measured ms of all shapes' rounds).

    The shapes `held` are measured in the same turns and not fitted: what is predicted of them is a test.
    """
    verify = verify_latencies(target, prompt, repeats, sizes=sizes, batch=batch, clock=clock)
    proposers: dict[Shape, Proposer | None] = {(0, 0): None, **{shape: make(shape) for shape in dict.fromkeys([*fitted, *held])}}
    rounds = round_latencies(target, proposers, prompt, batch=batch, repeats=max(2, repeats // 2), new_tokens=new_tokens, clock=clock)
    t_ar = rounds.pop((0, 0))
    context = len(prompt) + new_tokens / 2
    known = [(*shape, rounds[shape]) for shape in dict.fromkeys(fitted)]
    return fit(batch=batch, context=context, t_ar=t_ar, verify=verify.items(), rounds=known), rounds


def shapes_around(
    depth: int, nodes: int, *, longest: int | None, most_nodes: Callable[[int], int], chain: bool, hold_out: bool = False
) -> list[Shape]:
    """Shapes to fit a model of this one by: shallower and smaller, deeper and larger, all of which the drafter can draft.

    most_nodes(depth): the largest tree of that depth. hold_out: without the shape itself, so that predicting it is a test.
    """
    deepest = min(depth + 2, longest) if longest is not None else depth + 2
    if chain:
        wanted = [(d, d) for d in (1, max(1, depth // 2), max(1, depth - 1), deepest)]
    else:
        wanted = [(d, n) for d in {max(1, depth // 2), depth, deepest} for n in (max(d, nodes // 2), min(2 * nodes + 1, most_nodes(d)))]
    allowed = [(d, n) for d, n in wanted if d <= n <= most_nodes(d) and not (hold_out and (d, n) == (depth, nodes))]
    return sorted(set(allowed)) or [(depth, nodes)]
