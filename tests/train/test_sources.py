"""Sources: every format reads to the same documents, and whatever is wrong is one line with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.recipes.schema import Data, Source
from draftsmith.train.selection import select
from draftsmith.train.sources import Document, document_of, documents

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def read(path: Path | str, **settings: Any) -> list[Document]:
    return list(documents(Source(path=str(path), **settings)))


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.mark.parametrize(
    ("entry", "messages"),
    [
        ({"messages": CHAT}, CHAT),
        ({"messages": json.dumps(CHAT)}, CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, CHAT[1]]}, CHAT),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, CHAT),
        ({"conversations": CHAT, "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *CHAT]),
        ({"prompt": "Hi", "response": "Hello"}, CHAT),
        ({"prompt": "Hi"}, CHAT[:1]),
    ],
)
def test_conversations_of_every_form(entry: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert document_of(entry, "f:1").messages == messages


def test_tools_and_calls_are_kept_as_templates_want_them() -> None:
    talk = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "4", "tool_call_id": "1"}]
    document = document_of({"messages": talk, "tools": '[{"type": "function"}]'}, "f:1")
    assert document.tools == [{"type": "function"}] and document.messages[1]["content"] == ""
    assert document.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [', "wanted one JSON object a line"),
        ("[1, 2]", 'wanted {"messages": [..]}'),
        ('{"other": 1}', "got the keys other"),
        ('{"messages": []}', "wanted a conversation of one message or more, got an empty one"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "message 1: wanted a role among system, developer, user, assistant, tool"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1: wanted text as its content, got '3'"),
        ('{"messages": ["x"]}', "message 1: wanted a role and content"),
        ('{"prompt": null}', "wanted text as its prompt"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"name": "x"}]}]}', "wanted tool_calls of"),
    ],
)
def test_damage_is_one_line_with_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n\n" + line + "\n")
    with pytest.raises(UserError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ") and says in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_refused_and_unusual_line_ends_are_text(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False).encode() + b"\r\n\xff\n")
    with pytest.raises(UserError, match=r"chats\.jsonl:2: "):
        read(path)
    path.write_bytes(path.read_bytes().split(b"\n")[0])
    assert [document.text for document in read(path)] == ["a\u2028b\x85c"]


def test_files_and_folders_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b.py").write_text("b = 2\n")
    (folder / "a.md").write_text("# A\n")
    (folder / "image.png").write_bytes(b"\x89PNG\xff\0")
    (folder / ".hidden").write_text("no")
    assert [document.text for document in read(folder)] == ["# A\n", "b = 2\n"]
    assert [document.text for document in read(folder / "a.md")] == ["# A\n"]
    text = "".join(f"line {i} = {i}\n" for i in range(300))
    (folder / "a.md").write_text(text)
    windows = [d for d in documents(Source(path=str(folder / "a.md")), prompt_chars=60, prompts=True)]
    assert len(windows) > 5 and all([m["role"] for m in d.messages] == ["user", "assistant"] for d in windows)
    assert all(d.messages[0]["content"] + d.messages[1]["content"] in text for d in windows) and [d.cut for d in windows][-1] is False
    for wrong, says in ((tmp_path / "none", "which does not exist"), (tmp_path / "src" / "image.png", "wanted UTF-8 text")):
        with pytest.raises(UserError, match=says):
            read(wrong)


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_and_data_sets_of_the_library(tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of the hub is a folder of such files there; the library takes a local one by the same call."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "repository"
    repository.mkdir()
    rows = datasets.Dataset.from_list([{"messages": [{**m, "content": f"{m['content']} {i}"} for m in CHAT], "empty": None} for i in range(5)])
    rows.to_parquet(repository / "train.parquet")
    assert [d.messages[0]["content"] for d in read(repository / "train.parquet")] == [f"Hi {i}" for i in range(5)]
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *rest, **more: load(str(repository) if name == "org/name" else name, *rest, **more))
    found = read("org/name", streaming=streaming)
    assert sorted(d.messages[0]["content"] for d in found) == [f"Hi {i}" for i in range(5)] and all(d.where.startswith("org/name:") for d in found)
    with pytest.raises(UserError, match=r"^data\.source org/none: wanted a file, a folder, or a data set of the hub that can be loaded"):
        read("org/none")


# Selection


def chats(path: Path, prompts: list[str], answers: list[str] | None = None) -> Path:
    return write(path, [{"prompt": p, "response": a} for p, a in zip(prompts, answers or [f"answer {i}" for i in range(len(prompts))], strict=True)])


def prompts_of(data: Data, exclude: list[str] | None = None) -> list[str]:
    return [document.prompt for document in select(data, exclude or []).documents]


def test_sources_are_mixed_by_weight_in_an_order_of_the_seed(tmp_path: Path) -> None:
    a, b = (chats(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(40)]) for name in "ab")
    mixed = [Source(path=str(a), weight=3), Source(path=str(b))]
    found = prompts_of(Data(sources=mixed, num_prompts=21))
    assert [sum(p.startswith(name) for p in found) for name in "ab"] == [16, 5] and len(set(found)) == 21
    assert prompts_of(Data(sources=mixed, num_prompts=21)) == found != prompts_of(Data(sources=mixed, num_prompts=21, seed=1))
    assert len(prompts_of(Data(sources=[mixed[0], Source(path=str(b), weight=0.01)], num_prompts=21))) == 21  # a share that rounds to none
    everything = prompts_of(Data(sources=mixed, num_prompts=None))
    assert [sum(p.startswith(name) for p in everything) for name in "ab"] == [40, 13]  # as many as the weights allow
    with pytest.raises(UserError, match=r"^data\.num_prompts: wanted 75 of .*a\.jsonl, got 40; ask for fewer"):
        select(Data(sources=mixed, num_prompts=100))


def test_duplicates_are_left_out(tmp_path: Path) -> None:
    long = " ".join(f"word{i}" for i in range(60))
    near = long.replace("word30 ", "other ")
    path = chats(tmp_path / "c.jsonl", ["one", " one\n", long, near, "three"])
    for how, count in (("none", 5), ("exact", 4), ("near", 3)):
        selection = select(Data(source=str(path), num_prompts=None, deduplicate=how))  # type: ignore[arg-type]
        assert len(selection.documents) == count and sum(selection.left_out.values()) == 5 - count
    other = " ".join(f"word{i}" for i in [*range(20), *range(100, 140)])  # a third in common: not near
    path = chats(tmp_path / "d.jsonl", [long, other])
    assert len(prompts_of(Data(source=str(path), num_prompts=None, deduplicate="near"))) == 2


def test_answers_count_where_they_are_given(tmp_path: Path) -> None:
    path = chats(tmp_path / "c.jsonl", ["one", "one"], ["x", "y"])
    assert len(prompts_of(Data(source=str(path), num_prompts=None))) == 1
    assert len(prompts_of(Data(source=str(path), num_prompts=None, responses="given"))) == 2


def test_what_is_measured_with_is_not_trained_on(tmp_path: Path) -> None:
    benchmark = " ".join(f"w{i}" for i in range(20))
    inside = "Please solve: " + benchmark.upper().replace(" ", ", ")[:60] + "!"  # 13 words and more in common, written otherwise
    path = chats(tmp_path / "c.jsonl", ["Short question?", "a short question, but another", inside, " ".join(benchmark.split()[:12])])
    selection = select(Data(source=str(path), num_prompts=None), [benchmark, "short QUESTION"])
    assert sorted(d.prompt for d in selection.documents) == sorted(["a short question, but another", " ".join(benchmark.split()[:12])])
    assert selection.left_out == {"in common with prompts that are measured with": 2}
    assert len(prompts_of(Data(source=str(path), num_prompts=None, exclude_words=12), [benchmark])) == 2


def test_a_share_is_held_out_by_hash_whatever_the_seed(tmp_path: Path) -> None:
    path = chats(tmp_path / "c.jsonl", [f"prompt {i}" for i in range(400)])
    one, other = (select(Data(source=str(path), num_prompts=None, held_out=0.1, seed=seed)) for seed in (0, 1))
    held = {d.prompt for d in one.held_out}
    assert held == {d.prompt for d in other.held_out} and 20 < len(held) < 60 and not held & {d.prompt for d in one.documents}
