"""Features of the frozen target for training: computed when needed and kept in memory if there is room, or read from where they were saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import UserError
from ..decode.light import LightTarget
from ..decode.prompts import set_template
from ..decode.target import Step, Target
from ..heads.draft_model import DraftModel
from ..heads.registry import METHODS, known_settings
from ..recipes.schema import DrafterRecipe
from .data import Sequences
from .objectives.common import Batch, Objective, greedy_choices, judged
from .ring import Ring
from .store import Saved, Store, StoredFeatures, recognise
from .stream import Stream


class FeatureSource(Protocol):
    """Where the training loop gets a batch's features from."""

    def of(self, batch: Batch) -> Step:
        """The target's features of the batch, taps as the target has them set; what stands at padded places means nothing."""

    def close(self) -> None:
        """Training is over: free what is held."""


class Features:
    """The target's features of batches. Each sequence's are kept, up to `limit` bytes, so that later epochs do without the target's forward pass.

    choices: keep its greedy choices too, where they judge anything, so that later epochs do without the logits of the whole vocabulary.
    The target must have the taps set that were set when the first sequence was kept. What is kept lies on the target's device.
    """

    def __init__(self, target: Target, limit: int = 0, choices: bool = False) -> None:
        self.target, self.limit, self.choices, self.bytes = target, limit, choices, 0
        self._kept: dict[int, dict[str, Tensor]] = {}  # by the names of Step's fields
        self._taps: tuple[int, ...] | None = None

    def of(self, batch: Batch) -> Step:
        """What `Target.features` gives for the batch; at padded places, zeros if all of its sequences were kept."""
        if self.limit and batch.sequence_B is not None and all(i in self._kept for i in batch.sequence_B):
            assert self.target.taps == self._taps, "the taps changed"
            rows = [self._kept[i] for i in batch.sequence_B]
            kept = {name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}
            return Step(kept["hidden_BNH"], kept.get("taps_BNF"), best_BN=kept.get("best_BN"))
        step = self.target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        if self.limit and batch.sequence_B is not None:
            self._taps = self.target.taps
            if self.choices:
                place_N = judged(batch, 0).flatten().nonzero().squeeze(1)
                step.best_BN = torch.zeros_like(batch.ids_BT, device=step.hidden_BNH.device)
                step.best_BN.view(-1)[place_N] = greedy_choices(self.target, step.hidden_BNH.flatten(0, 1)[place_N])
            for row, index in enumerate(batch.sequence_B):
                length = int((batch.document_BT[row] >= 0).sum())
                parts = {name: getattr(step, name) for name in ("hidden_BNH", "taps_BNF", "best_BN")}
                kept = {name: part[row, :length].clone() for name, part in parts.items() if part is not None}
                size = sum(part.numel() * part.element_size() for part in kept.values())
                if index not in self._kept and self.bytes + size <= self.limit:
                    self._kept[index] = kept
                    self.bytes += size
        return step

    def close(self) -> None:
        """Free what is kept."""
        self._kept.clear()
        self.bytes = 0


def load_target(recipe: DrafterRecipe, device: str) -> Target:
    """The target as training needs it: without its layers, if its features come from a store."""
    check_source(recipe)
    if recipe.features.source != "store":
        return load_whole(recipe, device)
    store = Store(recipe.features_folder)  # refused before anything is loaded
    ref = recipe.target
    light = LightTarget.load(ref.location, dtype=ref.dtype, device=device, attn_implementation=ref.attn_implementation, revision=ref.revision)
    recognise(store, light)
    return _with_template(light, recipe)


def check_source(recipe: DrafterRecipe) -> None:
    """Raise UserError for a source of features that the rest of the recipe does not go with."""
    part, drafter = recipe.features, recipe.drafter
    if part.source != "online" and recipe.adapter.rank is not None:
        raise UserError(f"features.source: wanted online, as the target changes with its adapter (adapter.rank), got {part.source}")
    if part.source == "store" and (drafter.predictor or (drafter.method == "draft_model" and drafter.init == "target")):
        what = "drafter.predictor" if drafter.predictor else "drafter.init"
        raise UserError(f"features.source: wanted online or ring, as {what} needs the target's layers, got store")
    if part.source != "store" and part.logits != "hidden":
        raise UserError(f"features.logits: wanted hidden, as features.source is {part.source}, got {part.logits}")
    if part.source == "ring" and part.dtype != "target":
        raise UserError(f"features.dtype: wanted target, as a ring keeps what the target computed, got {part.dtype}")


def load_whole(recipe: DrafterRecipe, device: str) -> Target:
    """The target with all its layers."""
    ref = recipe.target
    if ref.compile and recipe.adapter.rank is not None:
        raise UserError("target.compile: wanted false, as the target changes with its adapter (adapter.rank), got true")
    target = Target.load(ref.location, dtype=ref.dtype, device=device, attn_implementation=ref.attn_implementation, revision=ref.revision)
    if ref.compile:
        target.compile()
    return _with_template(target, recipe)


def _with_template(target: Target, recipe: DrafterRecipe) -> Target:
    if target.tokenizer is not None:
        set_template(target.tokenizer, recipe.target.template)
    return target


def make_features(
    recipe: DrafterRecipe, objective: Objective, target: Target, taps: Sequence[int], sequences: Sequences, stream: Stream, process: int = 0
) -> tuple[Stream, FeatureSource]:
    """(what to train on in place of `stream`, the features of its batches), as the recipe asks. Raises UserError for a store that does not fit."""
    part = recipe.features
    if part.source == "ring":
        folder = recipe.features_folder / f"ring-{process}" if part.ring_on == "disk" else None
        ring = Ring(stream, target, int(part.ring_gib * 2**30), folder)
        return ring, ring
    if part.source == "store" and not stream.ahead:
        raise UserError("features.source: wanted online, as the drafter takes part in making the data, got store")
    if part.source == "store":
        layers = layers_read(recipe, objective, taps, target.num_layers)
        texts = [sample.ids for sample in sequences]
        return stream, StoredFeatures(Store(recipe.features_folder), target, layers, texts, data_settings(recipe), logits=part.logits)
    choices = recipe.drafter.draft_vocab_size is not None and recipe.drafter.method != DraftModel.method
    return stream, Features(target, int(recipe.train.keep_features_gib * 2**30), choices)


def layers_read(recipe: DrafterRecipe, objective: Objective, taps: Sequence[int], num_layers: int) -> list[int]:
    """The layers whose hidden states training reads: the drafter's taps, and the last ones unless logits are kept and nothing else asks for them."""
    last = recipe.features.logits == "hidden" or objective.reads_hidden
    return sorted({*taps, num_layers + 1} if last else {*taps})


def saved_form(recipe: DrafterRecipe, objective: Objective, target: Target, taps: Sequence[int]) -> Saved:
    """What a store of the recipe holds of a token."""
    part = recipe.features
    return Saved(
        layers=tuple(layers_read(recipe, objective, taps, target.num_layers)),
        dtype=str(target.dtype).removeprefix("torch.") if part.dtype == "target" else part.dtype,
        hidden_size=target.hidden_size,
        topk=min(part.topk, target.vocab_size) if part.logits == "topk" else None,
    )


def drafter_taps(recipe: DrafterRecipe, target: Target) -> tuple[int, ...]:
    """The layers that the recipe's drafter reads, without making it."""
    method, init = recipe.drafter.method, recipe.drafter.init
    if method == DraftModel.method:
        return ()
    config = Path(init or "", "config.json")
    if init and config.is_file():
        try:
            return tuple(json.loads(config.read_text(encoding="utf-8"))["taps"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"drafter.init {init}: wanted a drafter's folder, got a config.json without taps ({error})") from error
    return tuple(METHODS[method][1].for_target(target, **known_settings(method, recipe.drafter.settings)).taps)


def data_settings(recipe: DrafterRecipe) -> dict[str, Any]:
    """The settings that the sequences come from."""
    return {name: value for name, value in vars(recipe.data).items() if name != "train_on"}
