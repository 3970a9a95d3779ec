"""Losslessness of the rules whose output is another sample than plain decoding's: a test that every token follows the target's distribution.

If token y_t was drawn from p_t given the text before it, then u_t = P(tokens likelier than y_t) + V * P(tokens as likely as y_t), V uniform, is
uniform in [0, 1) and independent of all other u (Rosenblatt's transform, randomised). So the texts that were decoded anyway are the sample,
whatever their prompts: p_t comes from one pass of the target over each, and a chi-square test asks whether the u fill equal bins equally. A rule
that takes draft tokens too readily fills the first bins, as drafts are likely tokens. Where a text is cut off does not matter: that depends only on
tokens before.

Dims: N tokens of one text, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ..decode.sampling import Sampler, SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree
from .schema import DistributionTest

LEVEL = 1e-3  # how often the test may reject what is lossless
POWER = 0.95  # with which `detects_tv` is found
MOST_BINS, LEAST_PER_BIN = 20, 10


@torch.no_grad()
def places(target: Target, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, seed: int) -> list[float]:
    """u of each token after the first, which the prefill draws by the plain sampler, whatever the rule."""
    if len(tokens) < 2:
        return []
    ids = torch.tensor([[*prompt, *tokens]], device=target.device)
    position = torch.arange(ids.shape[1], device=target.device).unsqueeze(0)
    target.set_taps(())
    hidden = target.features(ids, position, torch.zeros_like(ids)).hidden_BNH[:, len(prompt) - 1 : -1]
    sampler = Sampler([params], target.device)
    before = torch.tensor([list(prompt)], device=target.device)
    sampler.begin(before, torch.tensor([len(prompt)], device=target.device), target.vocab_size)
    # Penalties count what was emitted before: a chain whose root is the prompt's last token says so.
    chain = DraftTree.chain(ids[:, len(prompt) - 1 : -1])
    p_NV = sampler.probabilities(target.logits(hidden), chain)[0, 1:].double()
    own_N1 = p_NV.gather(1, torch.tensor(tokens[1:], device=target.device).unsqueeze(1))
    above_N = (p_NV * (p_NV > own_N1)).sum(1)
    alike_N = (p_NV * (p_NV == own_N1)).sum(1)
    uniform_N = torch.rand(len(above_N), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(target.device)
    return ((above_N + uniform_N * alike_N) / p_NV.sum(1)).clamp(0, 1 - 1e-12).tolist()


def uniformity(values: Sequence[float], level: float = LEVEL) -> DistributionTest | None:
    """Chi-square test that the values are uniform in [0, 1). None if there are too few for two bins."""
    count = len(values)
    bins = min(MOST_BINS, count // LEAST_PER_BIN)
    if bins < 2:
        return None
    filled = torch.bincount((torch.tensor(values, dtype=torch.float64) * bins).long().clamp(max=bins - 1), minlength=bins).double()
    expected = count / bins
    statistic = float(((filled - expected) ** 2).sum() / expected)
    return DistributionTest(
        tokens=count,
        bins=bins,
        statistic=statistic,
        p_value=chi_square_tail(statistic, bins - 1),
        level=level,
        tv=float((filled / count - 1 / bins).abs().sum()) / 2,
        detects_tv=min(1.0, detectable(count, bins, level, POWER)),
        power=POWER,
    )


def chi_square_tail(statistic: float, freedom: float) -> float:
    """P(chi-square >= statistic)."""
    tail = torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64))
    return float(tail.clamp(0, 1))


@functools.cache
def critical(freedom: int, level: float) -> float:
    """The statistic that is exceeded with probability `level`."""
    low, high = 0.0, 10.0 * freedom + 100
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > level else (low, middle)
    return high


def power_of(shift: float, freedom: int, level: float) -> float:
    """P(the test rejects) if the statistic is a non-central chi-square of this non-centrality: a Poisson mixture of central ones."""
    terms = torch.arange(int(shift / 2 + 12 * math.sqrt(shift / 2 + 1)) + 30, dtype=torch.float64)
    half = torch.tensor(shift / 2, dtype=torch.float64)
    weights = (torch.xlogy(terms, half) - half - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + terms, torch.full_like(terms, critical(freedom, level) / 2))
    return float((weights * tails).sum())


@functools.cache
def needed_shift(freedom: int, level: float, power: float) -> float:
    """The non-centrality at which the test rejects with probability `power`."""
    low, high = 0.0, 1000.0 + 10 * freedom
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power_of(middle, freedom, level) < power else (low, middle)
    return high


def detectable(count: int, bins: int, level: float, power: float) -> float:
    """The total variation d between the true shares of the bins and equal ones that is found with this probability, however it is spread.

    The statistic's non-centrality is count * bins * sum (p_i - 1 / bins)^2 >= 4 count d^2, equal where it is spread evenly: the hardest case.
    """
    return math.sqrt(needed_shift(bins - 1, level, power) / (4 * count))
