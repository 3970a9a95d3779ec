"""What a drafter offers at every position of texts that are known, and so what any shape of draft would have gained there, without decoding it.

    texts = plain_texts(target, prompts, params, 64, stops)
    offers = survey(target, proposer, prompts, params, texts)      # one draft a position; the target only walks along the text
    rounds_of(texts[0], [offer.kept(depth=4, nodes=10) for offer in offers[0]])

A proposer's draft depends on the tokens before it and on nothing that was drafted earlier, and with shared noise every draft leads to the same text.
So what decoding with a draft does is found by jumping: from a position to the one after the last token that would have been accepted there. A chain
and its beginnings, and the dynamic trees of all sizes and depths, are parts of the largest one: one pass over the text tells of all of them, exactly.
Text that ends in the middle of a draft is counted as the engine counts it.

Dims: B batch, N nodes (root included), K nodes a level, V draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..decode.calibration import Temperatures
from ..decode.engine import Engine
from ..decode.proposer import Proposer
from ..decode.sampling import Sampler, SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree

GRID = tuple(0.15 * 1.2**i for i in range(16))  # temperatures of a draft's confidence that are compared: 0.15 .. 2.3
LEAST = 24  # places behind a temperature of a depth of its own


@dataclass(frozen=True)
class Offer:
    """What was drafted at one position, as far as it was right. left: tokens of the text that follow the position.

    ranks[i]: the rank among its siblings of the node that is the text's (i + 1)-th next token, given those before it. needed[i][j]: how many nodes a
    dynamic tree of depth i + 1 + j must have to hold it (empty for drafts that were not chosen by a value).
    """

    left: int
    ranks: tuple[int, ...]
    needed: tuple[tuple[int, ...], ...] = ()

    def prefix(self, depth: int) -> int:
        """Tokens accepted of a chain that is as deep: of the first `depth` of the right ones, if each is its parent's best candidate."""
        right = 0
        while right < min(depth, len(self.ranks)) and self.ranks[right] == 0:
            right += 1
        return right

    def kept(self, depth: int, nodes: int) -> int:
        """Tokens accepted of a dynamic tree of this depth and size."""
        right = 0
        while right < min(depth, len(self.needed)) and self.needed[right][depth - 1 - right] <= nodes:
            right += 1
        return right

    def within(self, paths: frozenset[tuple[int, ...]]) -> int:
        """Tokens accepted of a static tree of these paths."""
        right = 0
        while right < len(self.ranks) and self.ranks[: right + 1] in paths:
            right += 1
        return right


def rounds_of(length: int, accepted: Sequence[int]) -> int:
    """Rounds that a text of so many new tokens takes (its first is the prefill's), where a draft at position i has accepted[i] right tokens."""
    at = rounds = 0
    while at < length - 1:
        at += accepted[at] + 1
        rounds += 1
    return rounds


def plain_texts(
    target: Target, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], new_tokens: int, stops: Sequence[int], batch: int = 32
) -> list[list[int]]:
    """What plain decoding answers, and so every draft."""
    engine, texts = Engine(target), list[list[int]]()
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        texts += engine.generate(prompts[part], params[part], new_tokens, eos_ids=stops).tokens
    return texts


def survey(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    texts: Sequence[Sequence[int]],
    *,
    batch: int = 32,
    note: Callable[[int], None] = lambda _: None,
) -> list[list[Offer]]:
    """The offers at each position of each text but the last. note(rows done) is called after every batch."""
    offers: list[list[Offer]] = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        found: list[list[Offer]] = [[] for _ in texts[part]]

        def take(position: int, tree: DraftTree, found: list[list[Offer]] = found, part: slice = part) -> None:
            for row, text in enumerate(texts[part]):
                if position < len(text) - 1:
                    found[row].append(_offer(tree, row, text[position + 1 :]))

        _walk(target, proposer, prompts[part], params[part], texts[part], take)
        offers += found
        note(len(offers))
    return offers


def _walk(
    target: Target,
    proposer: Any,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    texts: Sequence[Sequence[int]],
    take: Callable[[int, DraftTree], None],
) -> None:
    """Let the target write the texts token by token, and the proposer draft at every position: take(position, draft)."""
    own, position = proposer.propose, 0

    def propose(root_B: Tensor, *args: Any) -> DraftTree:
        nonlocal position
        take(position, _on_host(own(root_B, *args)))
        position += 1
        return DraftTree.root_only(root_B)

    proposer.propose = propose
    try:
        Engine(target, proposer, overlap=False).generate(prompts, params, max(map(len, texts)))
    finally:
        del proposer.propose  # the class's own shows again


def _on_host(tree: DraftTree) -> DraftTree:
    """The parts that are read here."""
    for name in ("tokens_BN", "parents_BN", "depth_BN", "valid_BN", "values_BN"):
        value = getattr(tree, name)
        setattr(tree, name, None if value is None else value.cpu())
    return tree


def _offer(tree: DraftTree, row: int, truth: Sequence[int]) -> Offer:
    tokens, parents = tree.tokens_BN[row], tree.parents_BN[row]
    real_N = torch.ones_like(tokens, dtype=torch.bool) if tree.valid_BN is None else tree.valid_BN[row].clone()
    real_N[0] = False
    at, ranks, path = 0, [], []
    for token in truth[: tree.max_depth]:
        children = (real_N & (parents == at)).nonzero().flatten()
        if tree.values_BN is not None and len(children):
            children = children[tree.values_BN[row][children].sort(descending=True, stable=True).indices]
        right = (tokens[children] == token).nonzero().flatten()
        if not len(right):
            break
        ranks.append(int(right[0]))
        at = int(children[right[0]])
        path.append(at)
    needed = () if tree.values_BN is None else _needed(tree.values_BN[row, 1:], tree.depth_BN[row, 1:], path, tree.max_depth)
    return Offer(len(truth), tuple(ranks), needed)


def _needed(values_C: Tensor, depth_C: Tensor, path: Sequence[int], deepest: int) -> tuple[tuple[int, ...], ...]:
    """Of each node of the path: its place in the order of values among the candidates of depth 1 .. d, from its own d to the deepest."""
    found = []
    for depth, node in enumerate(path, 1):
        index = node - 1
        before_C = values_C > values_C[index]
        before_C[:index] |= values_C[:index] == values_C[index]
        counts = torch.bincount(depth_C[before_C], minlength=deepest + 1).cumsum(0)
        found.append(tuple(1 + int(n) for n in counts[depth : deepest + 1]))
    return tuple(found)


# Confidence


@dataclass(frozen=True)
class _Listening(Temperatures):
    """Temperatures of 1 that listen: the losses, under each temperature of GRID, of the text's tokens in every distribution of a draft.

    truth[level]: [B] of the text's tokens there, as places in the draft vocabulary, -1 where there is none. losses[level]: [B, K, grid].
    """

    truth: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def log_p(self, scores: Tensor, sampler: Sampler, level: int) -> Tensor:
        """As it is; a level's losses are kept."""
        if level < len(self.truth):
            scores_BKV = scores.unsqueeze(1) if scores.ndim == 2 else scores
            place_BK1 = self.truth[level].clamp(min=0).view(-1, 1, 1).expand(-1, scores_BKV.shape[1], 1)
            own_BK1 = scores_BKV.gather(2, place_BK1)
            self.losses.append(torch.cat([(scores_BKV / t).logsumexp(-1, keepdim=True) - own_BK1 / t for t in GRID], dim=-1).float().cpu())
        return super().log_p(scores, sampler, level)

    def log_p_by_depth(self, scores_BDV: Tensor, sampler: Sampler) -> Tensor:
        """Level by level, so that `log_p` hears of it."""
        return torch.stack([self.log_p(scores_BDV[:, level], sampler, level) for level in range(scores_BDV.shape[1])], dim=1)


def calibrate(
    target: Target, proposer: Any, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], texts: Sequence[Sequence[int]]
) -> Temperatures:
    """By depth, the temperatures under which the text's tokens are likeliest, given that the path to them was drafted; greedy rows apart.

    proposer: of dynamic trees, all of whose candidates are kept. A depth of few places takes the temperature of the one before it. Drafters that
    rank their drafts by no probabilities have none.
    """
    if not hasattr(proposer, "temperatures"):
        return Temperatures()
    ids = proposer._draft_ids()
    place = None if ids is None else {int(token): i for i, token in enumerate(ids.tolist())}
    sums = {sampled: torch.zeros(proposer.max_depth, len(GRID), dtype=torch.float64) for sampled in (False, True)}
    counts = {sampled: [0] * proposer.max_depth for sampled in (False, True)}
    own, before = proposer.temperatures, list[Tensor]()

    def listen(position: int) -> None:
        truth = [[place.get(t, -1) if place is not None else t for t in text[position + 1 :][: proposer.max_depth]] for text in texts]
        columns = [
            torch.tensor([row[level] if level < len(row) else -1 for row in truth], device=target.device) for level in range(proposer.max_depth)
        ]
        before[:] = [column.cpu() for column in columns]
        proposer.temperatures = _Listening(truth=columns)

    def take(position: int, tree: DraftTree) -> None:
        for row, text in enumerate(texts):
            if position < len(text) - 1:
                sampled = params[row].temperature > 0
                for level, node in enumerate(_judged(tree, row, text[position + 1 :])):
                    if level < len(proposer.temperatures.losses) and before[level][row] >= 0:
                        losses_KG = proposer.temperatures.losses[level][row]
                        sums[sampled][level] += losses_KG[min(node, len(losses_KG) - 1)]
                        counts[sampled][level] += 1
        listen(position + 1)

    listen(0)
    try:
        _walk(target, proposer, prompts, params, texts, take)
    finally:
        proposer.temperatures = own
    greedy, sampled = (_best(sums[kind], counts[kind]) for kind in (False, True))
    return Temperatures(greedy, sampled)


def _judged(tree: DraftTree, row: int, truth: Sequence[int]) -> list[int]:
    """For each level whose distribution is judged by the text: which of the level's distributions stands after the text's tokens so far.

    The first level has one. From then on the candidates that were expanded are those of greatest value, in that order.
    """
    assert tree.values_BN is not None
    tokens, parents, depth, values = tree.tokens_BN[row], tree.parents_BN[row], tree.depth_BN[row], tree.values_BN[row]
    at, found = 0, [0]
    for level, token in enumerate(truth[: tree.max_depth - 1], 1):
        right = ((parents == at) & (tokens == token) & (depth == level)).nonzero().flatten()
        if not len(right):
            break
        at = int(right[0])
        place = int(((depth == level) & (values > values[at])).sum())
        if not bool((parents[1:] == at).any()):
            break
        found.append(place)
    return found[: len(truth)]


def _best(sums_DG: Tensor, counts: Sequence[int]) -> tuple[float, ...]:
    found: list[float] = []
    for losses_G, count in zip(sums_DG, counts, strict=True):
        if count < LEAST:
            break
        found.append(round(_lowest(losses_G), 3))
    return tuple(found)


def _lowest(losses_G: Tensor) -> float:
    """Where the parabola through the lowest point of the grid and its neighbours, which are equally far apart in the logarithm, is lowest."""
    i = int(losses_G.argmin())
    if not 0 < i < len(GRID) - 1:
        return GRID[i]
    left, middle, right = (float(losses_G[j]) for j in (i - 1, i, i + 1))
    bend = left - 2 * middle + right
    shift = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return GRID[i] * math.exp(shift * math.log(GRID[1] / GRID[0]))
