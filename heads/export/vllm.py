"""vLLM 0.32. Its EAGLE loaders take incomplete checkpoints without a word; it tells a method by the folder's path before it reads the config.

Layer indices: top-level `eagle_aux_hidden_state_layer_ids` is the canonical k; the nested list, k - 1, is there for its length and for SGLang;
`target_layer_ids` of DFlash and DSpark are k - 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    layer_config,
    raw_taps,
    save_draft,
    save_target,
    shared_embeddings,
    target_like_layer,
    widened_note,
)
from .conformance import (
    Exported,
    Problems,
    compared,
    draft_vocabulary,
    explicit_bias,
    final_norm,
    good_maps,
    has,
    has_tensors,
    indexed,
    lacks,
    layer_sizes_of,
    layers_at,
    layers_exist,
    mask_token,
    path_without,
    plain_decoder,
    same_hidden_size,
    says,
    weights_there,
)
from .table import MIMO, Sizes, Spec, medusa_names, renamed, tensors

SERVE = "vllm serve {target} --speculative-config "


def command(method: str, **more: Any) -> str:
    """The launch command with placeholders."""
    keys = {"method": f'"{method}"', "model": '"{folder}"', "num_speculative_tokens": "{tokens}", **{k: str(v).lower() for k, v in more.items()}}
    return SERVE + "'{{" + ", ".join(f'"{key}": {value}' for key, value in keys.items()) + "}}'"


# Draft models


def draft_model(source: Source) -> Layout:
    """A causal LM with as many rows as the target's config.json says: nothing else is compared."""
    same = source.shares_tokenizer
    if same:
        check_vocabulary(source)
    return Layout(
        command("draft_model") if same else command("draft_model", use_heterogeneous_vocab=True),
        model=lambda folder: save_draft(source, folder, source.facts.vocab_size if same else None),
        notes=[] if same else ["Another tokenizer than the target's: vLLM drafts with the tokens that both have, greedily."],
    )


def pard(source: Source) -> Layout:
    """A draft model that drafts all tokens in one pass; vLLM knows its mask token from config.json."""
    check_vocabulary(source)
    return Layout(
        command("draft_model", parallel_drafting=True),
        model=lambda folder: save_draft(source, folder, source.facts.vocab_size),
    )


# Heads


def eagle1(source: Source) -> Layout:
    """fc reads [embedding, feature]. `bias` must be false: Llama's code would read it as the attention's."""
    config = {"architectures": ["LlamaForCausalLM"], **layer_config(source), "bias": False}
    return Layout(command("eagle"), config, source.tensors(), notes=widened_note(source))


def eagle3_config(source: Source) -> dict[str, Any]:
    """Of EAGLE-3 and P-EAGLE; SGLang and llama.cpp's converter read the same."""
    taps = list(source.config.taps)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(source),
        "draft_vocab_size": source.config.draft_vocab_size,
        "target_hidden_size": source.facts.hidden_size,
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in taps], "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    if source.config.norm_features:
        config |= {"fc_norm": True, "norm_output": True}
    return config


def eagle3_tensors(source: Source) -> dict[str, Any]:
    """With the draft vocabulary's maps if it is a part of the target's: for the whole vocabulary vLLM refuses them."""
    return source.tensors() | (source.maps() if source.cut else {}) | own_embeddings(source)


def own_embeddings(source: Source) -> dict[str, Any]:
    """vLLM shares the target's table; a table that scales its rows is shipped, scaled."""
    return {"embed_tokens.weight": source.embeddings()} if source.facts.scaled_embeddings else {}


def eagle3(source: Source) -> Layout:
    """EAGLE-3 and 3.1."""
    return Layout(command("eagle3"), eagle3_config(source), eagle3_tensors(source))


def p_eagle(source: Source) -> Layout:
    """EAGLE-3's architecture, drafting in parallel."""
    config = eagle3_config(source) | {"mask_token_id": source.config.mask_token_id, "block_size": source.config.block_size}
    return Layout(command("eagle3", parallel_drafting=True), config, eagle3_tensors(source))


def medusa(source: Source) -> Layout:
    """The names of the first release. A draft vocabulary is filled up: vLLM's token_map goes with one common output layer only."""
    sizes, names = source.sizes, medusa_names(source.sizes)
    tensors = {names[name]: tensor for name, tensor in source.tensors().items()}
    if source.cut:
        tensors = {name: source.uncut(tensor) if name.endswith(f".{sizes.layers}.weight") else tensor for name, tensor in tensors.items()}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": sizes.count,
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "vocab_size": source.facts.vocab_size,
        "truncated_vocab_size": source.facts.vocab_size,
        "medusa_fc_bias": True,
        "dtype": source.dtype_name,
    }
    notes = [f"At most {sizes.count} speculative tokens, one a head.", *uncut_note(source)]
    return Layout(command("medusa"), config, tensors, notes=notes)


def uncut_note(source: Source) -> list[str]:
    """Said where output layers are filled up to the whole vocabulary."""
    if not source.cut:
        return []
    return [
        f"The heads draft from {source.config.draft_vocab_size} of {source.config.target_vocab_size} tokens; the other rows are the mean of these, "
        "so that the best token is the same as without them."
    ]


def block_config(source: Source, architecture: str) -> dict[str, Any]:
    """Of DFlash and DSpark: a Qwen3 decoder, bidirectional within the block."""
    return {
        "architectures": [architecture],
        **layer_config(source, "qwen3"),
        "layer_types": ["full_attention"] * source.config.num_layers,
        "draft_vocab_size": source.config.draft_vocab_size,
        "target_hidden_size": source.facts.hidden_size,
        "num_target_layers": source.facts.num_layers,
        "block_size": source.config.block_size,
    }


def block_tensors(source: Source) -> dict[str, Any]:
    """With the target's rows of the draft vocabulary as an output layer, if that is a part of the target's."""
    more = {"lm_head.weight": source.output_rows(), **source.maps()} if source.cut else {}
    return source.tensors() | more | own_embeddings(source)


def dflash(source: Source) -> Layout:
    """DFlash."""
    ids = [k - 1 for k in source.config.taps]
    config = block_config(source, "DFlashDraftModel") | {
        "dflash_config": {"mask_token_id": source.config.mask_token_id, "target_layer_ids": ids, "causal": False}
    }
    notes = [f"At most {source.config.block_size - 1} speculative tokens.", *key_norms_note(source)]
    return Layout(command("dflash"), config, block_tensors(source), notes=notes)


def key_norms_note(source: Source) -> list[str]:
    """Said of DFlash heads of several layers, which vLLM computes right on GPUs only."""
    if source.config.num_layers == 1:
        return []
    return [
        "vLLM 0.32 built for CPUs norms the context's keys of all layers by the first layer's k_norm, so that it drafts a little worse there "
        "(accepted 0.186 of the drafted tokens in place of 0.189 for a briefly trained head); its builds for GPUs take each layer's own."
    ]


def whole_dflash(source: Source, launch: str) -> Layout:
    """DFlash for engines without a draft vocabulary: it drafts with all rows of the target's output layer."""
    layout = dflash(source)
    for name in ("lm_head.weight", "d2t", "t2d"):
        layout.tensors.pop(name, None)
    assert layout.config is not None
    layout.config["draft_vocab_size"] = source.facts.vocab_size
    layout.launch, layout.notes = launch, widened_note(source)
    return layout


def dspark(source: Source) -> Layout:
    """DSpark: drafts from the anchor's position too."""
    config = block_config(source, "Qwen3DSparkModel") | {
        "target_layer_ids": [k - 1 for k in source.config.taps],
        "mask_token_id": source.config.mask_token_id,
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "markov_rank": source.config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    notes = [f"At most {source.config.block_size} speculative tokens.", "Needs vLLM's second model runner: VLLM_USE_V2_MODEL_RUNNER=1."]
    return Layout(command("dspark"), config, block_tensors(source), notes=notes)


def mtp(source: Source) -> Layout:
    """The target as MiMo's architecture, Qwen2 with an MTP layer, which computes what a Llama target does if its biases are zero."""
    facts, head = source.facts, source.tensors(MIMO)
    projection = head["model.mtp_layers.0.input_proj.weight"]
    head["model.mtp_layers.0.input_proj.weight"] = torch.cat(projection.chunk(2, dim=1)[::-1], dim=1).contiguous()  # reads [hidden, embedding]
    more = dict(head)
    for name in ("q_proj", "k_proj", "v_proj"):
        width = source.sizes.query if name == "q_proj" else source.sizes.key
        more[f"model.mtp_layers.0.self_attn.{name}.bias"] = torch.zeros(width, dtype=projection.dtype)
        if facts.model_type == "llama":
            for index in range(facts.num_layers):
                more[f"model.layers.{index}.self_attn.{name}.bias"] = torch.zeros(width, dtype=source.target.dtype)
    rows = source.target.lm_head.weight
    assert isinstance(rows, Tensor)
    if source.target.embeddings.weight is rows:
        more["lm_head.weight"] = rows.detach().cpu().clone()
    keys = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return Layout(
        'vllm serve {folder} --speculative-config \'{{"method": "mtp", "num_speculative_tokens": 1}}\'',
        model=lambda folder: save_target(source, folder, more, keys, without=("mlp_bias", "attention_bias", "pretraining_tp", "layer_types")),
        notes=[
            "This folder is the target, as architecture MiMoForCausalLM, with the head inside: serve it in the target's place.",
            "vLLM computes one token a round with this architecture.",
            *widened_note(source),
        ],
        tokens=1,
    )


def mimo_refusal(config: Any, facts: TargetFacts) -> str | None:
    """What MiMo's code computes otherwise than the head, or than the target."""
    if not config.raw_feature:
        return "computes MTP layers of this kind as MiMo does, on features before the final norm; train with drafter.raw_feature=true"
    if facts.model_type not in ("llama", "qwen2"):
        return f"has MTP layers of Llama's kind for targets like Llama and Qwen2 only, got {facts.model_type}"
    if any(facts.layer.get(key) for key in ("mlp_bias", "sliding_window")) or (facts.model_type == "llama" and facts.layer.get("attention_bias")):
        return "has no MTP layers for targets with an MLP or output bias, or a sliding window"
    if facts.layer["head_dim"] * facts.layer["num_attention_heads"] != facts.hidden_size:
        return "has MTP layers for targets whose heads make up the hidden size only"
    return target_like_layer(config, facts)


def mimo_tensors(exported: Exported) -> Problems:
    """The head's tensors, with the zero biases that the architecture has, in the index that loaders follow."""
    config, vocab = exported.config, int(exported.target["vocab_size"])
    width = exported.target["layer"]["head_dim"]
    sizes = layer_sizes_of({**config, "head_dim": width}, vocab, vocab, config)
    wanted = {renamed(name, MIMO): spec for name, spec in tensors("mtp", sizes).items()}
    for name, rows in (("q_proj", sizes.query), ("k_proj", sizes.key), ("v_proj", sizes.key)):
        wanted[f"model.mtp_layers.0.self_attn.{name}.bias"] = Spec((rows,))
        for index in range(config.get("num_hidden_layers", 0)):
            wanted[f"model.layers.{index}.self_attn.{name}.bias"] = Spec((rows,))
    wanted["lm_head.weight"] = Spec((vocab, sizes.hidden))
    yield from compared(exported, wanted, {name: spec for name, spec in exported.specs.items() if "mtp_layers" in name or name in wanted})
    yield from indexed(exported)


def before_final_norm(exported: Exported) -> Problems:
    """MiMo's model gives its MTP layer the hidden state before the final norm."""
    if exported.taps != [exported.target["num_layers"]]:
        yield f"taps: wanted [{exported.target['num_layers']}] (before the final norm), got {exported.taps}"


def block_extra(sizes: Sizes) -> dict[str, Spec]:
    """The output layer of a draft vocabulary."""
    return {"lm_head.weight": Spec((sizes.vocab, sizes.hidden))} if sizes.vocab < sizes.target_vocab else {}


def medusa_sizes(exported: Exported) -> Sizes:
    """By Medusa's config.json, which vLLM reads through keys that hold `num` and `heads` or `layers`."""
    config, vocab = exported.config, int(exported.target["vocab_size"])

    def read(word: str) -> int:
        return next((int(value) for key, value in config.items() if "num" in key and word in key), 0)

    return Sizes(hidden=config.get("hidden_size", 0), vocab=vocab, target_vocab=vocab, count=read("heads"), layers=read("layers"))


def no_fc_bias(config: Any, facts: TargetFacts) -> str | None:
    """vLLM's EAGLE-1 has no bias in fc, and leaves out one that is shipped."""
    return "leaves out the bias of fc, which this head has; train without it" if getattr(config, "fc_bias", False) else None


COUNTED = (
    layers_exist,
    layers_at("eagle_aux_hidden_state_layer_ids", offset=0),
    layers_at("eagle_config", "eagle_aux_hidden_state_layer_ids", offset=-1),
)
EAGLE3_RULES = (
    plain_decoder,
    has("draft_vocab_size", "num_aux_hidden_states"),
    says(norm_before_residual=False),
    *COUNTED,
    good_maps,
    same_hidden_size,
)
BLOCK_RULES = (plain_decoder, says(model_type="qwen3"), has("draft_vocab_size", "block_size"), layers_exist, good_maps, same_hidden_size)
EMBEDDINGS = ("embed_tokens.weight",)
DSPARK_RULES = (
    *BLOCK_RULES,
    has_tensors("dspark", extra=block_extra, optional=EMBEDDINGS),
    says(
        architectures=["Qwen3DSparkModel"],
        sample_from_anchor=True,
        dspark_bonus_anchor=False,
        confidence_head_with_markov=True,
        enable_confidence_head=True,
    ),
    layers_at("target_layer_ids", offset=-1),
    mask_token("mask_token_id"),
)

ENGINE = Engine(
    name="vllm",
    title="vLLM 0.32",
    loaders={
        DRAFT_MODEL: Loader(draft_model, (draft_vocabulary, weights_there, path_without("draft_model"))),
        PARD: Loader(pard, (draft_vocabulary, weights_there, path_without("draft_model"))),
        "medusa": Loader(
            medusa,
            (
                has_tensors("medusa", sizes=medusa_sizes, maps="never", names=medusa_names),
                says(model_type="medusa", medusa_fc_bias=True),
                has("num_heads", "num_hidden_layers", "hidden_size"),
                lacks("original_lm_head"),
                final_norm,
                same_hidden_size,
                path_without("medusa"),
            ),
        ),
        "eagle1": Loader(
            eagle1,
            (
                plain_decoder,
                explicit_bias,
                has_tensors("eagle1", maps="never"),
                says(architectures=["LlamaForCausalLM"], num_hidden_layers=1),
                final_norm,
                same_hidden_size,
            ),
            first_refusal(no_fc_bias, shared_embeddings),
        ),
        "eagle3": Loader(eagle3, (*EAGLE3_RULES, has_tensors("eagle3", optional=EMBEDDINGS)), raw_taps),
        "p_eagle": Loader(p_eagle, (*EAGLE3_RULES, has_tensors("p_eagle", optional=EMBEDDINGS), mask_token("mask_token_id")), raw_taps),
        "dflash": Loader(
            dflash,
            (
                *BLOCK_RULES,
                has_tensors("dflash", extra=block_extra, optional=EMBEDDINGS),
                says(architectures=["DFlashDraftModel"]),
                layers_at("dflash_config", "target_layer_ids", offset=-1),
                mask_token("dflash_config", "mask_token_id"),
            ),
            raw_taps,
        ),
        "dspark": Loader(dspark, DSPARK_RULES, raw_taps),
        "mtp": Loader(
            mtp,
            (
                mimo_tensors,
                says(architectures=["MiMoForCausalLM"], model_type="qwen2", num_nextn_predict_layers=1, tie_word_embeddings=False),
                before_final_norm,
                path_without("mtp"),
            ),
            first_refusal(mimo_refusal, shared_embeddings),
        ),
    },
    why_not={"mlp_speculator": "its loader is disabled", "hydra": "it has no loader for it"},
)
