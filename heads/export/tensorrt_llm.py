"""TensorRT-LLM's PyTorch backend. The layers to capture are an argument of the launch, as outputs counted from 0 (k - 1)."""

from __future__ import annotations

from typing import Any

from . import vllm
from .common import (
    DRAFT_MODEL,
    PARD,
    Engine,
    Layout,
    Loader,
    Source,
    TargetFacts,
    check_vocabulary,
    first_refusal,
    one_plain_layer,
    raw_taps,
    save_draft,
    shared_embeddings,
)
from .conformance import (
    Exported,
    Problems,
    draft_vocabulary,
    good_maps,
    has,
    has_tensors,
    layers_exist,
    plain_decoder,
    same_hidden_size,
    says,
    weights_there,
)

SERVE = "trtllm-serve {target} --extra_llm_api_options extra.yml    # extra.yml: "


def draft_model(source: Source) -> Layout:
    """A causal LM with the target's tokenizer."""
    check_vocabulary(source)
    launch = SERVE + 'speculative_config: {{decoding_type: DraftTarget, max_draft_len: {tokens}, speculative_model: "{folder}"}}'
    return Layout(launch, model=lambda folder: save_draft(source, folder, source.facts.vocab_size))


def pard(source: Source) -> Layout:
    """A draft model that drafts in parallel."""
    layout = draft_model(source)
    layout.launch = SERVE + 'speculative_config: {{decoding_type: PARD, max_draft_len: {tokens}, speculative_model: "{folder}"}}'
    return layout


def eagle3(source: Source) -> Layout:
    """EAGLE-3."""
    layout, layers = vllm.eagle3(source), [k - 1 for k in source.config.taps]
    keys = f'decoding_type: Eagle3, max_draft_len: {{tokens}}, speculative_model: "{{folder}}", eagle3_layers_to_capture: {layers}'
    layout.launch = SERVE + "speculative_config: {{" + keys + "}}"
    return layout


def large_enough(config: Any, facts: TargetFacts) -> str | None:
    """Its default layers collapse on small targets."""
    return None if facts.num_layers > 5 else f"wanted a target of more than 5 layers, got {facts.num_layers}"


def no_llama_mtp(config: Any, facts: TargetFacts) -> str | None:
    """Its MTP layers are those of DeepSeek and its like."""
    return f"builds MTP layers as the target's own kind (DeepSeek's attention and experts) for targets that have them, not for {facts.model_type}"


def told_layers(exported: Exported) -> Problems:
    """The launch command tells the layers, since config.json is not read for them."""
    wanted = f"eagle3_layers_to_capture: {[k - 1 for k in exported.taps]}"
    if wanted not in exported.about.get("launch", ""):
        yield f"launch: wanted {wanted}, got {exported.about.get('launch')}"


ENGINE = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    loaders={
        DRAFT_MODEL: Loader(draft_model, (draft_vocabulary, weights_there)),
        PARD: Loader(pard, (draft_vocabulary, weights_there)),
        "eagle3": Loader(
            eagle3,
            (
                plain_decoder,
                has("draft_vocab_size"),
                says(model_type="llama", norm_before_residual=False, tie_word_embeddings=False),
                layers_exist,
                told_layers,
                has_tensors("eagle3"),
                good_maps,
                same_hidden_size,
            ),
            first_refusal(raw_taps, large_enough, one_plain_layer, shared_embeddings),
        ),
        "mtp": Loader(eagle3, (), no_llama_mtp),
    },
    why_not={"medusa": "its loader is in the legacy backend only", "eagle1": "its loader is in the legacy backend only"},
)
