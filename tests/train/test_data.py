"""Training data: shards put together are the whole, a store belongs to its target and settings, and what is given is learned where it was said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.recipes.schema import Data, DrafterRecipe, TargetRef
from draftsmith.train.data import frequent_tokens, measured_prompts, prepare
from draftsmith.train.templates import Sample

SMALL: dict[str, Any] = {
    "num_prompts": 7,
    "prompt_chars": 120,
    "response_tokens": 6,
    "generation_batch": 2,
    "sequence_length": 128,
    "temperatures": [0.0, 1.0],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetRef().location)


def recipe(**data: Any) -> DrafterRecipe:
    return DrafterRecipe(name="r", data=Data(**{**SMALL, **data}))


def test_two_processes_make_what_one_makes(target: Target, tmp_path: Path) -> None:
    """The second process ends first; the first then puts both parts together."""
    calls: list[tuple[int, int]] = []
    whole = prepare(target, recipe(), tmp_path / "one", lambda done, every, tokens: calls.append((done, every)))
    assert calls[-1] == (7, 7) and len(whole) == 7
    for ids, spans in whole:
        ((start, stop),) = spans
        assert start < stop == len(ids) <= start + 6

    class Second(Exception):
        """The barrier after its share, which nobody else reaches in this test."""

    barriers = iter([lambda: None])  # the first is before the work

    def stop_there() -> None:
        next(barriers, _raise(Second))()

    with pytest.raises(Second):
        prepare(target, recipe(), tmp_path / "two", shard=1, shards=2, wait=stop_there)
    store = tmp_path / "two" / "data" / "responses.jsonl"
    assert not store.exists()
    assert prepare(target, recipe(), tmp_path / "two", shard=0, shards=2) == whole
    assert [path.name for path in store.parent.iterdir()] == ["responses.jsonl"]
    assert store.read_bytes() == (tmp_path / "one" / "data" / "responses.jsonl").read_bytes()


def _raise(error: type[Exception]) -> Callable[[], None]:
    def raising() -> None:
        raise error

    return raising


def test_prompts_of_files_that_are_excluded_are_measured_with_whatever_their_form(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("a text by itself")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "said"}]}\n')
    found = measured_prompts(recipe(exclude=[str(tmp_path / "plain.txt"), str(tmp_path / "chats.jsonl")]))
    assert sorted(found) == ["a text by itself", "asked"]


def test_a_finished_store_is_read_and_a_foreign_one_refused(target: Target, tmp_path: Path) -> None:
    made = prepare(target, recipe(), tmp_path)

    def fail(*_: int) -> None:
        raise AssertionError("generated again")

    assert prepare(target, recipe(train_on="all"), tmp_path, fail) == made  # says what to learn, not what to generate
    with pytest.raises(UserError, match="made for another target or other data settings") as error:
        prepare(target, recipe(response_tokens=7), tmp_path, fail)
    assert "response_tokens" in str(error.value) and "wanted" in str(error.value)


def test_given_answers_are_learned_and_plain_text_whole(target: Target, tmp_path: Path) -> None:
    chats, text = tmp_path / "chats.jsonl", tmp_path / "notes.txt"
    talk = [
        {"role": role, "content": content} for role, content in (("user", "a = 1"), ("assistant", "b = 2"), ("user", "c"), ("assistant", "d = 4"))
    ]
    chats.write_text(json.dumps({"messages": talk}) + "\n")
    text.write_text("def f():\n    return 1\n")
    assert target.tokenizer is not None
    ((ids, spans),) = prepare(target, recipe(source=str(chats), num_prompts=1, responses="given"), tmp_path)
    assert [target.tokenizer.decode(ids[a:b]) for a, b in spans] == ["b = 2<|end|>", "d = 4<|end|>"]
    ((ids, spans),) = prepare(target, recipe(source=str(text), num_prompts=1, responses="given"), tmp_path)
    assert spans == [(0, len(ids))] and target.tokenizer.decode(ids) == text.read_text()
    windows = prepare(target, recipe(responses="given"), tmp_path)
    assert len(windows) == 7 and all(spans[0][0] > 0 and spans[-1][1] == len(ids) for ids, spans in windows)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("too_long", "wanted"), [("cut", [([0, 1, 2, 3], [(1, 4)])]), ("drop", []), ("split", [([0, 1, 2, 3], [(1, 4)]), ([4, 5], [(0, 1)])])]
)
def test_sequences_that_are_too_long(too_long: str, wanted: list[tuple[list[int], list[tuple[int, int]]]]) -> None:
    from draftsmith.train.data import limited

    data = Data(responses="given", sequence_length=4, too_long=too_long)  # type: ignore[arg-type]
    found = limited([Sample([0, 1, 2, 3, 4, 5], [(1, 5)]), Sample([7, 8], [(0, 1)])], data)
    assert found == [*(Sample(*pair) for pair in wanted), Sample([7, 8], [(0, 1)])]


def test_the_draft_vocabulary_is_the_most_frequent_response_tokens() -> None:
    sequences = [Sample([9, 9, 9, 4, 4, 7], [(3, 6)]), Sample([1, 4, 6], [(1, 3)])]
    assert frequent_tokens(sequences, 2, 12).tolist() == [4, 6]  # 4 three times; of 6 and 7, once each, the lower id; 9 is in a prompt
