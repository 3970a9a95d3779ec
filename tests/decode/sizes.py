"""The shape of the tiny random models that the tests of decoding share."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,  # which heads' references have too
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
