"""What drafters learn from, read from wherever it lies: conversations and plain texts, one after the other.

    documents(Source(path="chats.jsonl"))           {"messages": [..]}, {"conversations": [..]}, {"prompt": .., "response": ..} or {"text": ..} a line
    documents(Source(path="chats.parquet"))         the same, a row
    documents(Source(path="src/"))                  text and code files, each a document
    documents(Source(path="org/name", split="train", streaming=True))       a data set of the Hugging Face hub
    documents(Source(path="stdlib"))                the running Python's own source files, as conversations: a start, and how the file goes on

Every document knows where it comes from, and so does every error: one line with file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import UserError
from ..recipes.corpus import SourceFile, source_files, windows
from ..recipes.schema import Source

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's names of them
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")  # keys of a message that templates read
_WANTED = '{"messages": [..]}, {"conversations": [..]}, {"prompt": ..} or {"text": ..}'


@dataclass(frozen=True, kw_only=True)
class Document:
    """A conversation, or a plain text. where: its file and line. cut: the last message breaks off, so that no end of turn follows it."""

    where: str
    messages: Messages
    text: str = ""
    tools: list[dict[str, Any]] | None = None
    cut: bool = False

    @property
    def prompt(self) -> str:
        """What the user gives first: by this, documents are held out, so that one question is never on both sides."""
        return next((str(m["content"]) for m in self.messages if m["role"] == "user"), self.text)

    @property
    def digest(self) -> str:
        """A hash of its content."""
        return hashlib.sha256(json.dumps([self.messages, self.text, self.tools, self.cut]).encode()).hexdigest()

    def asked(self) -> Document:
        """Without the answer that it ends with."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return Document(where=self.where, messages=messages, tools=self.tools)


def documents(source: Source, *, prompt_chars: int = 240, prompts: bool = False, seed: int = 0) -> Iterator[Document]:
    """All documents of a source, in its order. Raises UserError if there is no such source, or for the first damaged entry, by file and line.

    prompts: cut plain texts into starts of about `prompt_chars` characters, as a user's turn, and how the text goes on, as the assistant's.
    seed: of the order in which a stream of the hub is read.
    """
    for document in _read(source, prompt_chars, seed):
        if prompts and document.text:
            yield from _windows(SourceFile(name=document.where, text=document.text), prompt_chars)
        else:
            yield document


def _read(source: Source, prompt_chars: int, seed: int) -> Iterator[Document]:
    path = Path(source.path)
    if source.path == "stdlib":
        try:
            files = source_files("train")
        except FileNotFoundError as error:
            raise UserError(f"data.source stdlib: {error}") from error
        for file in files:
            yield from _windows(file, prompt_chars)
    elif path.is_dir():
        yield from _folder(path)
    elif path.is_file():
        if path.suffix == ".jsonl":
            yield from _jsonl(path)
        elif path.suffix == ".parquet":
            yield from _rows(_datasets().load_dataset("parquet", data_files=str(path), split="train", streaming=True), str(path))
        else:
            yield _text(path)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source.path):
        yield from _rows(_hub(source, seed), source.path)
    else:
        raise UserError(
            'data.source: wanted "stdlib", a .jsonl, .parquet or text file, a folder of text or code, or a hub name such as org/name, '
            f"got {source.path}, which does not exist"
        )


def _windows(file: SourceFile, prompt_chars: int) -> Iterator[Document]:
    for window in windows(file, prompt_chars=prompt_chars, total_chars=6 * prompt_chars, stride_chars=6 * prompt_chars):
        messages = [{"role": "user", "content": window.prompt}, {"role": "assistant", "content": window.continuation}]
        yield Document(where=window.name, messages=messages, cut=not window.ends_file)


def _text(path: Path) -> Document:
    try:
        return Document(where=str(path), messages=[], text=path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.source {path}: wanted UTF-8 text, got a file that cannot be read as such ({error})") from error


def _folder(folder: Path) -> Iterator[Document]:
    """All text files below, by name; hidden ones and those that are not UTF-8 text, such as images, are passed over."""
    found = False
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip() and "\0" not in text:
                found = True
                yield Document(where=str(path), messages=[], text=text)
    if not found:
        raise UserError(f"data.source {folder}: wanted a folder with text files, got one without any")


def _jsonl(path: Path) -> Iterator[Document]:
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8")
                if not line.strip():
                    continue
                entry = json.loads(line)
            except ValueError as error:  # not UTF-8, or not JSON: a line that was torn, say
                raise UserError(f"{where}: wanted one JSON object a line, got {raw[:60]!r} ({error}); mend or delete that line") from error
            yield document_of(entry, where)


def _rows(rows: Any, name: str) -> Iterator[Document]:
    for number, entry in enumerate(rows, 1):
        yield document_of({key: value for key, value in entry.items() if value is not None}, f"{name}:{number}")


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.source: wanted the library datasets for Parquet and the hub, got none installed; pip install datasets") from error
    return datasets


def _hub(source: Source, seed: int) -> Any:
    library = _datasets()
    try:
        rows = library.load_dataset(source.path, source.config, split=source.split, streaming=source.streaming)
    except Exception as error:  # the hub's, the network's and the file formats' own, none of which has a common class
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"data.source {source.path}: wanted a file, a folder, or a data set of the hub that can be loaded (split {source.split}), got {said}"
        ) from error
    return rows.shuffle(seed=seed, buffer_size=10_000) if source.streaming else rows


# One entry


def document_of(entry: Any, where: str) -> Document:
    """The document that a line or a row holds. Raises UserError, naming `where`, if it is none."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: wanted {_WANTED}, got {str(entry)[:60]!r}")
    tools = entry.get("tools")
    if isinstance(tools, str):  # columns of Parquet files have one type, so that tools are often stored as JSON
        tools = _json(tools, f"{where}: tools")
    messages: Messages
    for key in ("messages", "conversations", "conversation"):
        if key in entry:
            messages = _conversation(entry[key], where, key)
            if isinstance(entry.get("system"), str) and entry["system"] and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": entry["system"]})
            return Document(where=where, messages=messages, tools=list(tools) if tools else None)
    if "prompt" in entry:
        answer = next((entry[key] for key in ("response", "completion", "answer") if key in entry), None)
        messages = [{"role": "user", "content": _string(entry["prompt"], where, "prompt")}]
        if answer is not None:
            messages.append({"role": "assistant", "content": _string(answer, where, "response")})
        return Document(where=where, messages=messages)
    for key in ("text", "content"):
        if key in entry:
            return Document(where=where, messages=[], text=_string(entry[key], where, key))
    raise UserError(f"{where}: wanted {_WANTED}, got the keys {', '.join(map(str, entry))[:80]}")


def _conversation(turns: Any, where: str, key: str) -> Messages:
    if isinstance(turns, str):
        turns = _json(turns, f"{where}: {key}")
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: wanted a conversation of one message or more, got {str(turns)[:60] if turns else 'an empty one'}")
    return [_message(turn, f"{where}: message {number}") for number, turn in enumerate(turns, 1)]


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise UserError(f"{where}: wanted a role and content, got {str(turn)[:60]!r}")
    role = turn.get("role", turn.get("from"))
    known = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if known not in ROLES:
        raise UserError(f"{where}: wanted a role among {', '.join((*ROLES, *_SHAREGPT))}, got {role!r}; correct it, or leave that conversation out")
    message = {name: turn[name] for name in _KEPT if turn.get(name) is not None} | {"role": known}
    content = turn.get("content", turn.get("value"))
    if content is None and message.get("tool_calls"):
        content = ""
    message["content"] = _string(content, where, "content")
    if "tool_calls" in message:
        message["tool_calls"] = [tool_call(call, where) for call in message["tool_calls"]]
    return message


def tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as templates expect it: OpenAI's arguments are a JSON string, those of templates a mapping."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping) or "name" not in call["function"]:
        raise UserError(f'{where}: wanted tool_calls of {{"function": {{"name": .., "arguments": ..}}}}, got {str(call)[:60]!r}')
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _json(function["arguments"], f"{where}: arguments of {function['name']}")
    return {**call, "function": function}


def _string(content: Any, where: str, key: str) -> str:
    """The text of a message; OpenAI's lists of text parts are joined."""
    if isinstance(content, list) and content and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UserError(f"{where}: wanted text as its {key}, got {str(content)[:60]!r}")
    return content


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: wanted JSON, got {text[:60]!r}") from error
