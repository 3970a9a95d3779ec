"""Recipes for real targets: each fits the schema, and its target and drafter are made without weights from the fact sheet of recipes/facts/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decode.target import Target
from draftsmith.heads.eagle3 import default_taps
from draftsmith.heads.export.common import TargetFacts
from draftsmith.heads.export.write import check_export
from draftsmith.heads.head import Head
from draftsmith.heads.registry import METHODS, new_head
from draftsmith.recipes.schema import DrafterRecipe, list_recipes, load_recipe, read_recipe_text
from draftsmith.train.objectives import OBJECTIVES
from transformers import AutoConfig, AutoModelForCausalLM

RECIPES = Path(__file__).parents[2] / "recipes"
FACTS = {path.stem: json.loads(path.read_text()) for path in sorted((RECIPES / "facts").glob("*.json"))}
NAMES = [info.name for info in list_recipes() if info.name.partition("/")[0] in FACTS]


class Sized(Target):
    """A target without weights."""

    def _check_logits(self) -> None:
        """Nothing can be computed."""


def target_of(facts: dict[str, Any]) -> Sized:
    values = dict(facts["config"])
    with torch.device("meta"):
        return Sized(AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values), dtype=torch.bfloat16), None, "facts")


@pytest.mark.parametrize("sheet", FACTS)
def test_a_fact_sheet_gives_the_published_number_of_parameters(sheet: str) -> None:
    """The count pins widths, layers, heads, experts, vocabulary and tied embeddings all at once."""
    facts = FACTS[sheet]
    target = target_of(facts)
    assert sum(p.numel() for p in target.model.parameters()) == facts["parameters"]
    assert target.num_layers == facts["config"]["num_hidden_layers"] and target.max_positions == facts["config"]["max_position_embeddings"]
    assert any(load(name).target.path == facts["target"] for name in NAMES)


def load(name: str) -> DrafterRecipe:
    recipe = load_recipe(name)
    assert isinstance(recipe, DrafterRecipe)
    return recipe


def drafter_of(recipe: DrafterRecipe, target: Target) -> Head:
    settings = {k: v for k, v in recipe.drafter.settings.items() if v is not None}
    if "block_size" in settings:
        settings.setdefault("mask_token_id", 0)  # which token it is, only the tokenizer tells
    with torch.device("meta"):
        return new_head(recipe.drafter.method, target, settings)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_makes_its_drafter_for_its_target(name: str) -> None:
    recipe, folder = load(name), name.partition("/")[0]
    facts = FACTS[folder]
    assert recipe.target.path == facts["target"] and recipe.run_folder == Path("runs", name.replace("/", "-"))
    target = target_of(facts)
    drafter = drafter_of(recipe, target)
    assert drafter.taps and max(drafter.taps) <= target.num_layers + 1
    if recipe.drafter.method == "eagle3":
        assert drafter.taps == default_taps(target.num_layers) == (2, target.num_layers // 2, target.num_layers - 3)
    for layer in drafter.output_layers():
        assert layer.weight.shape == (recipe.drafter.draft_vocab_size or target.vocab_size, layer.weight.shape[1])
    # A drafter that is not much smaller than its target gains nothing: output layers are most of it.
    own = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert 0 < own < 0.6 * facts["parameters"]
    longest = drafter.longest
    assert longest is None or recipe.decode.depth <= longest
    objective = OBJECTIVES[recipe.objective.name or recipe.drafter.method].of(recipe.objective.settings)
    assert type(drafter) in objective.trains
    assert recipe.data.sequence_length <= (target.max_positions or 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_starts_with_the_commands_that_run_it(name: str) -> None:
    text = read_recipe_text(name)
    head = text[: text.index("\nkind: drafter")]
    recipe = load(name)
    for command in ("data plan", "data inspect", "train"):
        assert f"draftsmith {command} {name}" in head
    assert f"draftsmith eval {recipe.run_folder}/drafter --target {recipe.target.path}" in head
    assert f"--tree {recipe.decode.tree} --depth {recipe.decode.depth}" in head
    assert "Published:" in head and all(line.startswith("#") for line in head.splitlines() if line)


def test_every_trained_method_has_a_recipe_for_a_real_target() -> None:
    used = {(recipe.drafter.method, recipe.objective.name) for recipe in map(load, NAMES)}
    methods = {method for method, _ in used}
    assert methods >= set(METHODS) - {"draft_model"}, "a method without a recipe for a real target"
    assert {"hass", "medusa2"} <= {name for _, name in used}


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_takes_what_a_recipe_exports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(name)
    target = target_of(FACTS[name.partition("/")[0]])
    # Whether embeddings are scaled is found out by looking at some: Gemma's are, and here are none.
    monkeypatch.setattr(torch, "equal", lambda a, b: not recipe.target.path.startswith("google/gemma"))
    facts = TargetFacts.of(target, recipe.target.path)
    for engine in recipe.export.formats:
        check_export(recipe.drafter.method, drafter_of(recipe, target).sizes, facts, engine, recipe.run_folder / "export" / engine)


def test_the_list_tells_target_and_memory() -> None:
    for info in list_recipes():
        if info.name in NAMES:
            recipe = load(info.name)
            planned = recipe.adapter.rank is None and recipe.target.dtype != "float32"  # neither an adapter nor a laptop's memory is planned
            assert info.target == recipe.target.path and (info.memory is not None or not planned)
