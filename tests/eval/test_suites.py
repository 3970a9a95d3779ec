"""Prompt sets: every form of line, every public set's own columns, draws by seed, and splits that do not meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.eval import suites
from draftsmith.eval.suites import SOURCES, load_suite

ROWS: dict[str, dict[str, Any]] = {
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "", "test": ""},
    "gsm8k": {"question": "How many?", "answer": "2"},
    "alpaca": {"instruction": "Sort.", "input": "3 1 2", "output": "1 2 3"},
    "cnn_dm": {"article": "It rained.", "highlights": "Rain.", "id": "1"},
    "spec_bench": {"question_id": 1, "category": "rag", "turns": ["Who?"]},
    "speed_bench": {"question_id": "x", "category": "math", "sub_category": "", "turns": ["One?", "Two?"], "multiturn": True},
}


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("name", SOURCES)
def test_public_sets_from_a_local_copy_and_from_the_hub_are_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = lines(tmp_path / "q.jsonl", [ROWS[name]])
    local = load_suite(f"{name}:{file}", 1, split="test")
    asked: list[Any] = []

    def load_dataset(path: str, subset: str | None, split: str) -> list[Any]:
        asked.append((path, subset, split))
        return [ROWS[name]]

    import datasets

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = load_suite(name, 1, split="test")
    assert hub == local and hub.digest == local.digest and local.name == name
    assert asked == [(SOURCES[name].path, SOURCES[name].subset, SOURCES[name].split)]
    said = [local.prompts[0][0]["content"], *(local.later[0] if local.later else ())]
    wanted = ROWS[name].get("turns") or [ROWS[name].get("question") or ROWS[name].get("prompt") or ROWS[name].get("article") or "3 1 2"]
    assert len(said) == len(wanted) and all(text in heard for text, heard in zip(wanted, said, strict=True))
    assert local.categories == ([ROWS[name]["category"]] if "category" in ROWS[name] else [])


def test_every_form_of_line(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    file = lines(
        tmp_path / "mine.jsonl",
        [{"prompt": "p"}, {"turns": ["t", "u"], "category": "c"}, {"messages": [*talk, {"role": "user", "content": "b"}]}],
    )
    found = {c.opening[-1]["content"]: c for c in load_suite(str(file), 3, split="test").conversations}
    assert found["p"].later == () and found["p"].category == "all"
    assert found["t"].later == ("u",) and found["t"].category == "c"
    assert [m["role"] for m in found["a"].opening] == ["system", "user"] and found["a"].later == ("b",)  # x is the target's to give


def test_draws_follow_the_seed_and_development_prompts_come_from_the_other_end(tmp_path: Path) -> None:
    file = str(lines(tmp_path / "many.jsonl", [{"prompt": str(i)} for i in range(20)]))

    def drawn(split: Any, seed: int = 0) -> list[str]:
        return [messages[0]["content"] for messages in load_suite(file, 8, split=split, seed=seed).prompts]

    assert drawn("test") == drawn("test") != drawn("test", seed=1)
    assert not set(drawn("test")) & set(drawn("dev"))
    one, other = (load_suite(file, 8, split="test", seed=seed).digest for seed in (0, 1))
    assert one != other


def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.jsonl"
    for text, says in (
        ("{", ":1: wanted one JSON object a line"),
        ('{"text": "x"}', ":1: wanted"),
        ('{"messages": []}', ":1: wanted"),
        ("[]", ":1: wanted"),
        ('{"turns": "abc"}', ":1: wanted"),  # would be taken for three turns of a letter
        ('{"prompt": ["a", "b"]}', ":1: wanted"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', ":1: wanted"),
    ):
        bad.write_text(text)
        with pytest.raises(UserError, match=says):
            load_suite(str(bad), 1, split="test")
    bad.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(UserError, match="wanted a text file in UTF-8, got byte 15"):
        load_suite(str(bad), 1, split="test")
    bad.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")  # what else ends a line belongs to the text
    assert load_suite(str(bad), 1, split="test").prompts == [[{"role": "user", "content": "a\u2028b\x85c"}]]
    with pytest.raises(UserError, match=r"suite mt_bench, row 1: wanted the columns turns"):
        load_suite(f"mt_bench:{lines(tmp_path / 'm.jsonl', [{'turns': 'abc', 'category': 'c'}])}", 1, split="test")
    with pytest.raises(UserError, match=r"suite gsm8k, row 1: wanted the columns question, got text"):
        load_suite(f"gsm8k:{lines(tmp_path / 'g.jsonl', [{'text': 'x'}])}", 1, split="test")
    with pytest.raises(UserError, match="which does not exist"):
        load_suite("no_such", 1, split="test")

    def offline(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no network\nat all")

    import datasets

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"cannot load openai/gsm8k \(no network at all\); give a local copy: gsm8k:FILE\.jsonl") as error:
        load_suite("gsm8k", 1, split="test")
    assert "\n" not in str(error.value) and suites.ALL == "all"
