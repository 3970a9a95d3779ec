"""From settings to a proposer: chains, trees, and policies whose decisions rest on latencies that are measured here, on this machine."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from .. import UserError
from ..decode.calibration import Temperatures
from ..decode.engine import Engine
from ..decode.growth import Grower
from ..decode.length import Acceptance, Additive, Confidence, CostAware, DraftLength, Entropy, Expected, Latencies, Predicted
from ..decode.proposer import Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..decode.trees import Follower, StaticTree
from ..decode.verify import RULES
from ..heads.dspark import DSparkProposer
from ..heads.registry import Drafter
from ..heads.tuning import Tuning
from ..recipes.schema import Decode
from .latency import BUCKETS, verify_latencies

LEAST_CONFIDENCE = 0.3  # of a chain to its end, below which DSpark's ends; that of `Confidence`


def make_proposer(drafter: Drafter, decode: Decode, target: Target, prompt: Sequence[int], rule: str = "shared_noise") -> Proposer:
    """The proposer that the settings ask for, of drafts that the verification rule is valid for.

    prompt: token ids after which latencies are measured, if a policy needs them. Raises UserError for settings that the drafter cannot follow: see
    `check_proposer`; and for a length that is to be predicted by a drafter without a predictor.
    """
    proposer = check_proposer(drafter, decode, rule)
    if not isinstance(proposer, Grower) or (decode.tree != "cost_aware" and decode.length is None):
        return proposer
    if isinstance(proposer, DSparkProposer) and decode.length == "confidence":
        proposer.min_confidence = LEAST_CONFIDENCE if decode.threshold is None else decode.threshold
    elif isinstance(proposer, DSparkProposer) and decode.length == "expected":
        proposer.expected = Expected(measure(target, proposer, prompt))
    elif decode.tree == "cost_aware":
        proposer.cost = CostAware(measure(target, proposer, prompt), sizes=BUCKETS[1:])
    else:
        if decode.length == "predicted" and getattr(proposer, "predictor", None) is None:
            raise UserError(f"decode.length: wanted another rule, as this {drafter.method} drafter has no predictor, got predicted; train one first")
        proposer.length = _policy(decode, target, proposer, prompt)
    return proposer


def check_proposer(drafter: Drafter, decode: Decode, rule: str = "shared_noise") -> Proposer:
    """The proposer without what is decided by measurements, so that nothing is measured for it.

    Raises UserError for settings that the drafter cannot follow, such as a policy where drafts do not grow level by level, or a rule for drawn drafts
    where they are chosen.
    """
    proposer: Any = _shaped(drafter, decode, rule)
    if decode.greedy_temperatures is not None or decode.sampled_temperatures is not None:
        if not hasattr(proposer, "temperatures"):
            name = "decode.greedy_temperatures" if decode.greedy_temperatures is not None else "decode.sampled_temperatures"
            raise UserError(f"{name}: wanted null, as {drafter.method} ranks its drafts by no probabilities, got temperatures")
        proposer.temperatures = Temperatures(tuple(decode.greedy_temperatures or ()), tuple(decode.sampled_temperatures or ()))
    made: Proposer = proposer
    return made


def _shaped(drafter: Drafter, decode: Decode, rule: str) -> Proposer:
    if decode.paths is not None:
        return _static(drafter, decode.paths)
    kinds = RULES[rule].kinds
    tree = "dynamic" if decode.tree == "cost_aware" else decode.tree
    settings: dict[str, Any] = {"tree": tree, "depth": decode.depth, "topk": decode.topk, "nodes": decode.num_nodes}
    if "deterministic" not in kinds:
        kind = "iid" if kinds == ("chain",) or "iid" in kinds else "without_replacement"
        if "kind" not in inspect.signature(drafter.proposer).parameters:
            valid = ", ".join(name for name, known in RULES.items() if "deterministic" in known.kinds)
            raise UserError(f"eval.rule: wanted one of {valid}, as {drafter.method} does not draw its drafts, got {rule}")
        drawing: Any = drafter
        drawn: Proposer = drawing.proposer(**settings, kind=kind)
        return drawn
    proposer = drafter.proposer(**settings)
    if decode.tree != "cost_aware" and decode.length is None:
        return proposer
    name = "decode.tree: wanted chain or dynamic" if decode.tree == "cost_aware" else "decode.length: wanted null"
    if not isinstance(proposer, Grower):
        raise UserError(f"{name}, as {drafter.method} does not draft level by level, got {decode.length or decode.tree}")
    if decode.length == "expected" and not isinstance(proposer, DSparkProposer):
        raise UserError(f"decode.length: wanted a drafter with a confidence head (dspark) for expected, got {drafter.method}; use acceptance")
    return proposer


def _static(drafter: Drafter, paths: Sequence[Sequence[int]]) -> Proposer:
    shape = StaticTree.from_paths(paths)
    branching = max(2, shape.width, shape.topk)
    # Room for the widest dynamic tree of that depth, in whose place the static one comes.
    nodes = min(max(shape.num_nodes - 1, shape.max_depth), branching + (shape.max_depth - 1) * branching**2)
    proposer = drafter.proposer(tree="dynamic", depth=shape.max_depth, topk=branching, nodes=nodes)
    if not isinstance(proposer, Follower):
        raise UserError(f"decode.tree: wanted chain or dynamic, as {drafter.method} cannot follow a static tree, got static")
    proposer.follow(shape)
    return proposer


def default_depth(drafter: Drafter, most: int = 5) -> int:
    """Draft tokens in a row where nobody says how many: `most`, or as many as the drafter can."""
    longest: int | None = getattr(drafter, "longest", None)
    return most if longest is None else min(most, longest)


def decode_settings(
    drafter: Drafter,
    tuning: Tuning | None,
    *,
    tree: str | None = None,
    depth: int | None = None,
    topk: int | None = None,
    nodes: int | None = None,
    length: str | None = None,
    threshold: float | None = None,
    device: str | None = None,
) -> Decode:
    """What was asked for; what the drafter was tuned to if nothing was; else a chain. Raises UserError for settings that do not fit each other.

    A tuning's temperatures, which are the drafter's and no machine's, hold for drafts of any shape. device: this machine's; a tuning of another
    one is used, and that is told on stderr.
    """
    asked = (tree, depth, topk, nodes, length, threshold)
    if tuning is not None and all(value is None for value in asked):
        if device is not None and device != tuning.device:
            print(f"note: the draft is as tuned on {tuning.device}, not for this {device}; draftsmith tune does that", file=sys.stderr)
        try:
            return Decode(**tuning.decode)
        except TypeError as error:
            raise UserError(f"tuning.json: wanted the keys of a recipe's section decode, got others ({error}); tune again, or delete it") from error
    tree = tree or "chain"
    depth = default_depth(drafter) if depth is None else depth
    shape: dict[str, Any] = {"tree": tree, "depth": depth, "topk": topk or 4, "nodes": None if tree == "chain" else nodes}
    return Decode(**shape, length=length, threshold=threshold, **temperatures_of(tuning))  # type: ignore[arg-type]


def temperatures_of(tuning: Tuning | None) -> dict[str, list[float] | None]:
    """The keys of a recipe's section `decode` for what was found of the draft's confidence."""
    found = {} if tuning is None else tuning.confidence
    return {f"{kind}_temperatures": found.get(kind) or None for kind in ("greedy", "sampled")}


def for_any(decode: Decode) -> Decode:
    """For other drafters than the one that these settings are of."""
    return dataclasses.replace(plain(decode), greedy_temperatures=None, sampled_temperatures=None)


def plain(decode: Decode) -> Decode:
    """Without what not every drafter can follow: policies that look at how drafts grow, and static trees."""
    if decode.paths is not None:
        depth = max(map(len, decode.paths))
        return dataclasses.replace(decode, tree="dynamic", paths=None, length=None, threshold=None, depth=depth, nodes=max(depth, len(decode.paths)))
    return dataclasses.replace(decode, tree="dynamic" if decode.tree == "cost_aware" else decode.tree, length=None, threshold=None)


def _policy(decode: Decode, target: Target, proposer: Grower, prompt: Sequence[int]) -> DraftLength:
    if decode.length == "acceptance":
        return Acceptance(measure(target, proposer, prompt))
    if decode.length == "additive":
        return Additive()
    made = {"confidence": Confidence, "entropy": Entropy, "predicted": Predicted}[str(decode.length)]
    return made() if decode.threshold is None else made(decode.threshold)


def measure(target: Target, proposer: Proposer, prompt: Sequence[int], *, repeats: int = 8, new_tokens: int = 32) -> Latencies:
    """What a level of drafting and verifications of several sizes take after this prompt, in milliseconds, batch 1. Short: about half a second of
    a small model's decoding."""
    engine = Engine(target, proposer)
    engine.generate([prompt], SamplingParams(), min(8, new_tokens))  # warm-up
    out = engine.generate([prompt], SamplingParams(), new_tokens)
    level = 1e3 * out.times.draft / max(1, len(out.rounds[0])) / proposer.max_depth
    verify = verify_latencies(target, prompt, repeats)
    return Latencies(level=level, verify=tuple(verify.items()))
