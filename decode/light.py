"""A target without its layers: what training reads of it when its features come from a store, in a small part of its memory.

    target = LightTarget.load("meta-llama/Llama-3.3-70B-Instruct", device="cuda")     # 4 GB in place of 140

Embeddings, output layer, tokenizer and sizes are the checkpoint's; nothing else of it is read, but for the samples that tell it from others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .. import UserError
from .target import Step, Target, read_model, surroundings

_SAMPLES = 64  # of each tensor of a checkpoint, 8 bytes each


class LightTarget(Target):
    """Embeddings, logits and sizes of a target. It computes no features. Its fingerprint is what `recognise` was given."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str, config: Any) -> None:
        super().__init__(model, tokenizer, name)
        self.config = config.get_text_config(decoder=True)
        self.num_layers = int(self.config.num_hidden_layers)

    @classmethod
    def load(
        cls, path: str, *, dtype: str = "auto", device: str = "auto", attn_implementation: str | None = None, revision: str | None = None
    ) -> LightTarget:
        """See `Target.load`."""
        with _quiet():  # all that is not read would be listed as unexpected
            model, tokenizer, config = read_model(
                path, dtype=dtype, device=device, attn_implementation=attn_implementation, revision=revision, asked=_without_layers
            )
        return cls(model, tokenizer, path, config)

    def set_taps(self, taps: Sequence[int]) -> None:
        """Nothing is captured."""
        self.taps = tuple(taps)

    def features(self, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, *, gradient: bool = False) -> Step:
        """None: it has no layers."""
        raise AssertionError("a target without layers computes no features")

    def recognise(self, prints: dict[str, str], checkpoint: str) -> list[str]:
        """How it differs from the target of this fingerprint and checkpoint print: ["config a, not b", ..]. If it does not, it takes them."""
        ours = surroundings(self.config, self.tokenizer) | {"checkpoint": checkpoint_print(self)}
        theirs = {name: value for name, value in prints.items() if name != "weights"} | {"checkpoint": checkpoint}
        names = sorted({*ours, *theirs})
        differing = [f"{n} {ours.get(n, 'none')}, not {theirs.get(n, 'none')}" for n in names if ours.get(n) != theirs.get(n)]
        if not differing:
            self.identity = dict(prints)
        return differing


def _without_layers(config: Any) -> Any:
    light = copy.deepcopy(config)
    text = light.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return light


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def checkpoint_print(target: Target) -> str:
    """A short hash of the checkpoint that a target was loaded from: names, shapes and samples of all tensors in its safetensors files.

    It needs no weights in memory. Of a target without such files, one of its embeddings and output layer.
    """
    files = _weight_files(target.name)
    digest = hashlib.sha256()
    if not files:
        for weight in (target.embeddings.weight, target.lm_head.weight):
            assert isinstance(weight, Tensor)
            digest.update(weight.detach().flatten()[:: max(1, weight.numel() // 4096)].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
        return "embeddings-" + digest.hexdigest()[:16]
    tensors: dict[str, bytes] = {}
    for file in files:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:start]).items():
                if name != "__metadata__":
                    low, high = (start + offset for offset in entry["data_offsets"])
                    stride = max(8, (high - low) // _SAMPLES)
                    samples = b"".join(data[at : min(at + 8, high)] for at in range(low, high, stride))
                    tensors[name] = f"{name} {entry['dtype']} {entry['shape']} ".encode() + samples
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()[:16]


def _weight_files(name: str) -> list[Path]:
    """The safetensors files of a folder, or of a hub name that is in the cache; none if there are no such files."""

    def find(file: str) -> Path | None:
        path = Path(name) / file
        if path.is_file():
            return path
        if not name or Path(name).exists():
            return None
        try:
            found = cached_file(name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError):  # no such name, or not in the cache
            return None
        return Path(found) if found else None

    index = find("model.safetensors.index.json")
    if index is None:
        single = find("model.safetensors")
        return [single] if single else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"target {name}: wanted a readable model.safetensors.index.json, got a damaged one ({error})") from error
    found = [find(file) for file in names]
    return [file for file in found if file is not None] if all(found) else []
