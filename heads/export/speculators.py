"""The speculators format, which vLLM serves by the drafter's name alone.

Its reference code wants `embed_tokens.weight`, else it draws random ones.
"""

from __future__ import annotations

from typing import Any

from .common import Engine, Layout, Loader, Source, TargetFacts, first_refusal, layer_config, one_plain_layer, raw_taps, shared_embeddings
from .conformance import (
    Exported,
    Problems,
    decoder_keys,
    good_maps,
    has,
    has_tensors,
    layer_sizes_of,
    layers_at,
    layers_exist,
    mask_token,
    same_hidden_size,
    says,
)
from .table import SPECULATORS, Sizes, Spec
from .vllm import key_norms_note

VERSION = "0.9.0"
LAUNCH = "vllm serve {folder}"
DECODER_OLD_KEYS = ("rope_theta", "torch_dtype", "dtype")  # transformers' configs of today have them elsewhere


def shared_keys(source: Source, kind: str, architecture: str, model_type: str) -> dict[str, Any]:
    """What every format of this family has. draft_vocab_size is always written: its default is 32000."""
    facts = source.facts
    decoder = {key: value for key, value in layer_config(source, model_type).items() if key not in DECODER_OLD_KEYS}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": source.dtype_name,
        "tie_word_embeddings": False,
        "draft_vocab_size": source.config.draft_vocab_size,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": source.tuning.tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": facts.name, "architectures": [facts.architecture]},
        },
        "transformer_layer_config": decoder,
    }


def eagle3_keys(source: Source, kind: str, architecture: str) -> dict[str, Any]:
    """norm_before_residual is written: its default is true in one reader and false in another."""
    config = shared_keys(source, kind, architecture, "llama") | {
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": source.config.norm_features,
        "norm_output": source.config.norm_features,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(source.config.taps),
    }
    return config


def with_tables(source: Source) -> dict[str, Any]:
    """Own tensors, the target's embeddings, and the draft vocabulary's maps."""
    return source.tensors(SPECULATORS) | {"embed_tokens.weight": source.embeddings()} | (source.maps() if source.cut else {})


def eagle3(source: Source) -> Layout:
    """EAGLE-3 and 3.1."""
    return Layout(LAUNCH, eagle3_keys(source, "eagle3", "Eagle3DraftModel"), with_tables(source))


def p_eagle(source: Source) -> Layout:
    """P-EAGLE."""
    config = eagle3_keys(source, "peagle", "PEagleDraftModel") | {"mask_token_id": source.config.mask_token_id}
    return Layout(LAUNCH, config, with_tables(source))


def block_keys(source: Source, kind: str, architecture: str) -> dict[str, Any]:
    """sliding_window_non_causal: vLLM makes all layers causal where it is false."""
    return shared_keys(source, kind, architecture, "qwen3") | {
        "block_size": source.config.block_size,
        "aux_hidden_state_layer_ids": list(source.config.taps),
        "mask_token_id": source.config.mask_token_id,
        "sliding_window_non_causal": True,
    }


def with_output_layer(source: Source) -> dict[str, Any]:
    """The output layer too: the rows of the draft vocabulary."""
    return with_tables(source) | {"lm_head.weight": source.output_rows()}


def dflash(source: Source) -> Layout:
    """DFlash."""
    config = block_keys(source, "dflash", "DFlashDraftModel") | {"sample_from_anchor": False}
    return Layout(LAUNCH, config, with_output_layer(source), notes=key_norms_note(source))


def dspark(source: Source) -> Layout:
    """DSpark: drafts from the anchor's position too."""
    config = block_keys(source, "dspark", "DSparkDraftModel") | {
        "sample_from_anchor": True,
        "markov_rank": source.config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    notes = ["Needs vLLM's second model runner: VLLM_USE_V2_MODEL_RUNNER=1."]
    return Layout(LAUNCH, config, with_output_layer(source), notes=notes)


def no_qwen3_mtp(config: Any, facts: TargetFacts) -> str | None:
    """Its MTP layers are those of Qwen3 and its successors."""
    return "computes MTP layers with Qwen3's norms of queries and keys, which this head's layer has not"


def sizes(exported: Exported) -> Sizes:
    """By the nested config."""
    config = exported.config
    return layer_sizes_of(
        config.get("transformer_layer_config", {}), config.get("draft_vocab_size", 32000), int(exported.target["vocab_size"]), config
    )


def required(exported: Exported) -> Problems:
    """What vLLM cannot start without."""
    config = exported.config
    nested = config.get("speculators_config", {})
    methods = nested.get("proposal_methods") or [{}]
    if not isinstance(methods[0].get("speculative_tokens"), int):
        yield "config speculators_config.proposal_methods: wanted speculative_tokens in the first, got none"
    if not nested.get("verifier", {}).get("name_or_path"):
        yield "config speculators_config.verifier.name_or_path: wanted the target's name, got nothing"
    if "model_type" in config:
        yield f"config model_type: wanted it in transformer_layer_config only, got {config['model_type']} at the top"
    yield from decoder_keys(config.get("transformer_layer_config", {}), exported.target)


def tables(s: Sizes) -> dict[str, Spec]:
    """The target's embeddings."""
    return {"embed_tokens.weight": Spec((s.target_vocab, s.hidden))}


def tables_and_output(s: Sizes) -> dict[str, Spec]:
    """And an output layer."""
    return tables(s) | {"lm_head.weight": Spec((s.vocab, s.hidden))}


EAGLE3_RULES = (
    required,
    has("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    says(norm_before_residual=False, tie_word_embeddings=False),
    layers_exist,
    layers_at("eagle_aux_hidden_state_layer_ids", offset=0),
    good_maps,
    same_hidden_size,
)
BLOCK_RULES = (
    required,
    has("draft_vocab_size", "block_size"),
    says(sliding_window_non_causal=True, tie_word_embeddings=False),
    mask_token("mask_token_id"),
    layers_exist,
    layers_at("aux_hidden_state_layer_ids", offset=0),
    good_maps,
    same_hidden_size,
)

ENGINE = Engine(
    name="speculators",
    title=f"speculators {VERSION} and vLLM 0.32",
    loaders={
        "eagle3": Loader(
            eagle3, (*EAGLE3_RULES, says(speculators_model_type="eagle3"), has_tensors("eagle3", SPECULATORS, sizes, extra=tables)), raw_taps
        ),
        "p_eagle": Loader(
            p_eagle,
            (
                *EAGLE3_RULES,
                says(speculators_model_type="peagle"),
                mask_token("mask_token_id"),
                has_tensors("p_eagle", SPECULATORS, sizes, extra=tables),
            ),
            first_refusal(raw_taps, lambda config, facts: one_plain_layer(config, facts) if config.norm_features else None),
        ),
        "dflash": Loader(
            dflash,
            (
                *BLOCK_RULES,
                says(speculators_model_type="dflash", sample_from_anchor=False),
                has_tensors("dflash", sizes=sizes, extra=tables_and_output),
            ),
            raw_taps,
        ),
        "dspark": Loader(
            dspark,
            (
                *BLOCK_RULES,
                says(speculators_model_type="dspark", sample_from_anchor=True, confidence_head_with_markov=True, markov_head_type="vanilla"),
                has_tensors("dspark", sizes=sizes, extra=tables_and_output),
            ),
            raw_taps,
        ),
        "mtp": Loader(eagle3, (), first_refusal(no_qwen3_mtp, shared_embeddings)),
    },
    why_not={
        "eagle1": "it has no such format any more",
        "medusa": "it has no such format any more",
        "mlp_speculator": "it has no such format any more",
        "draft_model": "any causal LM's folder serves as it is",
    },
)
