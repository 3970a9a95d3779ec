"""The evaluation, for the command and after a training alike: drafter, target and settings in, report out.

    report, drafter, contract = evaluate_drafter(target, "runs/quickstart/drafter", Decode(depth=4), Eval(num_prompts=16))

It is the one path to a report: what is measured does not depend on who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import UserError
from ..decode.prompts import render_prompt
from ..decode.proposer import DeviceProposer, Proposer
from ..decode.target import Target
from ..decode.verify import rule_for
from ..heads.registry import Drafter, open_drafter, open_others, tunes_target
from ..heads.standalone import Standalone
from ..heads.tuning import Tuning
from ..recipes.schema import Decode, Eval
from .cost_model import LONGEST, Condition, CostModel, explain, fit
from .drafting import for_any, make_proposer, plain
from .drift import measure_drift, original_outputs
from .harness import Measured, Progress, build_report, evaluate
from .latency import BUCKETS, Shape, fit_and_test, shapes_around, verify_latencies
from .machine import choose_threads
from .memory import MIB, drafter_bytes
from .runs import Settings
from .schema import CostReport, Drift, Limits, Prediction, Report, Row
from .suites import Suite, load_suite

FLOOR = "prompt_lookup"
COST_TOKENS = 16  # new tokens of the rounds that the cost model is fitted to


def settings_of(part: Eval) -> Settings:
    """The harness's settings of a recipe's section `eval`. Raises UserError for a rule that does not exist, or that cannot be used at T > 0."""
    rule_for(part.rule, "deterministic" if part.rule in ("shared_noise", "greedy") else "chain")
    if part.rule == "greedy" and (any(part.temperatures) or part.default_sampling):
        raise UserError(f"eval.temperatures: wanted [0] with the rule greedy, got {part.temperatures}; choose another rule")
    return Settings(
        temperatures=part.temperatures,
        max_new_tokens=part.max_new_tokens,
        eager=part.eager,
        timed_prompts=part.timed_prompts,
        gate_batch=part.gate_batch,
        batches=part.batch,
        rule=part.rule,
        default_sampling=part.default_sampling,
        threads=part.threads,
        bootstrap=part.bootstrap,
        seed=part.seed,
    )


def evaluate_drafter(
    target: Target,
    name: str | Path,
    decode: Decode | Callable[[Drafter], Decode],
    part: Eval,
    *,
    cross_tokenizer: bool = False,
    opened: Callable[[dict[str, Any]], None] = lambda _: None,
    training: dict[str, Any] | None = None,
    target_seconds: float | None = None,
    tuned: Tuning | None = None,
    progress: Progress = lambda *_: None,
) -> tuple[Report, Drafter, dict[str, Any]]:
    """Open a drafter (whatever `open_drafter` takes) and measure it: (report, drafter, contract).

    decode: the settings, or what makes them once the drafter is known. opened(contract): called before prompts are
    rendered. target_seconds: how long the target took to load, if that is known.
    The original of a target that was tuned with the drafter answers the prompts before the drafter's adapter is merged. Raises UserError as
    `run_evaluation` does.
    """
    settings_of(part)  # what is wrong with them is found out before anything is loaded
    suite = load_suite(part.suite, part.num_prompts, split="test", prompt_chars=part.prompt_chars, seed=part.seed)
    original = original_outputs(target, suite, part.max_new_tokens) if tunes_target(name) else None
    began = time.perf_counter()
    drafter, contract = open_drafter(name, target, cross_tokenizer=cross_tokenizer)
    seconds = {"drafter": time.perf_counter() - began} | ({} if target_seconds is None else {"target": target_seconds})
    opened(contract)
    others = open_others(part.others, target, cross_tokenizer=cross_tokenizer)
    drift = None if original is None else measure_drift(target, original)
    used = decode(drafter) if callable(decode) else decode
    about: dict[str, Any] = {"training": training, "drift": drift, "load_seconds": seconds, "tuned": tuned, "suite": suite, "progress": progress}
    return run_evaluation(target, drafter, contract, used, part, others=others, **about), drafter, contract


def run_evaluation(
    target: Target,
    drafter: Drafter,
    contract: Mapping[str, Any],
    decode: Decode,
    part: Eval,
    *,
    others: Mapping[str, Drafter] | None = None,
    training: dict[str, Any] | None = None,
    drift: Drift | None = None,
    load_seconds: Mapping[str, float] | None = None,
    tuned: Tuning | None = None,
    suite: Suite | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Measure a drafter as the settings say: gate, baselines, other drafters (part.others, and the floor), cost model.

    others: drafters of part.others that are open already. training, drift, load_seconds: for the report. tuned: the tuning that the decode
    settings are. suite: the prompts, if they are loaded already. Raises UserError for settings that do not fit the drafter, before anything is
    measured.
    """
    settings = settings_of(part)
    suite = suite or load_suite(part.suite, part.num_prompts, split="test", prompt_chars=part.prompt_chars, seed=part.seed)
    assert target.tokenizer is not None
    prompt = render_prompt(target.tokenizer, suite.prompts[0])
    beside = _beside(target, drafter, part, others or {})
    # A draft that it cannot make is found out before anything is measured.
    make_proposer(drafter, plain(decode), target, prompt, settings.rule)
    threads = choose_threads(target, prompt, settings.threads)
    proposer = make_proposer(drafter, decode, target, prompt, settings.rule)
    measured = evaluate(
        target,
        proposer,
        suite,
        settings,
        progress,
        {name: make_proposer(other, for_any(decode), target, prompt) for name, other in beside.items()},
        assistant=drafter.draft.model if part.assisted and type(drafter) is Standalone else None,
        weights=drafter_bytes(drafter, target) / MIB,
        load_seconds=load_seconds,
    )
    costs = None
    if part.costs:
        progress("cost model", 0, 1)
        prompts = [render_prompt(target.tokenizer, messages) for messages in suite.prompts]
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        costs = _explain_rows(target, drafter, decode, proposer, measured, middle, settings)
    description = {
        "method": drafter.method,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "tree": decode.tree,
        "depth": proposer.max_depth,
        "nodes": proposer.num_nodes - 1,
        **({"topk": decode.topk} if decode.tree in ("dynamic", "cost_aware") else {}),
        **({"paths": decode.paths} if decode.paths is not None else {}),
        **({"length": decode.length} if decode.length is not None else {}),
        **{name: found for name in ("greedy_temperatures", "sampled_temperatures") if (found := getattr(decode, name)) is not None},
        **({"tuned_on": tuned.device, "choice": list(tuned.measured.get("words", []))} if tuned is not None else {}),
        "contract": dict(contract),
    }
    return build_report(target, description, suite, settings, measured, training, threads, drift, costs)


def _beside(target: Target, drafter: Drafter, part: Eval, known: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """The other drafters by name."""
    floor = [FLOOR] if part.floor and drafter.method != FLOOR else []
    return open_others([name for name in floor if name not in known], target) | (dict(known) or open_others(part.others, target))


def conditions(
    target: Target, drafter: Drafter, decode: Decode, proposer: Proposer, batches: Sequence[int], prompt: Sequence[int]
) -> tuple[CostModel, list[Prediction]] | None:
    """The cost model around this draft's shape, and its predictions beside measurements. None for drafts whose size changes from round to round.

    The shape itself is measured and not fitted, so that its error is a test, unless nothing else can be drafted.
    """
    if not isinstance(proposer, DeviceProposer) or decode.tree == "cost_aware" or decode.length is not None:
        return None
    depth, nodes = proposer.max_depth, proposer.num_nodes - 1
    chain = decode.tree == "chain"
    topk = max(decode.topk, 2)

    def make(shape: Shape) -> Proposer:
        if shape == (depth, nodes):
            return make_proposer(drafter, decode, target, prompt)
        return drafter.proposer(tree="chain" if chain else "dynamic", depth=shape[0], topk=topk, nodes=shape[1])

    def most(deep: int) -> int:
        return deep if chain else topk + (deep - 1) * topk * topk

    shapes = shapes_around(depth, nodes, longest=getattr(drafter, "longest", None), most_nodes=most, chain=chain, hold_out=True)
    sizes = [n for n in BUCKETS if n <= 2 * max(2, *(size + 1 for _, size in shapes), nodes + 1)]
    fitted, points = [], []
    for batch in sorted({1, *batches}):
        found, rounds = fit_and_test(
            target, make, shapes, [(depth, nodes)], prompt, batch=batch, sizes=sizes, repeats=3 if batch > 1 else 5, new_tokens=COST_TOKENS
        )
        fitted.append(found)
        for (deep, size), ms in rounds.items():
            known = (deep, size) in shapes
            about = {"batch": batch, "context": round(found.context), "depth": deep, "nodes": size, "fitted": known}
            points.append(Prediction(predicted_ms=found.round(deep, size), measured_ms=ms, **about))  # type: ignore[arg-type]
    return CostModel(tuple(fitted)), points


def _of_row(target: Target, row: Row, prompt: Sequence[int], proposed: float) -> Condition:
    """For drafts without a fixed shape: the row's own round, so that only verification can be extrapolated."""
    cost = row.cost
    depth = max(1, len(row.conditional_acceptance))
    rest = cost.t_draft_ms + cost.t_verify_ms + (cost.overhead_ms or 0.0)
    verify = verify_latencies(target, prompt, 5, batch=row.batch)
    return fit(batch=row.batch, context=len(prompt), t_ar=cost.t_ar_ms, verify=verify.items(), rounds=[(depth, proposed, rest)])


def _explain_rows(
    target: Target, drafter: Drafter, decode: Decode, proposer: Proposer, measured: Measured, prompt: Sequence[int], settings: Settings
) -> CostReport:
    """Fit, and put what follows into the rows over all categories: `measured.rows` is changed in place."""
    made = conditions(target, drafter, decode, proposer, settings.batches, prompt)
    rows = measured.rows
    model, points = made if made is not None else (None, [])
    alone: list[Condition] = []
    words: list[str] = []
    depth, longest = proposer.max_depth, getattr(drafter, "longest", None)
    for index, row in enumerate(rows):
        if row.category != "all":
            continue
        drafted = sum(i * n for i, n in enumerate(row.accepted_length_histogram))
        proposed = drafted / row.acceptance_rate / row.rounds if row.acceptance_rate else 0.0
        nodes = proposer.num_nodes - 1 if model is not None else proposed
        if model is None:
            alone.append(_of_row(target, row, prompt, proposed))
        at = model.at(row.batch) if model is not None else alone[-1]
        chain = decode.tree == "chain"
        most = min(LONGEST, longest or max(2 * depth, 8))
        best = at.best_length(row.conditional_acceptance, most) if chain and row.conditional_acceptance else None
        predicted = at.speedup(row.tau, depth, nodes)
        limits = Limits(
            depth=depth,
            nodes=nodes,
            predicted=predicted,
            error=predicted / row.speedup.engine - 1,
            ceiling=at.ceiling(depth, nodes),
            break_even_tau=at.break_even_tau(depth, nodes),
            break_even_acceptance=at.needed_anywhere(most) if chain else None,
            best_length=best[0] if best else None,
            best_length_speedup=best[1] if best else None,
            fitted=model is None,
        )
        rows[index] = replace(row, limits=limits)
        if row.temperature == min(r.temperature for r in rows):
            words += explain(
                at, tau=row.tau, depth=depth, nodes=round(nodes), acceptance=row.conditional_acceptance if chain else [], longest=longest, chain=chain
            )
    found = model if model is not None else CostModel(tuple(alone))
    return CostReport(conditions=found.to_json(), predictions=points, words=words)
