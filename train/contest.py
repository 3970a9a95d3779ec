"""All methods at one wall-clock budget: the same target, the same responses, the same time for training, one table.

    python -m draftsmith.train.contest --hours 0.1667 --out runs/contest                             ten minutes each: every head of quickstart/
    python -m draftsmith.train.contest --hours 0.01 --out runs/look quickstart/medusa quickstart/eagle3 data.num_prompts=32 eval.num_prompts=4

Each recipe is trained by `draftsmith train` in a process of its own, with the learning rate falling in time for the budget; generating the responses
and the evaluation are not in it. The responses are made once. What is finished in the folder is not done again. Then `draftsmith compare` over all.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .. import UserError
from ..eval.compare import comparison_markdown, comparison_plot, comparison_table, differences, gather, verdicts
from ..recipes.schema import DrafterRecipe, list_recipes, load_recipe

STEPS = 10**6  # more than any budget holds: time ends the training
DATA = "data"  # the folder of responses in a run's

console = Console()


def entrants(names: Sequence[str], overrides: Sequence[str]) -> dict[str, DrafterRecipe]:
    """The recipes that are trained, by name. No names: those of quickstart/ that train heads. Raises UserError for one that is none of a drafter."""
    chosen = list(names) or [info.name for info in list_recipes() if info.name.startswith("quickstart/") and info.method not in (None, "draft_model")]
    recipes = {}
    for name in chosen:
        recipe = load_recipe(name, overrides)
        if not isinstance(recipe, DrafterRecipe):
            raise UserError(f"recipe {name}: wanted one of a drafter, got one of a target")
        recipes[name] = recipe
    return recipes


def run(names: Sequence[str], overrides: Sequence[str], hours: float, out: Path) -> int:
    """Train, measure and compare them. Returns the exit code: 1 if one failed, or did not pass its gate."""
    recipes = entrants(names, overrides)
    failed: list[str] = []
    done: list[tuple[str, Path]] = []
    budget = [f"train.max_hours={hours}", f"train.steps={STEPS}"]
    for name, recipe in recipes.items():
        folder = out / name.rpartition("/")[2].removesuffix(".yaml")
        for other in done:  # the same data section: the same responses
            if recipes[other[0]].data == recipe.data and (other[1] / DATA).is_dir() and not (folder / DATA).exists():
                shutil.copytree(other[1] / DATA, folder / DATA)
        console.print(f"[bold]{name}[/]: {folder}", highlight=False)
        command = [sys.executable, "-m", "draftsmith", "train", name, *overrides, *budget, f"out={folder}"]
        code = subprocess.run(command, check=False).returncode
        if code:
            failed.append(f"{name} (exit code {code})")
        if (folder / "eval" / "report.json").is_file():
            done.append((name, folder))
    if failed:
        console.print(f"failed: {', '.join(failed)}", highlight=False)
    if len(done) < 2:  # nothing to compare
        return 1 if failed else 0
    entries = gather([folder for _, folder in done])
    console.print(comparison_table(entries), soft_wrap=True)
    for line in [*differences(entries), *map(str, verdicts(entries))]:
        console.print(line, soft_wrap=True, highlight=False)
    (out / "compare.md").write_text(comparison_markdown(entries), encoding="utf-8")
    comparison_plot(entries, out / "compare.png")
    console.print(f"comparison: {(out / 'compare.md').resolve()}", soft_wrap=True)
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.train.contest", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, required=True, help="of training, for each")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of the comparison")
    parser.add_argument("words", nargs="*", metavar="RECIPE or key=value", help="recipes (none: the heads of quickstart/), and overrides for all")
    given = parser.parse_args(arguments)
    try:
        if not given.hours > 0:
            raise UserError(f"--hours: wanted more than 0, got {given.hours:g}")
        return run([w for w in given.words if "=" not in w], [w for w in given.words if "=" in w], given.hours, given.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
