"""transformers' own generate: assistant models, DFlash by the one architecture that it has for it, and MTP layers behind the target's.

Its MTP steps each have a layer and a cache of their own, where our one layer has one for all steps: one token a round is the same, more are not.
"""

from __future__ import annotations

from typing import Any

from .common import (
    DRAFT_MODEL,
    PARD,
    Engine,
    Layout,
    Loader,
    Source,
    TargetFacts,
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
    config_sizes,
    final_norm,
    has,
    has_tensors,
    indexed,
    layer_sizes_of,
    layers_at,
    layers_exist,
    mask_token,
    plain_decoder,
    same_hidden_size,
    says,
    tokenizer_beside,
    weights_there,
)
from .table import MUSE, hf_mtp, renamed, tensors

LOAD = 'from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; t = M.from_pretrained("{target}"); k = T.from_pretrained("{target}")'


def run(setup: str, arguments: str) -> str:
    """A line of Python."""
    call = f'print(k.decode(t.generate(**k("...", return_tensors="pt"), {arguments})[0]))'
    return f"python -c '{LOAD}; {setup}; {call}'"


def draft_model(source: Source) -> Layout:
    """An assistant model, as it is."""
    setup, arguments = 'd = M.from_pretrained("{folder}"); d.generation_config.num_assistant_tokens = {tokens}', "assistant_model=d"
    notes = []
    if not source.shares_tokenizer:
        setup, arguments = setup + '; a = T.from_pretrained("{folder}")', arguments + ", tokenizer=k, assistant_tokenizer=a"
        notes = ["Another tokenizer than the target's: greedy drafts only."]
    return Layout(run(setup, arguments), model=lambda folder: save_draft(source, folder), notes=notes)


def pard(source: Source) -> Layout:
    """A PARD model drafts token by token here: generate has no mask tokens for it."""
    layout = draft_model(source)
    layout.notes.append("transformers has no parallel drafting for it: it drafts token by token, as any causal LM does.")
    return layout


def dflash(source: Source) -> Layout:
    """The architecture of Muse Glimmer's assistant, which is DFlash's."""
    config = layer_config(source, "muse_glimmer_assistant") | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "layer_types": ["full_attention"] * source.config.num_layers,
        "block_size": source.config.block_size,
        "mask_token_id": source.config.mask_token_id,
        "target_layer_ids": [k - 1 for k in source.config.taps],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    launch = run('from transformers import AutoModel; d = AutoModel.from_pretrained("{folder}")', 'assistant_model=d, speculation_type="dflash"')
    notes = [f"{source.config.block_size - 1} draft tokens a round, as the block is.", *widened_note(source)]
    return Layout(launch, config, source.tensors(MUSE), notes=notes, tokens=source.config.block_size - 1)


def mtp(source: Source) -> Layout:
    """The target with the head as a further layer."""
    layer = source.facts.num_layers
    pattern = rf"model\.layers\.{layer}\..*"
    more, keys = source.tensors(hf_mtp(layer)), {"num_mtp_layers": 1}
    setup = f't = M.from_pretrained("{{folder}}"); t._keys_to_ignore_on_load_unexpected = [r"{pattern}"]'
    return Layout(
        run(setup, "use_mtp=True"),
        model=lambda folder: save_target(source, folder, more, keys),
        notes=[
            "This folder is the target with the head inside. One draft token a round.",
            "transformers looks for MTP layers only under names that the target's class lists, so that the command sets them for this one.",
            *widened_note(source),
        ],
        tokens=1,
    )


def post_norm_feature(config: Any, facts: TargetFacts) -> str | None:
    """transformers gives MTP layers the last hidden state after the final norm."""
    return "gives MTP layers the feature after the final norm; train with drafter.raw_feature=false" if config.raw_feature else None


def llama_layer(config: Any, facts: TargetFacts) -> str | None:
    """It builds the head's layer with the target's own class."""
    if facts.model_type not in ("llama", "mistral") or facts.layer.get("attention_bias") or facts.layer.get("sliding_window"):
        return f"builds MTP layers as the target's own kind, and the head's is Llama's, got a target of kind {facts.model_type}"
    return None


def mtp_tensors(exported: Exported) -> Problems:
    """The head's tensors under the number behind the last layer's."""
    config, facts = exported.config, exported.target
    vocab, layer = int(facts["vocab_size"]), int(facts["num_layers"])
    sizes = layer_sizes_of({**config, "head_dim": facts["layer"]["head_dim"]}, vocab, vocab, config)
    wanted = {renamed(name, hf_mtp(layer)): spec for name, spec in tensors("mtp", sizes).items()}
    prefix = f"model.layers.{layer}."
    yield from compared(exported, wanted, {name: spec for name, spec in exported.specs.items() if name.startswith(prefix)})
    yield from indexed(exported)


ENGINE = Engine(
    name="transformers",
    title="transformers 5.23",
    loaders={
        DRAFT_MODEL: Loader(draft_model, (weights_there, tokenizer_beside)),
        PARD: Loader(pard, (weights_there, tokenizer_beside)),
        "dflash": Loader(
            dflash,
            (
                plain_decoder,
                says(model_type="muse_glimmer_assistant"),
                has("block_size", "layer_types"),
                layers_exist,
                layers_at("target_layer_ids", offset=-1),
                mask_token("mask_token_id"),
                has_tensors("dflash", MUSE, config_sizes, maps="never"),
                same_hidden_size,
            ),
            first_refusal(raw_taps, shared_embeddings),
        ),
        "mtp": Loader(
            mtp,
            (mtp_tensors, says(num_mtp_layers=1), final_norm),
            first_refusal(post_norm_feature, llama_layer, target_like_layer, shared_embeddings),
        ),
    },
    why_not={
        "eagle3": "its generate has no loader for it",
        "eagle1": "its generate has no loader for it",
        "medusa": "its generate has no loader for it",
    },
)
