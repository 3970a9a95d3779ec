"""All methods at one budget: who takes part, what each is told, what is done with those that fail."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.heads.registry import METHODS
from draftsmith.train import contest

from ..eval.test_compare import row, save


def test_all_heads_of_the_quickstart_take_part_unless_some_are_named() -> None:
    recipes = contest.entrants([], [])
    assert {recipe.drafter.method for recipe in recipes.values()} == set(METHODS) - {"draft_model"}
    assert {"quickstart/medusa2", "quickstart/hass", "quickstart/eagle3_1"} <= set(recipes)
    assert len({str(vars(recipe.data)) for recipe in recipes.values()}) == 1  # one set of responses
    assert contest.entrants(["quickstart/mtp"], ["train.lr=0.5"])["quickstart/mtp"].train.lr == 0.5
    with pytest.raises(UserError, match="wanted one of a drafter, got one of a target"):
        contest.entrants(["quickstart/target"], [])


def test_each_gets_the_same_budget_and_responses_and_failures_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def trained(command: list[str], check: bool) -> Any:
        commands.append(command)
        folder = Path(command[-1].removeprefix("out="))
        if "quickstart/mtp" in command:
            return subprocess.CompletedProcess(command, 2)
        if len(commands) == 1:
            (folder / "data").mkdir(parents=True)
            (folder / "data" / "responses.jsonl").write_text("said once")
        assert (folder / "data" / "responses.jsonl").read_text() == "said once"
        save(folder, folder.name, [row(0.0, 2.0, 1.1 + 0.1 * len(commands), 1.05)])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", trained)
    names = ["quickstart/medusa", "quickstart/mtp", "quickstart/hydra"]
    assert contest.main(["--hours", "0.25", "--out", str(tmp_path), *names, "train.seed=3"]) == 1
    for name, command in zip(names, commands, strict=True):
        assert command[2:5] == ["draftsmith", "train", name]
        assert command[5:] == ["train.seed=3", "train.max_hours=0.25", "train.steps=1000000", f"out={tmp_path / name.partition('/')[2]}"]
    told = capsys.readouterr().out
    assert "failed: quickstart/mtp (exit code 2)" in told and "hydra over medusa" in told
    assert "hydra" in (tmp_path / "compare.md").read_text() and (tmp_path / "compare.png").is_file()


def test_wrong_budgets_and_names_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in ((["--hours", "0"], "--hours: wanted more than 0, got 0"), (["--hours", "1", "quickstart/medsua"], "quickstart/medusa")):
        assert contest.main([*words, "--out", str(tmp_path)]) == 2
        assert says in capsys.readouterr().err
