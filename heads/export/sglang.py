"""SGLang 0.5. It reads tapped layers from the nested list only, as outputs of layers counted from 0 (k - 1), and always drafts with the target's
embeddings. A missing `fc.bias` of EAGLE-1 would be drawn at random, so that zeros are shipped.
"""

from __future__ import annotations

from typing import Any

import torch

from . import vllm
from .common import (
    DRAFT_MODEL,
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
    whole_vocabulary,
)
from .conformance import (
    DFLASH_RULES,
    Exported,
    draft_vocabulary,
    explicit_bias,
    final_norm,
    good_maps,
    has,
    has_tensors,
    lacks,
    layers_at,
    layers_exist,
    mask_token,
    plain_decoder,
    same_hidden_size,
    says,
    uncut_vocabulary,
    weights_there,
)
from .table import Sizes, Spec


def command(algorithm: str, flags: str = "") -> str:
    """The launch command with placeholders."""
    base = "python -m sglang.launch_server --model-path {target} --speculative-algorithm " + algorithm + " --speculative-draft-model-path {folder}"
    return base + (" " + flags if flags else "")


CHAIN = "--speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {nodes}"
TOKEN_MAP = "token_map.pt"  # target ids of the draft vocabulary
TREE = "--speculative-num-steps {tokens} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"


def draft_model(source: Source) -> Layout:
    """A causal LM with the target's tokenizer."""
    check_vocabulary(source)
    return Layout(command("STANDALONE", CHAIN), model=lambda folder: save_draft(source, folder, source.facts.vocab_size))


def eagle1(source: Source) -> Layout:
    """EAGLE-1, drafting trees as EAGLE-2."""
    layout = vllm.eagle1(source)
    assert layout.config is not None
    layout.config["architectures"] = ["LlamaForCausalLMEagle"]
    layout.tensors.setdefault("fc.bias", torch.zeros(source.sizes.hidden, dtype=layout.tensors["fc.weight"].dtype))
    layout.launch, layout.notes = command("EAGLE", TREE), []
    if source.cut:
        assert source.head is not None
        layout.files[TOKEN_MAP] = source.cast(source.head.draft_ids)
        layout.launch += " --speculative-token-map {folder}/" + TOKEN_MAP
    return layout


def eagle3(source: Source) -> Layout:
    """EAGLE-3. vLLM's layout, whose nested list of layers is SGLang's."""
    layout = vllm.eagle3(source)
    layout.launch = command("EAGLE3", TREE)
    return layout


def dflash(source: Source) -> Layout:
    """DFlash."""
    return vllm.whole_dflash(source, command("DFLASH", "--speculative-dflash-block-size {block}"))


def dspark(source: Source) -> Layout:
    """DSpark."""
    layout = vllm.dspark(source)
    layout.launch, layout.notes = command("DSPARK"), []
    return layout


def no_own_norms(config: Any, facts: TargetFacts) -> str | None:
    """SGLang's EAGLE-3 has one layer for Llama drafters."""
    return one_plain_layer(config, facts) if config.num_layers > 1 else None


def with_bias(s: Sizes) -> dict[str, Spec]:
    """EAGLE-1's fc has a bias here, always."""
    return {"fc.bias": Spec((s.hidden,))}


def token_map(exported: Exported) -> Any:
    """The draft vocabulary's ids, where there is one and the command names it."""
    path = exported.folder / TOKEN_MAP
    if TOKEN_MAP in exported.about.get("launch", "") and not path.is_file():
        yield f"file {TOKEN_MAP} is missing"
    if path.is_file():
        ids = torch.load(path, weights_only=True)
        if ids.dtype != torch.int64 or not 0 <= int(ids.min()) <= int(ids.max()) < exported.target["vocab_size"] or len(ids.unique()) < len(ids):
            yield f"{TOKEN_MAP}: wanted distinct int64 ids of the target's vocabulary, got others"


ENGINE = Engine(
    name="sglang",
    title="SGLang 0.5",
    loaders={
        DRAFT_MODEL: Loader(draft_model, (draft_vocabulary, weights_there)),
        "eagle1": Loader(
            eagle1,
            (
                plain_decoder,
                explicit_bias,
                token_map,
                has_tensors("eagle1", maps="never", extra=with_bias),
                says(architectures=["LlamaForCausalLMEagle"], model_type="llama", num_hidden_layers=1),
                final_norm,
                same_hidden_size,
            ),
            shared_embeddings,
        ),
        "eagle3": Loader(
            eagle3,
            (
                plain_decoder,
                has("draft_vocab_size"),
                says(architectures=["LlamaForCausalLMEagle3"], model_type="llama", norm_before_residual=False, tie_word_embeddings=False),
                layers_exist,
                layers_at("eagle_config", "eagle_aux_hidden_state_layer_ids", offset=-1),
                has_tensors("eagle3"),
                good_maps,
                same_hidden_size,
            ),
            first_refusal(raw_taps, no_own_norms, shared_embeddings),
        ),
        "dflash": Loader(dflash, DFLASH_RULES, first_refusal(raw_taps, shared_embeddings)),
        "dspark": Loader(
            dspark,
            (
                plain_decoder,
                says(model_type="qwen3"),
                layers_exist,
                layers_at("target_layer_ids", offset=-1),
                mask_token("mask_token_id"),
                has_tensors("dspark", maps="never"),
                lacks("original_lm_head"),
                uncut_vocabulary,
                same_hidden_size,
            ),
            first_refusal(raw_taps, whole_vocabulary, shared_embeddings),
        ),
    },
    why_not={"medusa": "it was removed there", "p_eagle": "it has no loader for it", "mtp": "it loads native MTP layers of its own targets only"},
)
