"""Multi-token prediction (DeepSeek-V3, 2412.19437): one target-like layer on the target's last hidden state and the next token's embedding.

    g_t = the target's last hidden state after its final norm     step 0; later steps feed the head's own normed output instead
    h   = eh_proj([rms(embed(token_{t+1})); rms(g_t)])
    h   = h + attention(rms(h));  h = h + mlp(rms(h))             logits = the target's lm_head(rms(h)), predicting token t+2
raw_feature: the arithmetic of MiMo's MTP layers, which vLLM computes for dense targets: g_t is the hidden state before the final norm, and at
position 0 the embedding is zero. transformers computes the other.

As in FastMTP (2509.18362) one layer serves all steps: it is applied to its own output, and trained so. It starts from random weights; `own_mtp.py`
has heads that start from a target's own MTP layer. `enorm`, `hnorm` and `eh_proj` are DeepSeek's names.

Dims: B batch, M pairs, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..decode.target import Target
from .blocks import DecoderLayer, RMSNorm
from .head import LayerConfig, head_sizes, layer_sizes
from .recurrent import RecurrentHead, check_output_layer


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """Sizes of the head. It reads one feature, the target's last hidden state: after the final norm, or with raw_feature before it."""

    raw_feature: bool = False

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        raw_feature: bool = False,
    ) -> MtpConfig:
        """Sizes that follow the target where none is given. Raises UserError for a target whose output layer has a bias."""
        check_output_layer(target)
        return cls(
            taps=(target.num_layers + (not raw_feature),),
            raw_feature=raw_feature,
            **head_sizes(target, draft_vocab_size),
            **layer_sizes(target, intermediate_size, num_heads, num_kv_heads),
        )


class Mtp(RecurrentHead):
    """The head. Its embeddings and its output layer are the target's. Its state is its normed output, of the same kind as the feature it reads."""

    method = "mtp"
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.mtp_block = DecoderLayer(config)
        self.norm = RMSNorm(size, eps)

    def decoder_layers(self) -> list[DecoderLayer]:
        """The one layer."""
        return [self.mtp_block]

    def embed_pairs(self, ids: Tensor, position: Tensor) -> Tensor:
        """With raw_feature, zero at position 0."""
        embedded = self.embed(ids)
        return embedded.masked_fill((position == 0).unsqueeze(-1), 0) if self.config.raw_feature else embedded

    def combine(self, taps_BMF: Tensor) -> Tensor:
        """The feature itself."""
        return taps_BMF.to(self.eh_proj.weight.dtype)

    def enter(self, embedded: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        """The two projected together; the attention reads that normed."""
        hidden = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(fed)], dim=-1))
        return self.mtp_block.input_layernorm(hidden), hidden

    def leave(self, hidden: Tensor) -> Tensor:
        """The normed output."""
        out: Tensor = self.norm(hidden)
        return out
