"""`draftsmith data features RECIPE`: the target's answers and their features, written to the recipe's store (see `train/store.py`)."""

from __future__ import annotations

import dataclasses
import time

from rich.console import Console

from .. import UserError
from ..recipes.schema import DrafterRecipe
from .data import prepare
from .features import check_source, data_settings, drafter_taps, load_whole, saved_form
from .loop import progress_bar
from .plan import check_plan
from .run import make_objective
from .store import Store, write_store


def make_store(recipe: DrafterRecipe, console: Console, sample_tokens: int | None = None) -> Store:
    """Write the store, or what is missing of it. Everything is kept in its folder.

    sample_tokens: what a sequence has on average, as far as is known. Raises UserError before anything is loaded for bad settings, and for a store
    that the disk cannot hold.
    """
    recipe = dataclasses.replace(recipe, features=dataclasses.replace(recipe.features, source="store"))
    check_source(recipe)
    objective, folder = make_objective(recipe), recipe.features_folder
    check_plan(recipe, objective, sample_tokens=sample_tokens)
    target = load_whole(recipe, recipe.target.device)
    taps = drafter_taps(recipe, target)
    with progress_bar(True) as bar:
        began = time.monotonic()
        task = bar.add_task("target's own responses", total=None, note="")

        def show(done: int, every: int, tokens: int) -> None:
            bar.update(task, completed=done, total=every, note=f"{tokens / (time.monotonic() - began):.0f} tokens/s")

        sequences = prepare(target, recipe, folder, show)
        began, task = time.monotonic(), bar.add_task("features", total=None, note="")
        store = write_store(
            target,
            [sample.ids for sample in sequences],
            folder,
            saved_form(recipe, objective, target, taps),
            data_settings(recipe),
            shard_bytes=int(recipe.features.shard_mib * 2**20),
            progress=show,
        )
    size = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    tokens = int(store.about["data"]["tokens"])
    console.print(
        f"{store.sequences} sequences, {tokens} tokens, {size / 2**20:.1f} MiB ({size / max(tokens, 1):.0f} bytes a token) in {folder}: "
        f"train from it with features.source=store features.folder={folder}",
        soft_wrap=True,
        highlight=False,
    )
    return store


def verify_store(recipe: DrafterRecipe, console: Console) -> bool:
    """Compare every byte of the recipe's store with what was written; print what is wrong. Returns whether nothing is."""
    store = Store(recipe.features_folder)
    with progress_bar(True) as bar:
        task = bar.add_task("shards", total=None, note="")
        wrong = store.verify(lambda done, every: bar.update(task, completed=done, total=every))
    for line in wrong:
        console.print(line, soft_wrap=True, highlight=False)
    if wrong:
        console.print(f"delete these files of {store.folder}, then give the command without --verify: they are made anew", soft_wrap=True)
    else:
        console.print(f"{len(store.entries)} of {store.sequences} sequences in {store.folder}: all as written", soft_wrap=True, highlight=False)
    return not wrong


def check_drafter(recipe: object) -> DrafterRecipe:
    """A drafter's recipe. Raises UserError for a target's."""
    if not isinstance(recipe, DrafterRecipe):
        raise UserError("kind: wanted a drafter's recipe, got a target's, which has no data of its own")
    return recipe
