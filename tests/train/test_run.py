"""Parts of the training loop that no run of the command line shows by itself."""

from __future__ import annotations

import itertools
import math

import pytest
from draftsmith import UserError
from draftsmith.heads.registry import METHODS
from draftsmith.recipes.schema import DrafterRecipe, list_recipes, load_recipe
from draftsmith.train.loop import lr_factor
from draftsmith.train.objectives import OBJECTIVES
from draftsmith.train.run import make_objective


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_learning_rate_follows_steps_or_time(kind: str) -> None:
    """A fractional step stands for the share of the time that is spent: the curve is the same."""
    steps, warmup = 100, 10
    by_step = [lr_factor(kind, step, steps, warmup) for step in range(steps)]
    assert by_step[0] == pytest.approx(0.1) and by_step[9] == 1 and max(by_step) == 1
    assert all(a >= b for a, b in itertools.pairwise(by_step[9:]))
    between = lr_factor(kind, 55.5, steps, warmup)
    assert min(by_step[55:57]) <= between <= max(by_step[55:57])
    if kind == "cosine":
        assert by_step[55] == pytest.approx(0.5 * (1 + math.cos(math.pi * 45 / 90)))
    if kind != "constant":
        assert by_step[-1] < 0.07


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["drafter.method=eagle9"], "drafter.method: wanted one of dflash"),
        (["objective.name=hass"], "objective.name: wanted one of eagle3, mtp for the method eagle3, got hass"),
        (["drafter.method=dspark", "objective.name=dflash"], "objective.name: wanted one of dspark for the method dspark, got dflash"),
        (["objective.topk=3"], "objective.topk: wanted null, as the objective eagle3 has no such setting, got 3"),
    ],
)
def test_objectives_that_do_not_fit_are_refused_before_anything_starts(settings: list[str], says: str) -> None:
    recipe = load_recipe("quickstart/eagle3", settings)
    assert isinstance(recipe, DrafterRecipe)
    with pytest.raises(UserError) as error:
        make_objective(recipe)
    assert str(error.value).startswith(says)


def test_every_method_has_an_objective_and_a_recipe() -> None:
    recipes = [recipe for info in list_recipes() if isinstance(recipe := load_recipe(info.name), DrafterRecipe)]
    assert {recipe.drafter.method for recipe in recipes} == set(METHODS)
    assert {make_objective(recipe).name for recipe in recipes} == set(OBJECTIVES)
    assert all(METHODS[method][0] in OBJECTIVES[method].trains for method in METHODS)
