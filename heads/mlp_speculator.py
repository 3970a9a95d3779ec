"""MLP speculator (2404.19124): a recurrent network of one layer a step, on the target's last hidden state and the tokens drafted so far.

    s_0 = h_t                                            the target's last hidden state, after its final norm
    s_{k+1} = gelu(ln_k(a proj_k(s_k) + b emb_k(token t+1+k)));     logits lm_heads_k(s_{k+1}) predict token t + 2 + k
    a = 0.5^(1 / (2 heads)),  b = sqrt((1 - a^2) inner / 2),  ln(x) = weight x / rms(x) + bias
The weights a and b make h_t account for half of the state's variance after the last step. Arithmetic and shapes are those of the published models
(architecture `MLPSpeculatorPreTrainedModel`); their `emb` and `head` are called `embeddings` and `lm_heads` here.

Dims: B batch, T sequence, M columns, K nodes a level, H hidden, W inner (the state's width), V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import UserError
from ..decode.growth import Kind
from ..decode.target import Target
from .head import HeadConfig, draft_shape, head_sizes
from .stepwise import SequentialHead, SequentialProposer


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorConfig(HeadConfig):
    """heads: tokens that can be drafted. inner_size: the state's width. tie_weights: one embedding, norm and output layer for all steps, and one
    projection for all but the first.
    """

    heads: int
    inner_size: int
    tie_weights: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps != (self.target_num_layers + 1,):
            raise UserError(f"drafter.taps: wanted [{self.target_num_layers + 1}] (the target's final norm), got {list(self.taps)}; leave it out")

    @classmethod
    def for_target(
        cls, target: Target, *, heads: int = 4, intermediate_size: int | None = None, tie_weights: bool = False, draft_vocab_size: int | None = None
    ) -> MLPSpeculatorConfig:
        """Sizes that follow the target where none is given. intermediate_size: the state's width; None: the target's hidden size."""
        return cls(
            taps=(target.num_layers + 1,),
            heads=heads,
            inner_size=intermediate_size or target.hidden_size,
            tie_weights=tie_weights,
            **head_sizes(target, draft_vocab_size),
        )


class StateNorm(nn.Module):
    """weight x / rms(x) + bias."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps) + self.bias


class MLPSpeculator(SequentialHead):
    """The speculator. Its embeddings are its own, of the target's whole vocabulary."""

    method = "mlp_speculator"

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        super().__init__(config)
        self.config = config
        inner, own, projections = config.inner_size, config.heads, config.heads
        if config.tie_weights:
            own, projections = 1, min(2, config.heads)
        self.embeddings = nn.ModuleList(nn.Embedding(config.target_vocab_size, inner) for _ in range(own))
        self.proj = nn.ModuleList(nn.Linear(inner if k else config.hidden_size, inner, bias=False) for k in range(projections))
        self.ln = nn.ModuleList(StateNorm(inner) for _ in range(own))
        self.lm_heads = nn.ModuleList(nn.Linear(inner, config.draft_vocab_size, bias=False) for _ in range(own))
        self.state_weight = 0.5 ** (0.5 / config.heads)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)
        for layer in (*self.embeddings, *self.proj, *self.lm_heads):
            assert isinstance(layer.weight, Tensor)
            nn.init.trunc_normal_(layer.weight, std=inner**-0.5)

    @property
    def heads(self) -> int:
        """How many tokens it can draft."""
        return self.config.heads

    def lm_head(self, k: int) -> nn.Linear:
        """Step k's output layer. It does not start from the target's rows: what it reads is no hidden state of the target's."""
        layer = _of_step(self.lm_heads, k)
        assert isinstance(layer, nn.Linear)
        return layer

    def begin(self, fed_BMF: Tensor, ids_BM: Tensor) -> Tensor:
        """s_1, from h_t and token t + 1."""
        return self.advance(fed_BMF, ids_BM, 0)

    def advance(self, state_BKW: Tensor, ids_BK: Tensor, k: int) -> Tensor:
        """s_{k+1}, from s_k and token t + 1 + k."""
        token = _of_step(self.embeddings, k)(ids_BK)
        mixed = self.state_weight * _of_step(self.proj, k)(state_BKW) + self.token_weight * token
        return functional.gelu(_of_step(self.ln, k)(mixed))

    def output(self, state: Tensor, k: int) -> Tensor:
        """The state itself."""
        return state

    def training_outputs(self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor) -> list[Tensor]:
        """The states s_1 .. s_heads [B, T, W], the true tokens being read."""
        return self.unrolled(taps_BTF.to(self.lm_head(0).weight.dtype), ids_BT)

    def proposer(
        self, *, tree: str = "chain", depth: int | None = None, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic"
    ) -> SequentialProposer:
        """A proposer of chains, or of dynamic trees with `nodes` draft nodes. depth None: all heads. kind: see `Grower`."""
        shape = draft_shape(self.config.draft_vocab_size, tree, self.heads if depth is None else depth, topk, nodes)
        return SequentialProposer(self, **shape, kind=kind)


def _of_step(layers: nn.ModuleList, k: int) -> nn.Module:
    """Step k's own layer, or the one that it is tied to."""
    return layers[min(k, len(layers) - 1)]
