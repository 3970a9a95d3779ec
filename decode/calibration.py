"""How sure a draft may be of itself: temperatures that turn its scores into probabilities of acceptance.

    log p(v | path) = log softmax(scores / t)_v        scores: warped draft logits + noise; t: by depth, and by whether the row is sampled

A draft's probabilities are learned from the target's distributions, but at temperature 0, and with the noise known, the token that follows is not
drawn: it is the target's likeliest, and the draft's likeliest is right more often than its probability says. Trees are ranked by products of these
probabilities over depths, so that their sharpness decides whether nodes are spent on depth or on width; policies compare them with thresholds and
latencies. Chains and static trees do not change, nor does what is generated. `draftsmith tune` measures the temperatures.

Dims: B batch, D depth, V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import UserError
from .sampling import Sampler


@dataclass(frozen=True)
class Temperatures:
    """By depth of the token that is drafted, from the root's children on; the last one holds for all that are deeper; none: 1 everywhere.

    greedy, sampled: for rows of temperature 0 and above. Raises UserError for temperatures that are none.
    """

    greedy: tuple[float, ...] = ()
    sampled: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(math.isfinite(t) and t > 0 for t in (*self.greedy, *self.sampled)):
            raise UserError(f"draft temperatures: wanted finite numbers > 0, got {list(self.greedy)} and {list(self.sampled)}")

    def at(self, level: int, sampler: Sampler) -> float | Tensor:
        """Of a level, counted from 0: one for all rows, or [B]. It does not wait for the device."""
        greedy, sampled = (values[min(level, len(values) - 1)] if values else 1.0 for values in (self.greedy, self.sampled))
        if greedy == sampled or not sampler.any_random:
            return greedy
        return torch.where(sampler.random_B, sampled, greedy)

    def log_p(self, scores: Tensor, sampler: Sampler, level: int) -> Tensor:
        """[B, .., V] log-probabilities of a level's tokens, from their scores."""
        t = self.at(level, sampler)
        if isinstance(t, Tensor):
            t = t.view(-1, *[1] * (scores.ndim - 1))
        elif t == 1.0:
            return scores.log_softmax(-1)
        return (scores / t).log_softmax(-1)

    def log_p_by_depth(self, scores_BDV: Tensor, sampler: Sampler) -> Tensor:
        """[B, D, V] of drafters whose depths are all known at once."""
        if not self.greedy and not self.sampled:
            return scores_BDV.log_softmax(-1)
        return torch.stack([self.log_p(scores_BDV[:, level], sampler, level) for level in range(scores_BDV.shape[1])], dim=1)
