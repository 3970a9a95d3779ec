"""The one place where logits become choices: warping, and the counter-based noise that makes sampling reproducible.

The plain sampler at absolute position t is  y_t = argmax_x (log p(x) + g[t, x]),  p the warped distribution and g Gumbel noise from a
counter-based generator keyed by (seed, t, x) (the Gumbel-max trick). The same noise is given to the drafter, so that target and drafter tend to
choose alike, and verification becomes an equality test (2408.07978; list form 2506.05632). Temperature 0 is the same code with g = 0.

Dims: B batch, N nodes, P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from .. import UserError
from .tree import DraftTree

_MASK32 = 0xFFFFFFFF
# Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
NOISE_POSITIONS, NOISE_BYTES = 32, 2**28  # how much noise is made at once, at most


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled. temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 are off.

    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied (1909.05858, as transformers does).
    presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once, or once for each occurrence (OpenAI's API).
    logit_bias: {token: what is added to its logit}. All of these come before the temperature, and hold for greedy decoding too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number >= 0"),
            ("top_k", self.top_k >= 0, "an integer >= 0 (0 = off)"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "a number in [0, 1)"),
            ("repetition_penalty", math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "a finite number > 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("logit_bias", all(token >= 0 and not math.isnan(bias) for token, bias in self.logit_bias.items()), "token ids >= 0 and numbers"),
            ("seed", 0 <= self.seed < 2**63, "an integer in [0, 2^63)"),
        ):
            if not good:
                raise UserError(f"{name}: wanted {wanted}, got {getattr(self, name)}")


def philox(
    c0: Tensor, c1: Tensor, k0: Tensor, k1: Tensor, c2: Tensor | None = None, c3: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 on int64 tensors of 32-bit words: counter (c0, c1, c2, c3), the last two 0 if not given; key (k0, k1). Returns four words.

    torch has no unsigned 32-bit multiply, so products are formed in int64: they wrap modulo 2^64, which leaves all 64 bits right.
    """
    c2 = torch.zeros_like(c0) if c2 is None else c2
    c3 = torch.zeros_like(c0) if c3 is None else c3
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK32) ^ c1 ^ k0,
            product1 & _MASK32,
            ((product0 >> 32) & _MASK32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def gumbel_noise(seed_B: Tensor, position_BP: Tensor, vocab_size: int) -> Tensor:
    """[B, P, V] float32 Gumbel noise g[t, x] of each row's seed; a pure function of (seed, absolute position, token).

    Computed in float64 and rounded, so that CPU and GPU agree although their float32 logarithms differ in the last place.
    """
    words = -(-vocab_size // 4)  # one Philox call serves four tokens
    block_BPW = torch.arange(words, device=seed_B.device).expand(*position_BP.shape, words)
    position = position_BP.unsqueeze(-1).expand_as(block_BPW)
    key = seed_B.view(-1, 1, 1).expand_as(block_BPW)
    out = torch.stack(philox(block_BPW, position, key & _MASK32, (key >> 32) & _MASK32), dim=-1)
    uniform = (out.flatten(-2)[..., :vocab_size].double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log().float()


class Sampler:
    """Per-row sampling settings of a batch, as device tensors."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str) -> None:
        self.params = list(params)
        self.device = torch.device(device)
        self.seed_B = torch.tensor([p.seed for p in params], dtype=torch.int64, device=device)
        temperature_B = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self.random_B = temperature_B > 0
        self.temperature_B = torch.where(self.random_B, temperature_B, 1.0)
        self.top_k_B = torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device)
        self.top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        self.min_p_B = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        # Host-side facts, so that a greedy batch pays for none of this.
        self.any_random = any(p.temperature > 0 for p in params)
        self._any_top_k = any(p.top_k for p in params)
        self._any_top_p = any(p.top_p < 1 for p in params)
        self._any_min_p = any(p.min_p > 0 for p in params)
        self.any_penalty = any(p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0 or p.logit_bias for p in params)
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        self._penalties_B3 = torch.tensor([[getattr(p, name) for name in names] for p in params], dtype=torch.float32, device=device)
        self._prompt_BV = self._counts_BV = self._bias_BV = torch.empty(0)

    @property
    def kind(self) -> tuple[int | bool, ...]:
        """Rows, and which operations they need: samplers of one kind do the same on other numbers."""
        return (len(self.params), self.any_random, self._any_top_k, self._any_top_p, self._any_min_p, self.any_penalty)

    def load(self, other: Sampler) -> None:
        """Take the settings of a sampler of the same kind into the tensors that are there."""
        assert self.kind == other.kind, "samplers of different kinds"
        self.params = other.params
        for name in ("seed_B", "random_B", "temperature_B", "top_k_B", "top_p_B", "min_p_B", "_penalties_B3"):
            getattr(self, name).copy_(getattr(other, name))

    def begin(self, ids_BT: Tensor, length_B: Tensor, vocab_size: int) -> None:
        """A new request: penalties count the tokens of these right-padded prompts, and from now on those given to `emitted`."""
        if not self.any_penalty:
            return
        real_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) < length_B.unsqueeze(1)
        if self._counts_BV.shape != (len(self.params), vocab_size):
            self._prompt_BV, self._counts_BV, self._bias_BV = (torch.empty(len(self.params), vocab_size, device=self.device) for _ in range(3))
        self._prompt_BV.zero_().scatter_add_(1, ids_BT, real_BT.float())
        self._counts_BV.zero_()
        self._bias_BV.zero_()
        for row, params in enumerate(self.params):
            for token, bias in params.logit_bias.items():
                if token >= vocab_size:
                    raise UserError(f"logit_bias: wanted token ids below the vocabulary's size {vocab_size}, got {token}")
                self._bias_BV[row, token] = bias

    def emitted(self, tokens_BP: Tensor, count_B: Tensor) -> None:
        """Each row emitted the first `count` of these tokens."""
        if self.any_penalty:
            real_BP = torch.arange(tokens_BP.shape[1], device=tokens_BP.device) < count_B.unsqueeze(1)
            self._counts_BV.scatter_add_(1, tokens_BP, real_BP.float())

    def _penalise(self, logits_BNV: Tensor, tree: DraftTree | None, ids_V: Tensor | None) -> Tensor:
        """Apply penalties and bias. tree: the nodes that logits follow, whose paths count as emitted; None: what was emitted is all there is."""
        counts_BNV, prompt_BNV, bias_BNV = (table.unsqueeze(1) for table in (self._counts_BV, self._prompt_BV, self._bias_BV))
        if tree is not None and tree.num_nodes > 1:  # the root has been emitted
            token_BNV = functional.one_hot(tree.tokens_BN[:, 1:], counts_BNV.shape[-1]).float()
            counts_BNV = counts_BNV + tree.ancestors_BNN[:, :, 1:].float() @ token_BNV
        if ids_V is not None:
            counts_BNV, prompt_BNV, bias_BNV = (table.index_select(-1, ids_V) for table in (counts_BNV, prompt_BNV, bias_BNV))
        size = logits_BNV.shape[-1]
        counts_BNV, prompt_BNV, bias_BNV = counts_BNV[..., :size], prompt_BNV[..., :size], bias_BNV[..., :size]
        repetition, presence, frequency = self._penalties_B3.view(-1, 3, 1, 1).unbind(1)
        repeated = torch.where(logits_BNV > 0, logits_BNV / repetition, logits_BNV * repetition)
        logits_BNV = torch.where((counts_BNV > 0) | (prompt_BNV > 0), repeated, logits_BNV)
        logits_BNV = logits_BNV - presence * (counts_BNV > 0) - frequency * counts_BNV
        return logits_BNV + bias_BNV

    def noise(self, first_B: Tensor, count: int, vocab_size: int) -> Tensor | None:
        """[B, count, V] noise for absolute positions first .. first + count - 1 of each row (zero for greedy rows); None if all rows are greedy."""
        if not self.any_random:
            return None
        position_BP = first_B.unsqueeze(1) + torch.arange(count, device=first_B.device)
        noise_BPV = gumbel_noise(self.seed_B, position_BP, vocab_size)
        return noise_BPV * self.random_B.view(-1, 1, 1)

    def warp(self, logits_BNV: Tensor) -> Tensor:
        """Temperature, then top-k, top-p and min-p, in float32; filtered tokens are -inf. Greedy rows keep temperature 1 (same argmax)."""
        if not self.any_random:
            return logits_BNV.float()
        logits_BNV = logits_BNV.float() / self.temperature_B.view(-1, 1, 1)
        if self._any_top_k:
            logits_BNV = self._filter_top_k(logits_BNV)
        if self._any_top_p:
            logits_BNV = self._filter_top_p(logits_BNV)
        if self._any_min_p:
            floor = logits_BNV.amax(-1, keepdim=True) + self.min_p_B.log().view(-1, 1, 1)
            logits_BNV = logits_BNV.masked_fill(logits_BNV < floor, -torch.inf)
        return logits_BNV

    def _filter_top_k(self, logits_BNV: Tensor) -> Tensor:
        vocab = logits_BNV.shape[-1]
        k_B = torch.where(self.top_k_B > 0, self.top_k_B.clamp(max=vocab), vocab)
        ordered = logits_BNV.sort(dim=-1, descending=True).values
        kth = ordered.gather(-1, (k_B - 1).view(-1, 1, 1).expand(*logits_BNV.shape[:2], 1))
        return logits_BNV.masked_fill(logits_BNV < kth, -torch.inf)

    def _filter_top_p(self, logits_BNV: Tensor) -> Tensor:
        ordered, order = logits_BNV.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        # Keep the smallest set whose mass reaches top_p: drop a token when the mass before it already does.
        drop = probability.cumsum(-1) - probability >= self.top_p_B.view(-1, 1, 1)
        return logits_BNV.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)

    def scores(self, logits_BNV: Tensor, noise_BNV: Tensor | None, tree: DraftTree | None = None, ids_V: Tensor | None = None) -> Tensor:
        """[B, N, V] float32 scores whose argmax over V is the sampled token: penalised and warped logits plus noise.

        tree: the nodes that the logits follow (None: they follow what was emitted). ids_V: the token of each column, if not 0, 1, 2 ...
        """
        warped_BNV = self.warp(self._penalise(logits_BNV.float(), tree, ids_V) if self.any_penalty else logits_BNV)
        return warped_BNV if noise_BNV is None else warped_BNV + noise_BNV

    def probabilities(self, logits_BNV: Tensor, tree: DraftTree | None = None, ids_V: Tensor | None = None) -> Tensor:
        """[B, N, V] float32 distributions after penalties and warping; those of greedy rows are the one-hot of their argmax."""
        scores_BNV = self.scores(logits_BNV, None, tree, ids_V)
        greedy_BNV = functional.one_hot(scores_BNV.argmax(-1), scores_BNV.shape[-1]).float()
        return torch.where(self.random_B.view(-1, 1, 1), scores_BNV.softmax(-1), greedy_BNV) if self.any_random else greedy_BNV


class NoiseWindow:
    """A sampler's noise, made for many positions at once: the generator is a hundred small operations, which cost one position as much as thirty.

    `positions` are made at once, fewer where [B, positions, V] would take more than `limit` bytes, but at least `least`, which is the most that may
    be asked for, so that the noise stays in the same tensor.
    """

    def __init__(self, sampler: Sampler, vocab_size: int, *, least: int = 1, positions: int = NOISE_POSITIONS, limit: int = NOISE_BYTES) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size
        self._positions = max(least, min(positions, limit // (4 * vocab_size * len(sampler.params))))
        self._first: list[int] = []  # each row's first position that is held, also on the device
        self._first_B = torch.zeros(len(sampler.params), dtype=torch.int64, device=sampler.device)
        self._noise_BPV: Tensor | None = None

    def forget(self) -> None:
        """The sampler's settings have changed."""
        self._first = []

    def cover(self, first: Sequence[int], count: int) -> None:
        """Make sure that positions first .. first + count - 1 of each row are held."""
        if not self._sampler.any_random:
            return
        held = self._noise_BPV
        if held is not None and self._first and all(low <= new <= low + held.shape[1] - count for low, new in zip(self._first, first, strict=True)):
            return
        self._first = list(first)
        self._first_B.copy_(torch.tensor(self._first))
        made = self._sampler.noise(self._first_B, max(count, self._positions), self._vocab_size)
        assert made is not None
        if held is not None and held.shape == made.shape:
            held.copy_(made)  # a captured graph reads it where it is
        else:
            self._noise_BPV = made

    def at(self, first: Sequence[int], count: int) -> Tensor | None:
        """[B, count, V]: what `Sampler.noise` gives for positions first .. first + count - 1 of each row; None if all rows are greedy."""
        self.cover(first, count)
        held = self._noise_BPV
        if held is None:
            return None
        offset = [new - low for low, new in zip(self._first, first, strict=True)]
        if min(offset) == max(offset):
            return held[:, offset[0] : offset[0] + count]
        return self._from(torch.tensor(offset, device=held.device), count)

    def after(self, first_B: Tensor, count: int) -> Tensor | None:
        """`at` for positions that only the device knows. They must be covered: of others, the last ones held are returned."""
        return None if self._noise_BPV is None else self._from(first_B - self._first_B, count)

    def _from(self, offset_B: Tensor, count: int) -> Tensor:
        held = self._noise_BPV
        assert held is not None
        column_BP = (offset_B.unsqueeze(1) + torch.arange(count, device=held.device)).clamp(0, held.shape[1] - 1)
        return held[torch.arange(held.shape[0], device=held.device).unsqueeze(1), column_BP]
