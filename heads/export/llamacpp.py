"""llama.cpp: a folder that its converter takes, and GGUF where the converter is installed.

The converter is found by the environment variable DRAFTSMITH_GGUF_CONVERTER (the path of convert_hf_to_gguf.py), or on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ... import UserError
from . import vllm
from .common import (
    DRAFT_MODEL,
    Engine,
    Layout,
    Loader,
    Source,
    check_vocabulary,
    first_refusal,
    raw_taps,
    save_draft,
    shared_embeddings,
    three_taps_one_layer,
    widened_note,
)
from .conformance import (
    draft_vocabulary,
    good_maps,
    has,
    has_tensors,
    layers_at,
    layers_exist,
    mask_token,
    plain_decoder,
    same_hidden_size,
    says,
    tokenizer_beside,
    weights_there,
)

CONVERTER = "DRAFTSMITH_GGUF_CONVERTER"


def command(kind: str, target: bool) -> str:
    """Conversion, then the launch."""
    convert = "convert_hf_to_gguf.py {folder}" + (" --target-model-dir {target}" if target else "") + " --outfile {folder}/drafter.gguf"
    return convert + " && llama-server -m TARGET.gguf -md {folder}/drafter.gguf --spec-type " + kind + " --spec-draft-n-max {tokens}"


def draft_model(source: Source) -> Layout:
    """A causal LM with the target's tokenizer."""
    check_vocabulary(source)
    return Layout(command("draft-simple", False), model=lambda folder: save_draft(source, folder, source.facts.vocab_size))


def eagle3(source: Source) -> Layout:
    """vLLM's layout; draft_vocab_size together with one layer is how the converter tells EAGLE-3."""
    layout = vllm.eagle3(source)
    layout.launch = command("draft-eagle3", True)
    return layout


def dflash(source: Source) -> Layout:
    """DFlash, with the target's output layer."""
    layout = vllm.dflash(source)
    for name in ("lm_head.weight", "d2t", "t2d"):
        layout.tensors.pop(name, None)
    assert layout.config is not None
    layout.config["draft_vocab_size"] = source.facts.vocab_size
    layout.launch, layout.notes = command("draft-dflash", True), widened_note(source)
    return layout


def converter() -> Path | None:
    """The installed converter. Raises UserError if the variable names a file that is not there."""
    named = os.environ.get(CONVERTER)
    if named and not Path(named).is_file():
        raise UserError(f"{CONVERTER}: wanted the path of convert_hf_to_gguf.py, got {named}")
    found = named or shutil.which("convert_hf_to_gguf.py")
    return Path(found) if found else None


def convert(folder: Path, target: str | None) -> str:
    """Run the converter, if there is one. Returns a sentence about it. Raises UserError with its last line if it fails."""
    script = converter()
    if script is None:
        return f"no GGUF: convert_hf_to_gguf.py is not installed (or name it in {CONVERTER})"
    about_target = ["--target-model-dir", target] if target else []
    python = os.environ.get("DRAFTSMITH_GGUF_PYTHON", sys.executable)
    done = subprocess.run(
        [python, str(script), str(folder), *about_target, "--outfile", str(folder / "drafter.gguf"), "--outtype", "f32"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise UserError(f"export llamacpp: {script.name} failed ({last}); run it by hand on {folder} to see all")
    return "GGUF: drafter.gguf"


ENGINE = Engine(
    name="llamacpp",
    title="llama.cpp",
    loaders={
        DRAFT_MODEL: Loader(draft_model, (draft_vocabulary, weights_there, tokenizer_beside)),
        "eagle3": Loader(
            eagle3,
            (
                plain_decoder,
                has("draft_vocab_size"),
                says(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, norm_before_residual=False),
                layers_exist,
                layers_at("eagle_aux_hidden_state_layer_ids", offset=0),
                has_tensors("eagle3"),
                good_maps,
                same_hidden_size,
            ),
            first_refusal(raw_taps, three_taps_one_layer, shared_embeddings),
        ),
        "dflash": Loader(
            dflash,
            (
                plain_decoder,
                says(architectures=["DFlashDraftModel"], model_type="qwen3"),
                has("block_size"),
                layers_exist,
                layers_at("dflash_config", "target_layer_ids", offset=-1),
                mask_token("dflash_config", "mask_token_id"),
                has_tensors("dflash", maps="never"),
                same_hidden_size,
            ),
            first_refusal(raw_taps, shared_embeddings),
        ),
    },
    why_not={"eagle1": "its converter has no map for it", "mtp": "it has MTP of other targets only"},
)
