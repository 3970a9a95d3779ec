"""Randomness of sampled drafts and of their verification: counter-based, so that a run is reproducible and a row does not depend on its batch.

Each uniform is a pure function of (seed, absolute position of the round's root, counter). A round starts at least one position after the last,
so no counter is used twice. The plain sampler's noise uses the counters 0 .. V/4 of the same generator; these streams use the upper half of the
32-bit range, one eighth each:

    [100..) noise that draws children without replacement    [101..) uniforms that draw i.i.d. children
    [110..) accept                                           [111..) choose

Verification must not share randomness with the draft: rules other than `shared_noise` are lossless only if it is independent of the tree.

Dims: B batch, M nodes that get children, K children of a node, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import gumbel_noise, philox

_STREAM = 1 << 29  # counters of one stream
_DRAW_NOISE, _DRAW_UNIFORM, _ACCEPT, _CHOOSE = (stream * _STREAM for stream in (4, 5, 6, 7))
_ELEMENTS = 1 << 14  # counters of one site within a stream
_MASK32 = 0xFFFFFFFF


class PhiloxChance:
    """The `Chance` of one round: draws keyed by (seed, position of the root, site, element).

    noise() is the plain sampler's, for rows of temperature > 0 (`random_B`; None: all rows).
    """

    def __init__(self, seed_B: Tensor, root_position_B: Tensor, random_B: Tensor | None = None) -> None:
        self.seed_B, self.root_position_B, self.random_B = seed_B, root_position_B, random_B

    def accept(self, probability: Tensor, site: int) -> Tensor:
        """Bernoulli draws of the shape of `probability` [B, ...]; 0 and 1 are certain."""
        flat_BX = probability.flatten(1) if probability.ndim > 1 else probability.unsqueeze(1)
        return (self._uniform(_ACCEPT, site, flat_BX.shape[1]) < flat_BX).view(probability.shape)

    def choose(self, p_BV: Tensor, site: int) -> Tensor:
        """[B] tokens drawn from p by inversion."""
        return invert(p_BV, self._uniform(_CHOOSE, site, 1)).squeeze(1)

    def noise(self, depths: int, vocab_size: int) -> Tensor:
        """[B, depths, V] the plain sampler's noise for the tokens after the root on."""
        position_BD = self.root_position_B.unsqueeze(1) + 1 + torch.arange(depths, device=self.seed_B.device)
        noise_BDV = gumbel_noise(self.seed_B, position_BD, vocab_size)
        return noise_BDV if self.random_B is None else noise_BDV * self.random_B.view(-1, 1, 1)

    def _uniform(self, stream: int, site: int, elements: int) -> Tensor:
        assert 0 <= site < _STREAM // _ELEMENTS and elements <= _ELEMENTS, (site, elements)
        return uniform(self.seed_B, self.root_position_B, stream + site * _ELEMENTS, elements)


def uniform(seed_B: Tensor, position_B: Tensor, first: int, count: int) -> Tensor:
    """[B, count] float64 in [0, 1), 52 bits each, at the counters first .. first + count - 1."""
    words = _words(seed_B, position_B, first, count)
    return ((words[0] << 20) | (words[1] >> 12)).double() * 2.0**-52


def invert(p_BXV: Tensor, uniform_BXK: Tensor) -> Tensor:
    """[..., K] tokens drawn from p [..., V] by inverting its cumulative sum, in float64: tokens of zero probability are never drawn."""
    total_BXV = p_BXV.double().cumsum(-1)
    tokens = torch.searchsorted(total_BXV, (uniform_BXK * total_BXV[..., -1:]).contiguous(), right=True)
    return tokens.clamp(max=p_BXV.shape[-1] - 1)  # only a row whose p is all zero, a node that does not exist, exceeds it


def iid_children(q_BMV: Tensor, branching: int, seed_B: Tensor, root_position_B: Tensor, first_node: int) -> Tensor:
    """[B, M, K] tokens drawn i.i.d. with replacement, in draw order, for the nodes first_node .. first_node + M - 1.

    The tree's kind is "iid" and its q_BNV of these nodes is q_BMV.
    """
    batch, nodes, _ = q_BMV.shape
    first, count = first_node * branching, nodes * branching
    assert first + count <= _STREAM, (first, count)
    uniform_BX = uniform(seed_B, root_position_B, _DRAW_UNIFORM + first, count)
    return invert(q_BMV, uniform_BX.view(batch, nodes, branching))


def without_replacement_children(q_BMV: Tensor, branching: int, seed_B: Tensor, root_position_B: Tensor, first_node: int) -> tuple[Tensor, Tensor]:
    """([B, M, K] tokens in draw order, [B, M, K] bool: the child exists) for the nodes first_node .. first_node + M - 1.

    Gumbel-top-k (1903.06059): the descending order of log q + g has the law of sequential draws without replacement, x_i from q without
    x_1 .. x_{i-1}. A node whose q has fewer than K tokens has fewer children. branching is at most V. The noise is independent across nodes:
    `traversal_without_replacement` needs the children of different nodes to be independent.
    """
    batch, nodes, vocab = q_BMV.shape
    blocks = -(-vocab // 4)  # one Philox call serves four tokens
    first, count = first_node * blocks, nodes * blocks
    assert first + count <= _STREAM, (first, count)
    words_BX4 = torch.stack(_words(seed_B, root_position_B, _DRAW_NOISE + first, count), -1)
    uniform_BMV = ((words_BX4.double() + 0.5) * 2.0**-32).view(batch, nodes, 4 * blocks)[..., :vocab]
    score_BMV = q_BMV.double().log() - (-uniform_BMV.log()).log()
    top = score_BMV.topk(branching, dim=-1, sorted=True)
    return top.indices, top.values > -torch.inf


def _words(seed_B: Tensor, position_B: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four [B, count] 32-bit words."""
    counter_BX = torch.arange(first, first + count, device=seed_B.device).expand(seed_B.shape[0], count)
    position_BX, key_BX = position_B.unsqueeze(1).expand_as(counter_BX), seed_B.unsqueeze(1).expand_as(counter_BX)
    return philox(counter_BX, position_BX, key_BX & _MASK32, (key_BX >> 32) & _MASK32)
