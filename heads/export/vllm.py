"""vLLM's EAGLE-3 layout, which SGLang and llama.cpp's converter read too.

Layer indices: top-level `eagle_aux_hidden_state_layer_ids` is the canonical k (vLLM, llama.cpp); SGLang reads the nested list only: k - 1.
Embeddings are left out: every engine shares the target's. `d2t` holds offsets, and must be absent when the draft vocabulary is the target's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ... import UserError
from ..eagle3 import Eagle3, Eagle3Config

LAUNCH = 'vllm serve TARGET --speculative-config \'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": {depth}}}\''


def vllm_config(config: Eagle3Config) -> dict[str, Any]:
    """The config.json of the exported folder."""
    if 0 in config.taps:
        raise UserError(f"export vllm: wanted taps >= 1 (outputs of layers), got {list(config.taps)}; engines cannot capture the embeddings")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(config.taps),
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in config.taps], "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def expected_shapes(config: Eagle3Config) -> dict[str, list[int]]:
    """Every tensor of the layout and its shape: engines load an incomplete checkpoint without a word, so the exporter must not write one."""
    h, f, v = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    a, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "fc.weight": [h, len(config.taps) * h],
        "midlayer.self_attn.q_proj.weight": [a, 2 * h],
        "midlayer.self_attn.k_proj.weight": [kv, 2 * h],
        "midlayer.self_attn.v_proj.weight": [kv, 2 * h],
        "midlayer.self_attn.o_proj.weight": [h, a],
        "midlayer.mlp.gate_proj.weight": [f, h],
        "midlayer.mlp.up_proj.weight": [f, h],
        "midlayer.mlp.down_proj.weight": [h, f],
        "midlayer.input_layernorm.weight": [h],
        "midlayer.hidden_norm.weight": [h],
        "midlayer.post_attention_layernorm.weight": [h],
        "norm.weight": [h],
        "lm_head.weight": [v, h],
    }
    if v < config.target_vocab_size:
        shapes |= {"d2t": [v], "t2d": [config.target_vocab_size]}
    return shapes


def export(drafter: Eagle3, contract: dict[str, Any], folder: Path, depth: int) -> None:
    """Write the folder, whole or not at all. Raises UserError if the head cannot be expressed in this layout."""
    config, shapes = drafter.config, expected_shapes(drafter.config)
    if config.num_layers > 1 or config.norm_features:
        raise UserError(
            f"export vllm: wanted one layer and no norm_features, got {config.num_layers} and {config.norm_features}; use export.formats=[]"
        )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items() if name in shapes}
    got = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if got != shapes:
        raise UserError(f"export vllm: wanted tensors {shapes}, got {got}")
    if "d2t" in tensors:
        ids = drafter.draft_ids
        if int(ids.min()) < 0 or int(ids.max()) >= config.target_vocab_size or bool((ids[1:] <= ids[:-1]).any()) or not bool(drafter.t2d[ids].all()):
            raise UserError("export vllm: wanted d2t as offsets to ascending target ids that t2d marks, got others; the checkpoint is damaged")
    draft = folder.with_name(folder.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "config.json").write_text(json.dumps(vllm_config(config), indent=2) + "\n")
    (draft / "contract.json").write_text(json.dumps({**contract, "native_config": dataclasses.asdict(config)}, indent=2) + "\n")
    (draft / "README.md").write_text(f"# EAGLE-3 drafter\n\nMade by draftsmith. Launch:\n\n    {LAUNCH.format(folder=folder, depth=depth)}\n")
    for path in draft.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)


def read(folder: Path) -> Eagle3:
    """The head of an exported folder, for the round trip; bind it to its target before use. Raises UserError if tensors are missing or misshapen."""
    values = json.loads((folder / "config.json").read_text())
    native = json.loads((folder / "contract.json").read_text())["native_config"]
    native["taps"] = values["eagle_aux_hidden_state_layer_ids"]
    config = Eagle3Config(**native)
    tensors, shapes = load_file(folder / "model.safetensors"), expected_shapes(config)
    wrong = [name for name in {*tensors, *shapes} if name not in tensors or name not in shapes or list(tensors[name].shape) != shapes[name]]
    if wrong:
        raise UserError(f"export {folder}: wanted the tensors of vLLM's EAGLE-3 layout, got {', '.join(sorted(wrong))} missing, extra or misshapen")
    head = Eagle3(config)
    head.load_state_dict(tensors, strict="d2t" in tensors)
    return head.eval()
