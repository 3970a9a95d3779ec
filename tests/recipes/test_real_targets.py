"""Recipes for real targets: each fits the schema, and its target and drafter are made without weights from fact sheets (recipes/facts/). What its
header says of memory, disk and time is what the plan says today.
"""

from __future__ import annotations

import json
import re
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
from draftsmith.recipes.schema import DrafterRecipe, TargetRecipe, list_recipes, load_recipe, read_recipe_text
from draftsmith.recipes.sheets import fact_sheet
from draftsmith.train.objectives import OBJECTIVES
from draftsmith.train.plan import Plan, duration, make_plan, size
from draftsmith.train.run import make_objective
from transformers import AutoConfig, AutoModelForCausalLM

RECIPES = Path(__file__).parents[2] / "recipes"
FACTS = {path.stem: json.loads(path.read_text()) for path in sorted((RECIPES / "facts").glob("*.json"))}
REAL = [info.name for info in list_recipes() if info.target is not None and fact_sheet(info.target) is not None]
NAMES = [name for name in REAL if name.partition("/")[0] in FACTS]  # those that train heads
PAIRS = [name for name in REAL if name not in NAMES]  # and draft models
GPUS = {"an H100 (80 GB)": "h100", "an H200 (141 GB)": "h200", "an RTX 4090 (24 GB)": "rtx4090"}


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
    assert fact_sheet(facts["target"]) == facts
    assert any(facts["target"] in (load(name).target.path, load(name).drafter.init) for name in REAL)


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
    assert recipe.target.path == facts["target"] and recipe.run_folder == Path("runs", name.replace("/", "-")) == Path("runs", recipe.name)
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


@pytest.mark.parametrize("name", REAL)
def test_a_recipe_starts_with_the_commands_that_run_it(name: str) -> None:
    text = read_recipe_text(name)
    head = text[: text.index("\nkind: drafter")]
    recipe = load(name)
    for command in ("data plan", "data inspect", "train"):
        assert f"draftsmith {command} {name}" in head
    assert f"draftsmith eval {recipe.run_folder}/drafter --target {recipe.target.path}" in head
    assert f"--tree {recipe.decode.tree} --depth {recipe.decode.depth}" in head
    assert "Published:" in head and all(line.startswith("#") for line in head.splitlines() if line)


@pytest.mark.parametrize("name", REAL)
def test_a_header_says_what_the_plan_says(name: str) -> None:
    """Without a network, as users plan: neither target nor draft is asked for anywhere."""
    text = read_recipe_text(name)
    said = " ".join(line.removeprefix("#").strip() for line in text[: text.index("\nkind: drafter")].splitlines())
    recipe = load(name)
    device = next((ours for theirs, ours in GPUS.items() if theirs in said), "h100")
    plan = make_plan(recipe, make_objective(recipe), device=device)
    assert f"Memory: {plan.peak / 2**30:.0f} GiB" in said, figures(plan, device)
    if re.search(r"Time: about", said):
        assert figures(plan, device) in said
    else:  # a tuned target, whose plan is said to be incomplete; a laptop, whose time is said to be guessed
        assert recipe.adapter.rank is not None or recipe.target.dtype == "float32"
    assert all(refusal.startswith("disk: ") for refusal in plan.refusals)  # of the machine that the tests run on


def figures(plan: Plan, device: str) -> str:
    """The sentences of a header."""
    disk = {"answers": plan.disk["answers"], "checkpoints and drafter": plan.disk["checkpoints and drafter"]}
    disk["features"] = plan.disk.get("features (store)", 0)
    parts = ", ".join(f"{size(count)} of {name}" for name, count in disk.items() if count)
    place = next(theirs for theirs, ours in GPUS.items() if ours == device)
    return (
        f"Memory: {plan.peak / 2**30:.0f} GiB of the device while training or measuring, whichever is more. Disk: {parts}. "
        f"Time: about {duration(sum(plan.seconds.values()))} on {place}. All three by `draftsmith data plan`, none measured."
    )


def test_the_gpu_benchmark_takes_the_memory_that_it_says(tmp_path: Path) -> None:
    target = load_recipe("gpu-bench/target")
    assert isinstance(target, TargetRecipe)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True, **vars(target.model)}))
    for name in (info.name for info in list_recipes() if info.name.startswith("gpu-bench/") and info.method is not None):
        recipe = load(name)
        plan = make_plan(recipe, make_objective(recipe), config=config, device="h200")
        assert f"Memory: {plan.peak / 2**30:.0f} GiB by `data plan`" in read_recipe_text(name), plan.peak / 2**30
        assert f"{plan.target['parameters'] / 1e6:.0f} M parameters" in read_recipe_text("gpu-bench/target")
        assert not [refusal for refusal in plan.refusals if not refusal.startswith("disk: ")]


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_has_one_tokenizer_and_a_draft_that_is_much_cheaper(name: str) -> None:
    recipe = load(name)
    assert recipe.drafter.method == "draft_model" and recipe.drafter.init is not None and recipe.run_folder == Path("runs", recipe.name)
    target, draft = fact_sheet(recipe.target.path), fact_sheet(recipe.drafter.init)
    assert target is not None and draft is not None
    assert target["config"]["vocab_size"] == draft["config"]["vocab_size"] and draft["parameters"] < 0.2 * target["parameters"]
    assert (recipe.objective.name == "pard") == (recipe.drafter.block_size is not None)
    assert recipe.drafter.block_size is None or recipe.decode.depth <= recipe.drafter.block_size


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
        if info.name in REAL:
            recipe = load(info.name)
            planned = recipe.adapter.rank is None and recipe.target.dtype != "float32"  # neither an adapter nor a laptop's memory is planned
            assert info.target == recipe.target.path and (info.memory is not None or not planned)
