"""Training data: the sequences that a recipe asks for, and padded batches of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import UserError
from ..decode.light import LightTarget
from ..decode.prompts import eos_ids
from ..decode.target import Target
from ..eval.suites import load_suite
from ..recipes.corpus import Split
from ..recipes.schema import Source
from .objectives.common import Batch
from .regenerate import Answered, Answering, ByEngine, Progress, Store, key_of, regenerate, samples_of, with_room
from .selection import Selection, select
from .server import ByServer
from .sources import documents
from .templates import Sample, encode

if TYPE_CHECKING:
    from ..recipes.schema import Data, DrafterRecipe

Sequences = Sequence[Sample]


def prepare(
    target: Target,
    recipe: DrafterRecipe,
    folder: Path,
    progress: Progress = lambda *_: None,
    shard: int = 0,
    shards: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """The sequences that a recipe trains on, in the run's folder `folder`: given answers, or the target's own (see `train/regenerate.py`).

    Raises UserError for sources that cannot be read, for answers of another target, template or other data, and if nothing is left to learn.
    """
    data, tokenizer = recipe.data, target.tokenizer
    assert tokenizer is not None
    stops = eos_ids(target.model)
    selection = select(data, measured_prompts(recipe))
    if shard == 0:
        keep_held_out(selection, folder)
    if data.responses == "given":
        samples = [encode(tokenizer, document, stops).sample for document in selection.documents]
    else:
        lines = answers(recipe, selection, folder, tokenizer, target.fingerprint(), target, progress, shard, shards, wait)
        samples = samples_of(lines, tokenizer, stops, data)
    return limited(samples, data)


def answers(
    recipe: DrafterRecipe,
    selection: Selection,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: dict[str, str],
    target: Target | None,
    progress: Progress = lambda *_: None,
    shard: int = 0,
    shards: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """The target's answers, in the run's folder: by our engine, or by data.server, for which the target itself is not needed."""
    data = recipe.data
    documents = with_room(selection.documents, tokenizer, data)
    answering: Answering
    if data.server is not None:
        answering = ByServer(data, recipe.target.path, recipe.target.template, shards)
        maker: dict[str, Any] = {"server_model": answering.model, "fingerprint": {name: fingerprint[name] for name in ("config", "tokenizer")}}
    else:
        assert target is not None
        answering, maker = ByEngine(target, data), {"fingerprint": fingerprint}
    store = Store(folder / "data" / "responses.jsonl", key_of(documents, tokenizer, data, maker))
    if shard == 0:
        store.adopt(recipe.run_folder / "data" / "responses.jsonl")  # such as those that were regenerated before their features are written
    wait()
    if not store.finished and data.server is None and isinstance(target, LightTarget):
        raise UserError(
            f"features.folder: wanted {store.path}, the answers that the features were made of, got none; copy it there too, "
            "or make it with: draftsmith data features RECIPE"
        )
    return regenerate(documents, store, answering, progress=progress, shard=shard, shards=shards, wait=wait)


def measured_prompts(recipe: DrafterRecipe) -> list[str]:
    """What the users say in prompts that are measured with, and so not trained on: those of eval.suite and data.exclude.

    The embedded suite is not compared with the embedded source: their files are others, by hash.
    """
    part, data = recipe.eval, recipe.data
    suites = [part.suite] if part.suite != "stdlib" or any(source.path != "stdlib" for source in data.parts) else []
    splits: tuple[Split, ...] = ("dev", "test")
    counts = {"dev": part.dev_prompts, "test": part.num_prompts}
    loaded = [load_suite(name, counts[split], split=split, prompt_chars=part.prompt_chars, seed=part.seed) for name in suites for split in splits]
    prompts = [messages for suite in loaded for messages in suite.prompts]
    excluded = [document for name in data.exclude for document in documents(Source(path=name))]
    prompts += [document.messages for document in excluded]
    alone = [turn for suite in loaded for turns in suite.later for turn in turns] + [document.text for document in excluded if document.text]
    return [str(message["content"]) for messages in prompts for message in messages if message["role"] == "user"] + alone


def keep_held_out(selection: Selection, folder: Path) -> None:
    """Write the prompts that are held out as data/held_out.jsonl, which `draftsmith eval --suite` takes."""
    if not selection.held_out:
        return
    path = folder / "data" / "held_out.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": document.messages} if document.messages else {"prompt": document.text}) for document in selection.held_out]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def limited(samples: Sequences, data: Data) -> list[Sample]:
    """Sequences of at most data.sequence_length tokens, and at least data.min_tokens to learn. Raises UserError if there are none."""
    size, found = data.sequence_length, list[Sample]()
    for sample in samples:
        if len(sample.ids) <= size:
            found.append(sample)
        elif data.too_long == "cut":
            found.append(sample.part(0, size))
        elif data.too_long == "split":
            found += [sample.part(start, start + size) for start in range(0, len(sample.ids), size)]
    least = [sample for sample in found if (len(sample.ids) if data.train_on == "all" else sample.learned) >= data.min_tokens]
    if not least:
        raise UserError(
            f"data: wanted sequences with {data.min_tokens} tokens or more to learn within data.sequence_length {size}, got none of {len(samples)}; "
            "look at them with draftsmith data inspect"
        )
    return least


def frequent_tokens(sequences: Sequences, size: int, vocab_size: int) -> Tensor:
    """[size] the most frequent ids among those that are learned, ascending; ties and ids never seen go by id."""
    counts = Counter(token for ids, spans in sequences for start, stop in spans for token in ids[start:stop])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def collate(sequences: Sequences) -> Batch:
    """Right-padded batch; the loss is on the spans, padding is document -1."""
    return collate_packed([[sample] for sample in sequences])


def collate_packed(rows: Sequence[Sequences]) -> Batch:
    """Right-padded batch of rows of one sequence or more, which are documents 0, 1, .. of the row; positions start anew with each."""
    longest = max(sum(len(sample.ids) for sample in row) for row in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    loss_BT, document_BT = torch.zeros_like(ids_BT, dtype=torch.bool), torch.full_like(ids_BT, -1)
    position_BT = torch.arange(longest).repeat(len(rows), 1)
    for index, row in enumerate(rows):
        at = 0
        for document, (ids, spans) in enumerate(row):
            ids_BT[index, at : at + len(ids)] = torch.tensor(ids)
            for start, stop in spans:
                loss_BT[index, at + start : at + stop] = True
            document_BT[index, at : at + len(ids)] = document
            position_BT[index, at:] = torch.arange(longest - at)
            at += len(ids)
    return Batch(ids_BT, loss_BT, position_BT, document_BT)
