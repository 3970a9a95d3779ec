"""EAGLE-1 (2401.15077) and EAGLE-2 (2406.16858: the same weights, drafting dynamic trees): one decoder layer that predicts the target's next feature.

    g_t = the target's last hidden state after its final norm     step 0; later steps feed the head's own prediction instead
    h   = fc([embed(token_{t+1}); g_t])
    h   = h + attention(h);  h = h + mlp(rms(h))                  predicts g_{t+1}; logits = the target's lm_head(h), predicting token t+2
The layer has no norm before its attention, and there is no norm before lm_head. fc has no bias, as some serving engines leave one out; heads from
elsewhere that have one keep it (`fc_bias`). Tensor names follow the layout that serving engines load. HASS (2408.15766) is another way to train
this head: see `train/objectives/eagle1.py`.

Dims: B batch, M pairs, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..decode.target import Target
from .blocks import DecoderLayer
from .head import LayerConfig, head_sizes, layer_sizes
from .recurrent import RecurrentHead, check_output_layer


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(LayerConfig):
    """Sizes of the head. It reads one feature, the target's last hidden state after the final norm. fc_bias: of heads from elsewhere."""

    fc_bias: bool = False

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> Eagle1Config:
        """Sizes that follow the target where none is given. Raises UserError for a target whose output layer has a bias."""
        check_output_layer(target)
        return cls(
            taps=(target.num_layers + 1,),
            **head_sizes(target, draft_vocab_size),
            **layer_sizes(target, intermediate_size, num_heads, num_kv_heads),
        )


class Eagle1(RecurrentHead):
    """The head. Its embeddings and its output layer are the target's. Its state is the feature that it predicts."""

    method = "eagle1"

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, norms=())])

    def decoder_layers(self) -> list[DecoderLayer]:
        """The one layer."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def combine(self, taps_BMF: Tensor) -> Tensor:
        """The feature itself."""
        return taps_BMF.to(self.fc.weight.dtype)

    def enter(self, embedded: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        """fc([embedding; feature]), which the attention reads as it is."""
        hidden = self.fc(torch.cat([embedded, fed], dim=-1))
        return hidden, hidden
