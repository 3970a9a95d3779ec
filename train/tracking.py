"""Trackers (wandb, tensorboard): what they get beside the lines of metrics.jsonl: the final evaluation's figures, and its report with the plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available, is_wandb_available

from .. import UserError
from ..eval.schema import Report
from ..recipes.schema import DrafterRecipe, to_yaml


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not installed: accelerate would go on without it, and say nothing."""
    installed = {"wandb": is_wandb_available, "tensorboard": is_tensorboard_available}
    for name in names:
        if not installed[name]():
            raise UserError(f"train.trackers: wanted installed ones, got {name}, which is not; pip install 'draftsmith[{name}]', or leave it out")


def start_trackers(accelerator: Accelerator, recipe: DrafterRecipe, folder: Path) -> None:
    """Start those of the recipe, unless they have been: a training does, and an evaluation whose training was over before this process began."""
    if recipe.train.trackers and not accelerator.trackers:
        accelerator.init_trackers("draftsmith", config={"recipe": to_yaml(recipe)}, init_kwargs={"wandb": {"dir": str(folder)}})


def log_report(accelerator: Accelerator, report: Report, folder: Path) -> None:
    """Give the report in `folder` to all trackers that this run has."""
    figures = {}
    for row in (row for row in report.results if row.category == "all"):
        name = f"{row.suite}, T={row.temperature:g}, batch {row.batch}, {row.rule}"
        figures[f"tau/{name}"] = row.tau
        if row.speedup.engine is not None:
            figures[f"speedup/{name}"] = row.speedup.engine
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            import wandb

            page = wandb.Html((folder / "report.html").read_text(encoding="utf-8"), inject=False)
            tracker.tracker.log({**figures, "report": page})
        elif tracker.name == "tensorboard":
            tracker.log(figures, step=0)
            tracker.writer.add_text("report", (folder / "report.md").read_text(encoding="utf-8"))
