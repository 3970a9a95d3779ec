"""A run's folder: that it can be written, holds one recipe, and what says that its training is over.

folder = open_run_folder(recipe)            recipe.yaml is in it
keep_figures(folder, {...})                 training.json: the drafter is there, with all that belongs to it
figures = kept_figures(folder)              None: not trained yet, or not to the end
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from .. import UserError
from ..recipes.schema import DrafterRecipe, TargetRecipe, to_yaml

# What a run makes in its folder. Until one of them is there, another recipe may have it: the first may have been refused, and was mended.
_BEGUN = ("data", "checkpoints", "metrics.jsonl", "drafter", "training.json", "eval", "export", "model")


def open_run_folder(recipe: DrafterRecipe | TargetRecipe) -> Path:
    """The run folder, with recipe.yaml in it. Raises UserError if it cannot be written, or holds a run of another recipe.

    All processes of a run call it, at the same time.
    """
    folder = recipe.run_folder
    text, kept = to_yaml(recipe), folder / "recipe.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{_own()}"
        probe.touch()
        probe.unlink(missing_ok=True)
        before = kept.read_text(encoding="utf-8") if kept.is_file() else None
        if before != text:
            if before is not None and any((folder / name).exists() for name in _BEGUN):
                raise UserError(f"out: wanted a new folder, got {folder}, which holds a run of another recipe; give another out=FOLDER")
            replace_text(kept, text)
    except OSError as error:
        raise UserError(f"out: wanted a folder that can be written, got {folder} ({error.strerror}); give another out=FOLDER") from error
    return folder


def keep_figures(folder: Path, figures: dict[str, Any]) -> None:
    """Write training.json, by which a training is known to be over: after everything else that it leaves."""
    replace_text(folder / "training.json", json.dumps(figures, indent=2) + "\n")


def kept_figures(folder: Path) -> dict[str, Any] | None:
    """The figures of a training that is over."""
    try:
        figures: dict[str, Any] = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # ValueError: an older version's, which was cut off in writing
        return None
    return figures


def replace_text(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, whichever process and however often."""
    draft = path.with_name(f"{path.name}.partial-{_own()}")
    try:
        with draft.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _own() -> str:
    """No other process's, not even one of another machine that has the same id."""
    return f"{os.environ.get('RANK', '0')}-{os.getpid()}"
