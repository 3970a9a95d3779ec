"""EAGLE-3 (2503.01840): one decoder layer on the target's tapped features and the next token's embedding, unrolled on its own hidden states.

    g_t = fc(taps_t)                                     step 0; later steps feed the head's own pre-norm output instead
    x   = [rms(embed(token_{t+1})); rms(g_t)]            embeddings first
    h   = g_t + attention(x);  h = h + mlp(rms(h));      logits over the draft vocabulary = lm_head(rms(h)), predicting token t+2
Pair t has rotary position t. Tensor names and arithmetic follow the layout that serving engines load: one Llama layer, no biases,
`norm_before_residual` false; `d2t` holds offsets (target id = draft id + d2t[draft id]).

EAGLE-3.1 (2605.09992), `norm_features`: g_t = fc of each tap after a norm of its own, and later steps feed the post-norm output, rms(h). Sizes then
stay the same however long a draft, or a text, gets. Further layers (`num_layers`) are plain Llama layers on h.

Dims: B batch, M pairs, H hidden, F taps * H, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import UserError
from ..decode.halves import Linear
from ..decode.target import Target
from .blocks import DecoderLayer, RMSNorm
from .head import LayerConfig, head_sizes, layer_sizes
from .recurrent import RecurrentHead


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The reference's three taps, k = (2, L // 2, L - 3); for targets too small for three distinct ones, as many as are left."""
    return tuple(sorted({k for k in (2, num_layers // 2, num_layers - 3) if 1 <= k <= num_layers})) or (num_layers,)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """Sizes of the head. Its taps are outputs of layers, as served heads' are: not the final norm. norm_features: EAGLE-3.1's norms."""

    num_layers: int = 1
    norm_features: bool = False

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise UserError(f"drafter.num_layers: wanted at least 1, got {self.num_layers}")
        if self.taps and self.taps[-1] > self.target_num_layers:
            raise UserError(f"drafter.taps: wanted ascending layers in 0 .. {self.target_num_layers} (the target's), got {list(self.taps)}")
        super().__post_init__()

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        taps: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        num_layers: int = 1,
        norm_features: bool = False,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> Eagle3Config:
        """Sizes that follow the target where none is given."""
        return cls(
            taps=tuple(taps) if taps is not None else default_taps(target.num_layers),
            num_layers=num_layers,
            norm_features=norm_features,
            **head_sizes(target, draft_vocab_size),
            **layer_sizes(target, intermediate_size, num_heads, num_kv_heads),
        )


class MidLayer(DecoderLayer):
    """The first layer: its attention reads [embedding; hidden]."""

    hidden_norm: RMSNorm

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, norms=("input_layernorm", "hidden_norm"))

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[rms(embedding); rms(hidden)]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)


class Eagle3(RecurrentHead):
    """The head. Its embeddings are the target's. Its state is the pre-norm output; with EAGLE-3.1's norms, the post-norm one."""

    method = "eagle3"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in config.taps) if config.norm_features else None
        self.fc = Linear(len(config.taps) * size, size)
        self.midlayer = MidLayer(config)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config) for index in range(1, config.num_layers)})
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def decoder_layers(self) -> list[DecoderLayer]:
        """The first layer, then the further ones."""
        return [self.midlayer, *(layer for layer in self.layers.values() if isinstance(layer, DecoderLayer))]

    def output_layers(self) -> list[nn.Linear]:
        """The one output layer."""
        return [self.lm_head]

    def output_rows(self) -> Tensor:
        """[V, H] its own output layer."""
        return self.lm_head.weight

    def combine(self, taps_BMF: Tensor) -> Tensor:
        """fc of the taps, each after its norm if there are norms."""
        taps_BMF = taps_BMF.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            parts = torch.split(taps_BMF, self.config.hidden_size, dim=-1)
            taps_BMF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(taps_BMF)
        return out

    def enter(self, embedded: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        """([rms(embedding); rms(fed)], fed)."""
        return self.midlayer.inputs(embedded, fed), fed

    def leave(self, hidden: Tensor) -> Tensor:
        """The pre-norm output, or with norms the post-norm one."""
        out: Tensor = hidden if self.fc_norm is None else self.norm(hidden)
        return out

    def readout(self, state: Tensor) -> Tensor:
        """The post-norm output."""
        out: Tensor = self.norm(state) if self.fc_norm is None else state
        return out
