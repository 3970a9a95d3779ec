"""A LoRA adapter on the target, trained together with a drafter (Medusa-2, 2401.10774, section 2.2.2): the target changes, and so does its text.

    tunable = TunableTarget(target, rank=16)                  training: the original's weights frozen, the adapter's not
    with tunable.original(): ...                              the original, for self-distillation
    save(tunable, folder / "adapter")                         in peft's format
    merge(target, folder / "adapter", digest)                 decoding: plain layers again, of other weights

A target with an adapter is the original and the adapter: its fingerprint holds the original's hashes and the adapter's. A drafter that brings an
adapter is lossless with respect to that target, not to the original.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from .. import UserError
from ..decode.target import Target

FOLDER = "adapter"  # beside the head's files
WEIGHTS = "adapter_model.safetensors"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("adapter.rank: wanted peft, which this installation lacks; pip install peft") from error
    return peft


class TunableTarget(Target):
    """The target with an adapter that is being trained. Its layers are not fused: they compute more than their weights say.

    rank, alpha (None: twice the rank): of LoRA, 2106.09685. modules: names of the layers that are adapted; None: all linear ones but the output
    layer. The model is that of `target`, which must not be used any more. Raises UserError for modules that it does not have.
    """

    def __init__(self, target: Target, *, rank: int, alpha: float | None = None, modules: Sequence[str] | None = None) -> None:
        peft = _peft()
        original = target.fingerprint()
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,
            target_modules="all-linear" if modules is None else list(modules),
            task_type="CAUSAL_LM",
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # of transformers, which peft still asks for
                wrapped = peft.get_peft_model(target.model, config)
        except ValueError as error:
            raise UserError(f"adapter.modules: {' '.join(str(error).split())[:200]}; wanted names of the target's layers, such as q_proj") from error
        super().__init__(target.model, target.tokenizer, target.name)
        self.adapted = wrapped
        self.identity = original
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def parameters(self) -> list[nn.Parameter]:
        """The adapter's, in a fixed order."""
        return [parameter for name, parameter in self.model.named_parameters() if ".lora_" in name]

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """Forward passes inside are the original's."""
        with self.adapted.disable_adapter():
            yield
        for parameter in self.parameters():  # peft freezes what it disables
            parameter.requires_grad_(True)


class Joint(nn.Module):
    """A drafter and an adapter as one module, for wrappers that gather gradients. It runs the drafter."""

    def __init__(self, drafter: nn.Module, adapter: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.drafter = drafter
        self.adapter = nn.ParameterList(adapter)

    def forward(self, *args: Any) -> Any:
        return self.drafter(*args)


def save(target: TunableTarget, folder: Path) -> dict[str, str]:
    """Write the adapter in peft's format. Returns the fingerprint of the target with it."""
    target.adapted.save_pretrained(str(folder))
    return {**target.fingerprint(), "adapter": digest(folder)}


def digest(folder: Path) -> str:
    """Short hash of an adapter's weights. Raises UserError if there are none."""
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"adapter {folder}: wanted {WEIGHTS} in it, got none; use another checkpoint of the drafter")
    tensors = load_file(folder / WEIGHTS)
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def merge(target: Target, folder: Path, wanted: str) -> None:
    """Merge an adapter into the target's weights, in place. Raises UserError if its hash is not `wanted`, or the target cannot take it."""
    found = digest(folder)
    if found != wanted:
        raise UserError(f"adapter {folder}: wanted the one of the drafter's contract ({wanted}), got another ({found}); use another checkpoint")
    if target.bound:
        raise UserError(
            f"adapter {folder}: wanted a target without drafters of other weights, got one that has; measure a drafter that tunes its target alone"
        )
    peft = _peft()
    with target.adapting(wanted):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
                adapted = peft.PeftModel.from_pretrained(target.model, str(folder))
        except (ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"adapter {folder}: does not fit the target ({' '.join(str(error).split())[:200]})") from error
        adapted.merge_and_unload()
    target.model.eval().requires_grad_(False)


def load_in_four_bits(path: str, *, dtype: torch.dtype, device: str, revision: str | None, like: Target) -> Target:
    """The target once more, its layers' weights in four bits (NF4, QLoRA 2305.14314), for the training of an adapter. `like`: in full precision.

    Raises UserError without bitsandbytes.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError("adapter.quantise: wanted bitsandbytes, which this installation lacks; pip install 'draftsmith[qlora]'") from error
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=dtype, quantization_config=settings, device_map={"": device})
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # weights packed for that are for inference: the product has no gradient
    quantised = Target(model, like.tokenizer, like.name)
    quantised.identity = like.fingerprint()
    return quantised
