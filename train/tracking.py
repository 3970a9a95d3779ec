"""What trackers (wandb, tensorboard) get beside the lines of metrics.jsonl: the final evaluation's figures, and its report with the plots."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator

from ..eval.schema import Report


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
