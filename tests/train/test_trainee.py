"""What a recipe asks for and the trained drafter could not do is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.heads.registry import new_head, save_drafter
from draftsmith.recipes.schema import DrafterRecipe, load_recipe
from draftsmith.train import run as stages
from draftsmith.train.run import run
from draftsmith.train.sharding import check_sharding
from draftsmith.train.trainee import HeadTrainee

from . import small

OTHER = ["objective.name=null", "objective.steps=null", "objective.step_decay=null", "drafter.taps=null"]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("eagle3", ["eval.rule=nonsense"], "rule"),
        ("eagle3", ["eval.rule=greedy"], r"eval\.temperatures: wanted \[0\] with the rule greedy"),
        ("eagle3", ["decode.length=expected"], r"decode\.length: wanted another rule for the method eagle3, which has no confidence head"),
        ("draft", ["decode.length=predicted"], r"decode\.length: wanted another rule, or drafter\.predictor=true"),
    ],
)
def test_settings_that_only_the_evaluation_reads_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: list[str], says: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(stages, "load_target", fail)
    made = load_recipe(f"quickstart/{name}", [f"out={tmp_path}", "eval.tune=false", "decode.tree=chain", "decode.nodes=null", *settings])
    with pytest.raises(UserError, match=says):
        run(made)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["decode.tree=chain", "decode.nodes=null", "decode.length=additive"], "decode.length: wanted null, as medusa does not draft level by level"),
        (["decode.tree=cost_aware", "decode.nodes=null"], "decode.tree: wanted chain or dynamic, as medusa does not draft level by level"),
        (["eval.rule=token_wise"], "eval.rule: wanted one of .*, as medusa does not draw its drafts, got token_wise"),
    ],
)
def test_drafts_that_it_cannot_make_are_refused_when_it_is_made(settings: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        HeadTrainee.of(
            small.recipe(*OTHER, "drafter.method=medusa", "decode.depth=3", "eval.tune=false", *settings), small.target(), small.sequences()
        )


@pytest.mark.parametrize(
    ("method", "made", "other", "says"),
    [
        ("eagle3", {"draft_vocab_size": 60, "taps": [1, 2, 3]}, "draft_vocab_size=50", "drafter.draft_vocab_size: wanted null or 60"),
        ("eagle3", {"draft_vocab_size": 60, "taps": [1, 2, 3]}, "taps=[0,2,3]", "drafter.taps: wanted null or (1, 2, 3)"),
        ("mlp_speculator", {"intermediate_size": 24, "draft_vocab_size": 60}, "intermediate_size=40", "drafter.intermediate_size: wanted null, as"),
    ],
)
def test_a_drafter_that_goes_on_has_the_sizes_that_the_recipe_says(tmp_path: Path, method: str, made: dict[str, Any], other: str, says: str) -> None:
    target = small.target()
    head = new_head(method, target, made)
    save_drafter(head, tmp_path / "d", {"target": {"name": "small", "fingerprint": target.fingerprint()}})
    same = [f"drafter.{name}={value}" for name, value in made.items()]
    plain = [*OTHER, f"drafter.method={method}", f"drafter.init={tmp_path / 'd'}", "drafter.draft_vocab_size=null", "decode.depth=3"]

    def trainee(*settings: str) -> HeadTrainee:
        asked = small.recipe(*plain, *settings)
        assert isinstance(asked, DrafterRecipe)
        return HeadTrainee.of(asked, target, small.sequences())

    assert trainee().drafter.sizes == trainee(*same).drafter.sizes == head.sizes
    with pytest.raises(UserError) as error:
        trainee(f"drafter.{other}")
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    ("settings", "processes", "says"),
    [
        ([], 1, "target.shard: wanted false, as this is one process"),
        (["train.keep_features_gib=1"], 2, "train.keep_features_gib: wanted 0, as the target is in shards"),
        (["features.source=ring"], 2, "features.source: wanted online, as the target is in shards .*, got ring"),
        (["drafter.init=target"], 2, "drafter.init: wanted null or a folder, as the target is in shards"),
    ],
)
def test_what_shards_of_a_target_cannot_do_is_refused(settings: list[str], processes: int, says: str) -> None:
    made = small.recipe("target.shard=true", "train.keep_features_gib=0", *settings)
    with pytest.raises(UserError, match=says):
        check_sharding(made, processes)
    check_sharding(small.recipe("target.shard=true", "train.keep_features_gib=0"), 2)
