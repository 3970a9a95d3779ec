"""The frozen target in shards: every process keeps its part of each decoder layer, and all gather a layer while it runs (torch's `fully_shard`).

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -m draftsmith.train RECIPE target.shard=true train.keep_features_gib=0

The features are those of the whole target, whichever engine trains the drafter. What a process does with the target alone, shards cannot do: its own
answers are written before it is cut up, and to measure decoding the main process loads it whole for the time (features.measure=loss: never).
"""

from __future__ import annotations

from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh

from .. import UserError
from ..decode.target import Target
from ..recipes.schema import DrafterRecipe


def check_sharding(recipe: DrafterRecipe, processes: int) -> None:
    """Raise UserError for what a target in shards cannot do."""
    if not recipe.target.shard:
        return
    if processes == 1:
        raise UserError("target.shard: wanted false, as this is one process, got true; launch several, or leave it out")
    refused = {
        "features.source: wanted online": recipe.features.source != "online" and recipe.features.source,
        "train.keep_features_gib: wanted 0": recipe.train.keep_features_gib,  # processes would need the target in different steps
        "adapter.rank: wanted null": recipe.adapter.rank,
        "target.compile: wanted false": recipe.target.compile and "true",
        "drafter.predictor: wanted false": recipe.drafter.predictor and "true",
        "drafter.init: wanted null or a folder": recipe.drafter.init == "target" and "target",
    }
    for wanted, got in refused.items():
        if got:
            raise UserError(f"{wanted}, as the target is in shards (target.shard), got {got}")


def shard_target(target: Target, accelerator: Accelerator) -> None:
    """Keep this process's part of it only. All processes call it, and from then on ask for features together."""
    target.shard_layers(init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))
