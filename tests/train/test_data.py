"""Training data: shards put together are the whole, and a store belongs to its target and settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.recipes.schema import Data, TargetRef
from draftsmith.train.data import frequent_tokens, regenerate

DATA = Data(source="stdlib", num_prompts=7, prompt_chars=120, response_tokens=6, generation_batch=2, sequence_length=128, temperatures=[0.0, 1.0])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetRef().location)


def test_two_processes_make_what_one_makes(target: Target, tmp_path: Path) -> None:
    """The second process ends first; the first then puts both parts together."""
    calls: list[tuple[int, int]] = []
    whole = regenerate(target, DATA, tmp_path / "one" / "responses.jsonl", lambda done, every, tokens: calls.append((done, every)))
    assert calls[-1] == (7, 7) and all(prompt < len(ids) <= prompt + 6 for ids, prompt in whole)
    store = tmp_path / "two" / "responses.jsonl"

    class Second(Exception):
        """The barrier, which nobody else reaches in this test."""

    def stop() -> None:
        raise Second

    with pytest.raises(Second):
        regenerate(target, DATA, store, lambda *_: None, shard=1, shards=2, wait=stop)
    assert not store.exists()
    assert regenerate(target, DATA, store, lambda *_: None, shard=0, shards=2) == whole
    assert [path.name for path in store.parent.iterdir()] == ["responses.jsonl"]


def test_a_finished_store_is_read_and_a_foreign_one_refused(target: Target, tmp_path: Path) -> None:
    store = tmp_path / "responses.jsonl"
    made = regenerate(target, DATA, store, lambda *_: None)

    def fail(*_: int) -> None:
        raise AssertionError("generated again")

    assert regenerate(target, dataclasses.replace(DATA, train_on="all"), store, fail) == made  # says what to learn, not what to generate
    with pytest.raises(UserError, match="made for another target or other data settings"):
        regenerate(target, dataclasses.replace(DATA, seed=1), store, fail)


def test_the_draft_vocabulary_is_the_most_frequent_response_tokens() -> None:
    sequences = [([9, 9, 9, 4, 4, 7], 3), ([1, 4, 6], 1)]
    assert frequent_tokens(sequences, 2, 12).tolist() == [4, 6]  # 4 three times; of 6 and 7, once each, the lower id; 9 is in a prompt
