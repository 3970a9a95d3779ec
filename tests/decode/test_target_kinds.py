"""Targets whose cache cannot be cut back to an accepted path are refused in one line, whatever they are called."""

from __future__ import annotations

from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.decode.target import Target
from transformers import AutoModelForCausalLM, DeepseekV3Config, JambaConfig, MambaConfig, RwkvConfig

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 64}
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MambaConfig(**SMALL), "layers of kind linear_attention"),
        (JambaConfig(**SMALL, **HEADS, attn_layer_period=2, attn_layer_offset=1, num_experts=2), "linear_attention"),
        (RwkvConfig(**SMALL), "no attention heads"),
        (DeepseekV3Config(**SMALL, **HEADS, **LATENT, **EXPERTS, num_key_value_heads=4), "multi-head latent attention"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_recurrent_and_latent_layers_are_refused(config: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Target(AutoModelForCausalLM.from_config(config), None, "odd")
