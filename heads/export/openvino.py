"""OpenVINO GenAI 2026. It captures outputs of blocks {2, L/2, L-3} counted from 0, one behind what heads are trained on, unless told otherwise
after the conversion; it has no default for d2t, so that zeros are shipped for a whole vocabulary.
"""

from __future__ import annotations

from typing import Any

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
    raw_taps,
    save_draft,
    shared_embeddings,
    three_taps_one_layer,
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
    tokenizer_beside,
    weights_there,
)

CONVERT = "optimum-cli export openvino --model {folder} --task text-generation-with-past --trust-remote-code {folder}/ov"
RUN = (
    'python -c \'import openvino_genai as g; p = g.LLMPipeline("TARGET_OV", "CPU", draft_model=g.draft_model("{folder}/ov", "CPU")); '
    'c = p.get_generation_config(); c.num_assistant_tokens = {tokens}; print(p.generate("...", c))\''
)


def draft_model(source: Source) -> Layout:
    """A causal LM with the target's tokenizer."""
    check_vocabulary(source)
    return Layout(f"{CONVERT} && {RUN}", model=lambda folder: save_draft(source, folder, source.facts.vocab_size))


def eagle3(source: Source) -> Layout:
    """Names of the first release only (midlayer), d2t always, and a sentence about layers."""
    layout, layers = vllm.eagle3(source), [k - 1 for k in source.config.taps]
    layout.tensors |= source.maps()
    told = (
        'python -c \'import openvino as ov; m = ov.Core().read_model("{folder}/ov/openvino_model.xml"); '
        f'm.set_rt_info({layers}, ["hidden_layers_list"]); '
        'ov.save_model(m, "{folder}/ov/drafter.xml", compress_to_fp16=False)\' '
        "&& mv {folder}/ov/drafter.xml {folder}/ov/openvino_model.xml && mv {folder}/ov/drafter.bin {folder}/ov/openvino_model.bin"
    )
    layout.launch = f"{CONVERT} && {told} && {RUN}"
    layout.notes = [f"Without hidden_layers_list = {layers} OpenVINO reads other layers than the head was trained on, and accepts next to nothing."]
    return layout


def large_enough(config: Any, facts: TargetFacts) -> str | None:
    """Its own choice of layers needs as many."""
    return None if facts.num_layers >= 10 else f"wanted a target of at least 10 layers, got {facts.num_layers}"


def told_layers(exported: Exported) -> Problems:
    """The launch command tells the layers, since config.json is not read for them."""
    wanted = str([k - 1 for k in exported.taps])
    if f"set_rt_info({wanted}" not in exported.about.get("launch", ""):
        yield f"launch: wanted hidden_layers_list {wanted}, got {exported.about.get('launch')}"


ENGINE = Engine(
    name="openvino",
    title="OpenVINO GenAI 2026",
    loaders={
        DRAFT_MODEL: Loader(draft_model, (draft_vocabulary, weights_there, tokenizer_beside)),
        "eagle3": Loader(
            eagle3,
            (
                plain_decoder,
                has("draft_vocab_size"),
                says(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, norm_before_residual=False),
                layers_exist,
                told_layers,
                has_tensors("eagle3", maps="always"),
                good_maps,
                same_hidden_size,
            ),
            first_refusal(raw_taps, large_enough, three_taps_one_layer, shared_embeddings),
        ),
    },
)
