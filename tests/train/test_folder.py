"""A run's folder: what a refused or a cut-off run leaves does not stand in the way of the next one, and nothing of it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.heads.registry import copy_drafter
from draftsmith.recipes.schema import DrafterRecipe, load_recipe
from draftsmith.train import run as stages
from draftsmith.train.folder import kept_figures, open_run_folder

from . import small


class Killed(BaseException):
    """As kill -9: nothing is tidied up."""


def recipe(folder: Path, *settings: str) -> DrafterRecipe:
    loaded = load_recipe("quickstart/draft", [f"out={folder}", "drafter.predictor=true", "export.formats=[]", *settings])
    assert isinstance(loaded, DrafterRecipe)
    return loaded


def test_a_training_that_was_cut_off_before_its_figures_is_not_taken_for_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is there, but not its predictor: training goes on from its last checkpoint, and the predictor comes after it."""
    fits: list[int] = []
    given: list[dict[str, Any]] = []

    def fit(made: DrafterRecipe, objective: Any, folder: Path, *_: Any) -> dict[str, Any]:
        (folder / "drafter").mkdir(exist_ok=True)
        (folder / "drafter" / "config.json").write_text("{}")
        fits.append(1)
        return {"best_step": 7}

    def add_predictor(*_: Any, **__: Any) -> dict[str, float]:
        if len(fits) == 1:
            raise Killed
        return {"ece": 0.25}

    def conclude(made: DrafterRecipe, folder: Path, accelerator: Any, target: Any, figures: dict[str, Any]) -> int:
        given.append(figures)
        return 0

    for name, fake in (("fit", fit), ("add_predictor", add_predictor), ("_conclude", conclude)):
        monkeypatch.setattr(stages, name, fake)
    monkeypatch.setattr(stages, "load_target", lambda *_: small.target())
    monkeypatch.setattr(stages, "prepare", lambda *_: [])
    monkeypatch.setattr(stages, "check_plan", lambda *_: None)
    with pytest.raises(Killed):
        stages.run(recipe(tmp_path))
    assert stages.run(recipe(tmp_path)) == 0 and stages.run(recipe(tmp_path)) == 0
    assert len(fits) == 2 and given[0] == given[1] and given[0]["predictor"] == {"ece": 0.25} and given[0]["best_step"] == 7
    (tmp_path / "training.json").write_text(json.dumps(given[0])[:-9])
    assert kept_figures(tmp_path) is None
    assert not list(tmp_path.glob("*.partial*"))


def test_a_replacement_that_was_cut_off_twice_loses_nothing(tmp_path: Path) -> None:
    """The first time after the last renaming: an old folder lies beside the new one."""
    source, folder = tmp_path / "best", tmp_path / "drafter"
    for name, text in (("best", "newest"), ("drafter", "newer"), ("drafter.old", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    copy_drafter(source, folder)
    assert (folder / "config.json").read_text() == "newest" and sorted(path.name for path in tmp_path.iterdir()) == ["best", "drafter"]


def test_a_refused_recipe_may_be_mended_in_the_same_folder(tmp_path: Path) -> None:
    folder = open_run_folder(recipe(tmp_path / "r", "train.lr=1"))
    open_run_folder(recipe(folder, "train.lr=0.5"))
    assert "lr: 0.5" in (folder / "recipe.yaml").read_text()
    before = (folder / "recipe.yaml").stat().st_mtime_ns
    (folder / "data").mkdir()
    open_run_folder(recipe(folder, "train.lr=0.5"))
    assert (folder / "recipe.yaml").stat().st_mtime_ns == before  # others may be reading it
    with pytest.raises(UserError, match="which holds a run of another recipe"):
        open_run_folder(recipe(folder, "train.lr=1"))
    assert "lr: 0.5" in (folder / "recipe.yaml").read_text()


def test_processes_that_try_the_folder_at_once_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch = Path.touch

    def between(self: Path, *_: Any, **__: Any) -> None:
        touch(self)
        for path in tmp_path.glob(".writable"):  # the other process is done with a probe of the same name
            path.unlink()

    monkeypatch.setattr(Path, "touch", between)
    open_run_folder(recipe(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
