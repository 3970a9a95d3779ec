"""Training a drafter together with an adapter of its target (Medusa-2): what a recipe must say for it, and the target that is trained."""

from __future__ import annotations

from .. import UserError
from ..decode.target import Target
from ..heads.adapter import TunableTarget, load_in_four_bits
from ..recipes.schema import DrafterRecipe
from .objectives.common import Objective


def check(recipe: DrafterRecipe, objective: Objective) -> None:
    """Raise UserError unless the recipe has an adapter exactly if its objective trains one, and what else it says goes with that."""
    part = recipe.adapter
    if objective.tunes_target and part.rank is None:
        raise UserError(f"adapter.rank: wanted a rank, as the objective {objective.name} trains an adapter of the target, got null")
    if part.rank is None:
        for name in ("alpha", "modules"):
            if getattr(part, name) is not None:
                raise UserError(f"adapter.{name}: wanted null, as adapter.rank is null, got {getattr(part, name)}")
        if part.quantise != "no":
            raise UserError(f"adapter.quantise: wanted no, as adapter.rank is null, got {part.quantise}")
        return
    if not objective.tunes_target:
        raise UserError(f"adapter.rank: wanted null, as the objective {objective.name} leaves the target as it is, got {part.rank}")
    if recipe.eval.tune:
        raise UserError("eval.tune: wanted false, as the evaluation needs the target without the adapter first, got true; draftsmith tune does it")
    if recipe.train.keep_features_gib:
        raise UserError(
            f"train.keep_features_gib: wanted 0, as features of a target that is trained do not keep, got {recipe.train.keep_features_gib:g}"
        )


def tunable(recipe: DrafterRecipe, target: Target) -> TunableTarget:
    """The target with a new adapter, as the recipe says. `target` must not be used after that."""
    part = recipe.adapter
    assert part.rank is not None
    if part.quantise == "nf4":
        ref = recipe.target
        target = load_in_four_bits(ref.location, dtype=target.dtype, device=str(target.device), revision=ref.revision, like=target)
    return TunableTarget(target, rank=part.rank, alpha=part.alpha, modules=part.modules)
