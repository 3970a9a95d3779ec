"""What tells the best checkpoint: measured decoding, or, where the target is not to be loaded, the training loss."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..decode.light import LightTarget
from ..decode.target import Target
from ..recipes.schema import DrafterRecipe
from .features import load_whole
from .ring import on_device

NOT_MEASURED = (
    "features.measure=loss: decoding is not measured, so the checkpoint of the lowest training loss is kept, "
    "which need not be the one that is accepted most; measure it with draftsmith eval"
)


def measures(recipe: DrafterRecipe) -> bool:
    """Whether decoding is measured."""
    return recipe.features.measure == "target" or (recipe.features.source != "store" and not recipe.target.shard)


@contextmanager
def whole(recipe: DrafterRecipe, target: Target, drafter: Any) -> Iterator[Target]:
    """The target with its layers, which the drafter is bound to meanwhile; if training does without them, or has shards, they come for the time."""
    if not isinstance(target, LightTarget) and not recipe.target.shard:
        with on_device(target) if recipe.features.source == "ring" else nullcontext():
            yield target
        return
    loaded = load_whole(recipe, str(target.device))
    drafter.bind(loaded)
    try:
        yield loaded
    finally:
        drafter.bind(target)
        del loaded
        gc.collect()
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
