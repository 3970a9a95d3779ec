"""Draft models as what a run trains, and where they start from: another model, or the target cut down.

drafter.init=Qwen/Qwen3-0.6B                          a smaller model of the family, whole, or cut down where sizes are given
drafter.init=target drafter.num_layers=1              a copy of the target, cut down
drafter.init=null drafter.num_layers=1                the target's family at random
drafter.init=runs/quickstart-draft/drafter            an earlier draft
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from .. import UserError
from ..decode.light import LightTarget
from ..decode.prompts import eos_ids
from ..decode.target import Target, read_model
from ..heads.draft_model import SIZES, DraftModel, check_start
from ..heads.registry import copy_drafter, known_settings, load_drafter, new_head
from ..recipes.schema import Drafter, DrafterRecipe
from .data import Sequences
from .on_policy import OnPolicyStream
from .prune import pruned
from .stream import Share, Stream
from .trainee import HeadTrainee, check_draft_shape

TARGET = "target"  # the name of the target itself as what a draft starts from
CALIBRATION_PROMPTS = 16
_ONLY_HERE = ("lora_rank", "lora_alpha", "prune_by", "calibration_prompts", "predictor")  # settings of a start, not of a model


class DraftTrainee(HeadTrainee):
    """A draft model. It is stored as a folder of transformers, adapters merged, with a contract."""

    method = DraftModel.method
    drafter: DraftModel

    def __init__(self, draft: DraftModel, target: Target, hard: bool) -> None:
        super().__init__(draft, target)
        self._hard = hard

    @classmethod
    def of(cls, recipe: DrafterRecipe, target: Target, sequences: Sequences) -> DraftTrainee:
        """Raises UserError for a start that does not fit the target, sizes that it does not have, or a tree that it cannot draft."""
        draft = start_draft(recipe.drafter, target, sequences).train()
        check_draft_shape(recipe, draft, target)
        return cls(draft, target, recipe.objective.labels == "hard")

    @property
    def target_is_fixed(self) -> bool:
        """It is; but no features of it are wanted where the text itself is what the draft learns."""
        return not self._hard

    def publish(self, best: Path, folder: Path) -> None:
        load_drafter(best, self.target)
        copy_drafter(best, folder)

    def stream(self, base: Stream, recipe: DrafterRecipe, sequences: Sequences, share: Share) -> Stream:
        train = recipe.train
        if not train.on_policy:
            return base
        if isinstance(self.target, LightTarget):
            raise UserError(
                f"train.on_policy: wanted 0, as features come from a store, which has none of what the draft writes, got {train.on_policy}"
            )
        return OnPolicyStream(
            base,
            self.drafter.snapshot,
            sequences,
            share,
            mixing=train.on_policy,
            refresh=train.on_policy_refresh,
            temperature=train.on_policy_temperature,
            tokens=recipe.data.response_tokens,
            batch=recipe.data.generation_batch,
            eos=eos_ids(self.target.model),
            seed=train.seed,
            whole=recipe.data.train_on == "all",
            gather=gather_object if share.processes > 1 else list,
        )


def check_draft(recipe: DrafterRecipe) -> None:
    """Raise UserError for a draft model to start from whose tokens are not the target's, before either is loaded."""
    init = recipe.drafter.init
    if recipe.drafter.method == DraftModel.method and init is not None and init != TARGET:
        check_start(init, recipe.target.location, recipe.target.revision)


def start_draft(settings: Drafter, target: Target, sequences: Sequences) -> DraftModel:
    """A draft model, its adapters in place. sequences: texts of which the first few show what a pruned copy can do without."""
    given = known_settings(DraftModel.method, {name: value for name, value in settings.settings.items() if name not in _ONLY_HERE})
    sizes = {name: given.pop(name, None) for name in SIZES}
    if settings.predictor and given.get("block_size") is not None:
        raise UserError("drafter.predictor: wanted false, as drafter.block_size is given and a block is drafted at once, got true")
    if settings.init is None:
        for name in ("lora_rank", "lora_alpha", "prune_by", "calibration_prompts"):
            if getattr(settings, name) is not None:
                raise UserError(f"drafter.{name}: wanted null, as drafter.init is null, got {getattr(settings, name)}; say what to start from")
        made = new_head(DraftModel.method, target, sizes | given)
        assert isinstance(made, DraftModel)
        return made
    if settings.lora_rank is None and settings.lora_alpha is not None:
        raise UserError(f"drafter.lora_alpha: wanted null, as drafter.lora_rank is null, got {settings.lora_alpha}")
    cut = any(value is not None for value in sizes.values())
    for name in ("prune_by", "calibration_prompts"):
        if not cut and getattr(settings, name) is not None:
            raise UserError(f"drafter.{name}: wanted null, as no size is given that the draft is cut down to, got {getattr(settings, name)}")
    draft = _started(settings, settings.init, target, sizes if cut else None, given, sequences)
    return draft if settings.lora_rank is None else draft.adapt(settings.lora_rank, settings.lora_alpha)


def _started(
    settings: Drafter, init: str, target: Target, sizes: dict[str, int | None] | None, given: dict[str, Any], sequences: Sequences
) -> DraftModel:
    texts, prune_by = sequences[: settings.calibration_prompts or CALIBRATION_PROMPTS], settings.prune_by or "influence"
    if init == TARGET:
        if isinstance(target, LightTarget):
            raise UserError("drafter.init: wanted another model, as features come from a store and the target's layers are not loaded, got target")
        if sizes is None:
            raise UserError("drafter.num_layers: wanted a smaller size than the target's, as drafter.init is target, got none; set it, or a width")
        return DraftModel.of(pruned(target, sizes, texts, prune_by), target.tokenizer, target, **given)
    if sizes is not None:
        source = Target.load(init, dtype="float32", device=str(target.device))
        return DraftModel.of(pruned(source, sizes, texts, prune_by), source.tokenizer, target, **given)
    if (Path(init) / "contract.json").is_file():
        draft, _ = load_drafter(init, target, dtype=torch.float32)
        if not isinstance(draft, DraftModel):
            raise UserError(f"drafter.init: wanted a draft model, as drafter.method is {DraftModel.method}, got a {draft.method} drafter")
        if not given:
            return draft
    model, tokenizer, _ = read_model(init, dtype="float32", device="cpu")
    return DraftModel.of(model, tokenizer, target, **given)
