"""llama.cpp: a folder that its converter takes, and GGUF where the converter is installed.

The converter, convert_hf_to_gguf.py, is found in the folder that the environment variable DRAFTSMITH_LLAMACPP names, or on PATH; it runs in the
python that DRAFTSMITH_LLAMACPP_PYTHON names, or in ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ... import UserError
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
    DFLASH_RULES,
    draft_vocabulary,
    good_maps,
    has,
    has_tensors,
    layers_at,
    layers_exist,
    plain_decoder,
    same_hidden_size,
    says,
    tokenizer_beside,
    weights_there,
)

FOLDER, PYTHON, SCRIPT = "DRAFTSMITH_LLAMACPP", "DRAFTSMITH_LLAMACPP_PYTHON", "convert_hf_to_gguf.py"


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
    return vllm.whole_dflash(source, command("draft-dflash", True))


def dspark(source: Source) -> Layout:
    """vLLM's layout, with a draft vocabulary if there is one."""
    layout = vllm.dspark(source)
    layout.launch, layout.notes = command("draft-dspark", True), layout.notes[:1]
    return layout


def not_the_last_layer(config: Any, facts: TargetFacts) -> str | None:
    """Block drafters get what layers read; behind the last layer it stops with an assertion. For EAGLE-3 it has another way."""
    if config.taps[-1] < facts.num_layers:
        return None
    return f"stops on heads of this kind that read the last layer's output, got taps {list(config.taps)}; use taps below {facts.num_layers}"


def converter() -> Path | None:
    """The installed converter. Raises UserError if the variable names a folder without it."""
    named = os.environ.get(FOLDER)
    if named and not (Path(named) / SCRIPT).is_file():
        raise UserError(f"{FOLDER}: wanted llama.cpp's folder, with {SCRIPT}, got {named}")
    found = Path(named) / SCRIPT if named else shutil.which(SCRIPT)
    return Path(found) if found else None


def convert(folder: Path, target: str | None, python: str | None = None) -> str:
    """Run the converter, if there is one, by `python`, else the variable's, else this one. Returns a sentence about it.

    Raises UserError with its last line if it fails: the folder stays as it is.
    """
    script = converter()
    if script is None:
        return f"no GGUF: {SCRIPT} is not installed (or name llama.cpp's folder in {FOLDER})"
    about_target = ["--target-model-dir", target] if target else []
    interpreter = python or os.environ.get(PYTHON) or sys.executable
    done = subprocess.run(
        [interpreter, str(script), str(folder), *about_target, "--outfile", str(folder / "drafter.gguf"), "--outtype", kept_type(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise UserError(f"export llamacpp: {SCRIPT} failed ({last}); the folder is written, run it by hand on {folder} to see all")
    return "GGUF: drafter.gguf"


def kept_type(folder: Path) -> str:
    """The converter's name for the dtype that the folder has."""
    dtype = json.loads((folder / "config.json").read_text()).get("torch_dtype")
    return {"bfloat16": "bf16", "float16": "f16"}.get(dtype, "f32")


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
        "dflash": Loader(dflash, DFLASH_RULES, first_refusal(raw_taps, not_the_last_layer, shared_embeddings)),
        "dspark": Loader(dspark, vllm.DSPARK_RULES, first_refusal(raw_taps, not_the_last_layer, shared_embeddings)),
    },
    why_not={"eagle1": "its converter has no map for it", "mtp": "it has MTP of other targets only"},
)
