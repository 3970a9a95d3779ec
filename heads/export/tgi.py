"""Text Generation Inference: Medusa and the MLP speculator, which no other engine loads any more. Its repository is in maintenance."""

from __future__ import annotations

from typing import Any

from . import vllm
from .common import Engine, Layout, Loader, Source, TargetFacts
from .conformance import Exported, file_named, final_norm, has, has_tensors, lacks, same_hidden_size, says
from .table import SPECULATOR, Sizes, medusa_names

LAUNCH = "text-generation-launcher --model-id {folder} --speculate {tokens}"
MEDUSA_FILE = "medusa_lm_head.safetensors"


def medusa(source: Source) -> Layout:
    """`architectures` must be absent: by that TGI tells Medusa. vLLM loads the same folder, since it reads the old keys too."""
    layout, sizes = vllm.medusa(source), source.sizes
    config = {
        "medusa_num_heads": sizes.count,
        "medusa_num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "base_model_name_or_path": source.facts.name,
        "medusa_fc_bias": True,
    }
    return Layout(LAUNCH, config, layout.tensors, MEDUSA_FILE, layout.notes)


def one_block(config: Any, facts: TargetFacts) -> str | None:
    """TGI shards heads of one block only."""
    return None if config.num_layers == 1 else f"wanted one block a head, got {config.num_layers}; train with drafter.num_layers=1"


def mlp_speculator(source: Source) -> Layout:
    """Tied weights only: TGI multiplies a list of tables where they are not."""
    config, vocab = source.config, source.facts.vocab_size
    tensors = source.tensors(SPECULATOR)
    if source.cut:
        tensors = {name: source.uncut(tensor) if name.startswith("speculator.head.") else tensor for name, tensor in tensors.items()}
    values = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": source.facts.name,
        "n_predict": config.heads,
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size,
        "top_k_tokens_per_head": [1] * config.heads,
        "n_candidates": 1,
        "tie_weights": True,
        "scale_input": False,
        "vocab_size": vocab,
        "dtype": source.dtype_name,
        "torch_dtype": source.dtype_name,
    }
    return Layout(LAUNCH, values, tensors, notes=vllm.uncut_note(source))


def tied(config: Any, facts: TargetFacts) -> str | None:
    """Untied speculators crash TGI at their first token."""
    return None if config.tie_weights else "computes tied weights only; train with drafter.tie_weights=true"


def mlp_sizes(exported: Exported) -> Sizes:
    """By the speculator's own keys."""
    config = exported.config
    return Sizes(
        hidden=config.get("emb_dim", 0),
        vocab=config.get("vocab_size", 0),
        target_vocab=int(exported.target["vocab_size"]),
        inner=config.get("inner_dim", 0),
        count=config.get("n_predict", 0),
        tied=config.get("tie_weights", False),
    )


def candidates(exported: Exported) -> Any:
    """One count a head."""
    config = exported.config
    if len(config.get("top_k_tokens_per_head", [])) != config.get("n_predict"):
        yield f"config top_k_tokens_per_head: wanted {config.get('n_predict')} numbers (n_predict), got {config.get('top_k_tokens_per_head')}"


ENGINE = Engine(
    name="tgi",
    title="Text Generation Inference",
    loaders={
        "medusa": Loader(
            medusa,
            (
                has_tensors("medusa", sizes=vllm.medusa_sizes, maps="never", names=medusa_names),
                lacks("architectures"),
                has("base_model_name_or_path", "hidden_size"),
                says(medusa_num_layers=1, medusa_fc_bias=True),
                file_named(MEDUSA_FILE),
                final_norm,
                same_hidden_size,
            ),
            one_block,
        ),
        "mlp_speculator": Loader(
            mlp_speculator,
            (
                has_tensors("mlp_speculator", SPECULATOR, mlp_sizes, maps="never"),
                says(architectures=["MLPSpeculatorPreTrainedModel"], model_type="mlp_speculator", tie_weights=True, scale_input=False),
                has("base_model_name_or_path", "inner_dim"),
                candidates,
                final_norm,
            ),
            tied,
        ),
    },
)
