"""`draftsmith data regenerate RECIPE`: the target's own answers, made before training, by our engine or by a server of the target."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from .. import UserError
from ..decode.prompts import eos_ids, set_template
from ..decode.target import surroundings
from ..recipes.schema import DrafterRecipe, TargetRef
from .data import answers, keep_held_out, limited, measured_prompts
from .features import load_whole
from .loop import progress_bar
from .regenerate import REFUSED, samples_of
from .selection import select


def open_tokenizer(ref: TargetRef) -> tuple[PreTrainedTokenizerBase, list[int], dict[str, str]]:
    """(tokenizer, the ids that end a generation, fingerprint but for the weights) of a target, which is not loaded itself."""
    try:
        config = AutoConfig.from_pretrained(ref.location, revision=ref.revision)
        tokenizer = AutoTokenizer.from_pretrained(ref.location, revision=ref.revision)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(f"target {ref.path}: its tokenizer cannot be loaded ({said}); give a model folder or a hub name") from error
    try:
        generation: Any = GenerationConfig.from_pretrained(ref.location, revision=ref.revision)
    except OSError:  # it has none
        generation = None
    set_template(tokenizer, ref.template)

    class Settings:
        """What `eos_ids` reads of a model."""

        generation_config = generation

    Settings.config = config  # type: ignore[attr-defined]
    return tokenizer, eos_ids(Settings), surroundings(config, tokenizer)


def run_regenerate(recipe: DrafterRecipe, console: Console) -> None:
    """Make the answers, or what is missing of them, where training looks for them. Raises UserError as `train.data.prepare` does."""
    data, folder = recipe.data, recipe.data_folder
    if data.responses == "given":
        raise UserError("data.responses: wanted target, got given: there is nothing to regenerate")
    selection = select(data, measured_prompts(recipe))
    if data.server is None:
        target = load_whole(recipe, recipe.target.device)
        assert target.tokenizer is not None
        tokenizer, stops, prints = target.tokenizer, eos_ids(target.model), target.fingerprint()
    else:
        target = None
        tokenizer, stops, prints = open_tokenizer(recipe.target)
    keep_held_out(selection, folder)
    began = time.monotonic()
    with progress_bar(True) as bar:
        task = bar.add_task("answers", total=None, note="")

        def show(done: int, every: int, tokens: int) -> None:
            bar.update(task, completed=done, total=every, note=f"{tokens / (time.monotonic() - began):.0f} tokens/s")

        lines = answers(recipe, selection, folder, tokenizer, prints, target, show)
    finish = [why for line in lines for why in line["finish"]]
    samples = limited(samples_of(lines, tokenizer, stops, data), data)
    counts = f"{finish.count('stop')} ended, {finish.count('length')} cut off at {data.response_tokens} tokens, {finish.count(REFUSED)} refused"
    aside = {"held out": len(selection.held_out), **selection.left_out}
    left_out = ", ".join(f"{count} {reason}" for reason, count in aside.items() if count) or "nothing"
    learned = f"{len(samples)} sequences, {sum(sample.learned for sample in samples)} tokens to learn"
    console.print(f"{len(lines)} conversations; answers: {counts}; {learned}; left out: {left_out}", soft_wrap=True, highlight=False)
    console.print(f"answers: {(folder / 'data' / 'responses.jsonl').resolve()}", soft_wrap=True, highlight=False)
