"""Datastores made from texts: documents stay apart, and a datastore belongs to its tokenizer; retrieval and hybrids open by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.free.datastore import SEPARATOR, Datastore
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.registry import open_drafter
from draftsmith.recipes.corpus import source_files
from draftsmith.recipes.schema import TargetRef
from draftsmith.train.datastore import make_datastore

TEXTS = ["def first():\n    return 1\n", "import os\n\nprint(os.name)\n"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetRef().location)


def texts(target: Target, store: Datastore) -> list[str]:
    """The documents, decoded."""
    found: list[list[int]] = [[]]
    for token in store.tokens.tolist():
        if token == SEPARATOR:
            found.append([])
        else:
            found[-1].append(token)
    assert target.tokenizer is not None
    return [target.tokenizer.decode(ids) for ids in found[:-1]]


def test_documents_of_every_source_stay_apart(target: Target, tmp_path: Path) -> None:
    lines, folder, calls = tmp_path / "texts.jsonl", tmp_path / "texts", []
    entries: list[dict[str, Any]] = [{"text": TEXTS[0]}, {"text": ""}, {"messages": [{"role": "user", "content": TEXTS[1]}]}]
    lines.write_text("\n\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries), encoding="utf-8")
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "below" / "b.py").write_text(TEXTS[1])
    (folder / "c.png").write_bytes(b"\x89PNG\xff")
    (folder / ".hidden").write_text("hidden")
    store = make_datastore(target, str(lines), tmp_path / "1", progress=lambda *done: calls.append(done))
    assert target.tokenizer is not None
    rendered = target.tokenizer.apply_chat_template(entries[2]["messages"], tokenize=False)  # as the target sees it
    assert texts(target, store) == [TEXTS[0], rendered] and [count for count, _ in calls] == [1, 2]
    assert calls[-1][1] == len(store.tokens) - 2
    assert texts(target, make_datastore(target, str(folder), tmp_path / "2")) == TEXTS
    assert texts(target, make_datastore(target, str(folder / "a.txt"), tmp_path / "3")) == TEXTS[:1]
    assert texts(target, make_datastore(target, str(folder), tmp_path / "4", limit=1)) == TEXTS[:1]


def test_the_corpus_gives_its_training_files_only(target: Target, tmp_path: Path) -> None:
    store = make_datastore(target, "stdlib", tmp_path / "s", limit=2)
    assert texts(target, store) == [file.text for file in source_files("train")[:2]]


def test_bad_sources_are_refused(target: Target, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").mkdir()
    for source, says in (
        ("bad.jsonl", r"bad.jsonl:2: wanted"),
        ("number.jsonl", r"number.jsonl:1: wanted"),
        ("binary.txt", "wanted UTF-8 text"),
        ("empty", "wanted at least one document with text, got none"),
        ("none.jsonl", "which does not exist"),
    ):
        with pytest.raises(UserError, match=says):
            make_datastore(target, str(tmp_path / source), tmp_path / "out")
    for out, limit, says in (
        (tmp_path / "empty", 1, "wanted a new folder"),
        (tmp_path / "out", 0, "limit: wanted at least 1 document, got 0"),
        (tmp_path / "bad.jsonl" / "x", 1, "wanted a folder that can be written"),
    ):
        with pytest.raises(UserError, match=says):
            make_datastore(target, "stdlib", out, limit=limit)
    assert not (tmp_path / "out").exists()


def test_retrieval_and_hybrids_open_by_name(target: Target, tmp_path: Path) -> None:
    """What the target is to generate lies in the datastore, so that it is drafted, and nothing changes."""
    assert target.tokenizer is not None
    prompt, params = target.tokenizer("def main():\n")["input_ids"], SamplingParams()
    plain = Engine(target).generate([prompt], params, 24).tokens
    (tmp_path / "t.txt").write_text(target.tokenizer.decode(prompt + plain[0]))
    make_datastore(target, str(tmp_path / "t.txt"), tmp_path / "store")
    for name, method in (
        (f"retrieval:{tmp_path / 'store'}", "retrieval"),
        (f"hybrid:prompt_lookup+retrieval:{tmp_path / 'store'}", "hybrid:prompt_lookup+retrieval"),
    ):
        drafter, contract = open_drafter(name, target)
        out = Engine(target, drafter.proposer(depth=4)).generate([prompt], params, 24)
        assert out.tokens == plain and drafter.method == method
        assert len(out.rounds[0]) <= 8  # 23 tokens after the first, at most five a round
        assert "datastore" in (contract if method == "retrieval" else contract["second"])


def test_names_and_datastores_of_others_are_refused(target: Target, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXTS[0])
    make_datastore(target, str(tmp_path / "t.txt"), tmp_path / "store")
    other = copy.copy(target)
    other.tokenizer = copy.deepcopy(target.tokenizer)
    assert other.tokenizer is not None
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match="wanted the target's tokenizer"):
        open_drafter(f"retrieval:{tmp_path / 'store'}", other)
    for name, says in (
        ("retrieval", "wanted retrieval:FOLDER"),
        (f"retrieval:{tmp_path}", "got none with datastore.json"),
        ("hybrid:prompt_lookup", "with two drafters"),
        ("hybrid:prompt_lookup+none", "hybrid:A"),
    ):
        with pytest.raises(UserError, match=says):
            open_drafter(name, target)
