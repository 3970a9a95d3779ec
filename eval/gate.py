"""The losslessness gate: tokens against plain decoding's, ties told from errors by a bound measured in the same run; and the audit of counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..decode.engine import Generation
from ..decode.proposer import Extent
from ..decode.sampling import Sampler, SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree
from ..decode.verify import RULES
from .distribution import places, uniformity
from .runs import RULE, Item
from .schema import Lossless, Tie

TIE_FACTOR = 4.0  # a tie is a gap below this many times the largest difference seen between the N-token and the 1-token kernels
TIES_PER_TOKEN = 1e-4  # more than one tie in 10^4 tokens fails the gate


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


def gate_of(
    target: Target,
    items: Sequence[Item],
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
        bound = kernel_bound(target, [*items[index].ids, *want], nodes) if bound is None else bound
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
    target: Target, items: Sequence[Item], spec: list[list[int]], params: Sequence[SamplingParams], kind: str, reasons: Sequence[str]
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
