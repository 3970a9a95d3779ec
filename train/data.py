"""Training data: prompts, the target's own continuations of them, and padded batches."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import UserError
from ..decode.engine import Engine
from ..decode.prompts import eos_ids, render_prompt
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..eval.suites import load_suite
from .objectives.common import Batch

if TYPE_CHECKING:
    from ..recipes.schema import Data

Sequences = list[tuple[list[int], int]]  # (ids, prompt length)


def regenerate(
    target: Target,
    data: Data,
    store: Path,
    progress: Callable[[int, int, int], None],
    shard: int = 0,
    shards: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> Sequences:
    """Prompts with the target's own responses, kept in `store` (JSONL), whose first line says what they were made from.

    Each of `shards` processes generates its share of the batches; `wait` is their barrier. The result does not depend on their number.
    A finished store of the same target and settings is read instead; one of others is refused. progress(done, all, tokens): this process's.
    """
    assert target.tokenizer is not None
    key = {"fingerprint": target.fingerprint(), "data": {k: str(v) for k, v in vars(data).items() if k != "train_on"}}
    if store.is_file():
        return _read(store, key)
    if data.responses != "target":
        raise UserError("data.responses: wanted target, got given; training on given responses is not supported yet")
    suite = load_suite(data.source, data.num_prompts, split="train", prompt_chars=data.prompt_chars, seed=data.seed)
    room = data.sequence_length - data.response_tokens
    prompts = [ids for ids in (render_prompt(target.tokenizer, m) for m in suite.prompts) if len(ids) <= room]
    if not prompts:
        raise UserError(f"data.sequence_length: wanted room for prompts beside data.response_tokens, got {room} tokens, less than any prompt has")
    engine, stops, tokens = Engine(target), eos_ids(target.model), 0
    store.parent.mkdir(parents=True, exist_ok=True)
    parts = [store.with_name(f"{store.name}.{i}-of-{shards}.partial") for i in range(shards)]
    mine = range(shard * data.generation_batch, len(prompts), shards * data.generation_batch)
    share = sum(len(prompts[start : start + data.generation_batch]) for start in mine)
    done = 0
    with parts[shard].open("w", encoding="utf-8") as handle:
        for start in mine:
            part = prompts[start : start + data.generation_batch]
            params = [
                SamplingParams(temperature=data.temperatures[(start + i) % len(data.temperatures)], seed=data.seed + start + i)
                for i in range(len(part))
            ]
            out = engine.generate(part, params, data.response_tokens, eos_ids=stops)
            for index, (prompt, new) in enumerate(zip(part, out.tokens, strict=True), start):
                handle.write(json.dumps({"index": index, "ids": prompt + new, "prompt": len(prompt)}) + "\n")
            done, tokens = done + len(part), tokens + sum(len(new) for new in out.tokens)
            progress(done, share, tokens)
    wait()
    if shard == 0:
        _merge(parts, store, key)
    wait()
    return _read(store, key)


def _merge(parts: list[Path], store: Path, key: dict[str, Any]) -> None:
    """All parts, in the order of the prompts, to the finished store: it appears whole or not at all."""
    lines = sorted((json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()), key=lambda line: line["index"])
    draft = store.with_suffix(".partial")
    with draft.open("w", encoding="utf-8") as handle:
        for line in [key, *lines]:
            handle.write(json.dumps(line) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    draft.rename(store)
    for part in parts:
        part.unlink()


def _read(store: Path, key: dict[str, Any]) -> Sequences:
    with store.open(encoding="utf-8") as handle:
        lines = [json.loads(line) for line in handle]
    if lines[0] != key:
        raise UserError(f"data {store}: made for another target or other data settings; give another out=FOLDER, or delete it")
    return [(line["ids"], line["prompt"]) for line in lines[1:]]


def frequent_tokens(sequences: Sequences, size: int, vocab_size: int) -> Tensor:
    """[size] the most frequent ids of the responses, ascending; ties and ids never seen go by id."""
    counts = Counter(token for ids, prompt in sequences for token in ids[prompt:])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def collate(sequences: Sequences) -> Batch:
    """Right-padded batch; the loss is on the responses, padding is document -1."""
    longest = max(len(ids) for ids, _ in sequences)
    ids_BT = torch.zeros(len(sequences), longest, dtype=torch.int64)
    loss_BT, document_BT = torch.zeros_like(ids_BT, dtype=torch.bool), torch.full_like(ids_BT, -1)
    for row, (ids, prompt) in enumerate(sequences):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        loss_BT[row, prompt : len(ids)] = True
        document_BT[row, : len(ids)] = 0
    return Batch(ids_BT, loss_BT, torch.arange(longest).expand_as(ids_BT), document_BT)
