"""Documents for a retrieval datastore: the embedded code corpus, a JSONL, or plain text, in the target's tokens.

Documents are never joined: what the end of one is followed by says nothing about the text that is being written.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .. import UserError
from ..decode.free.datastore import Datastore, build_datastore
from ..decode.target import Target
from ..recipes.corpus import SourceFile, source_files


def make_datastore(
    target: Target, source: str, folder: str | Path, *, limit: int | None = None, progress: Callable[[int, int], None] = lambda *_: None
) -> Datastore:
    """Build the datastore of `source` with the target's tokenizer as the new folder `folder` (REST, 2311.08252), and load it.

    source: "stdlib" (the embedded code corpus, training files only, so that held-out prompts stay held out); a .jsonl with {"text": ..} or
    {"messages": [..]} a line; a text file; or a folder of text files. limit: only the first so many documents. progress(documents, tokens).
    Raises UserError if the source is none of these or holds no text, if the folder exists or cannot be made, or without a tokenizer.
    """
    out, tokenizer = Path(folder), target.tokenizer
    if tokenizer is None:
        raise UserError(f"target {target.name}: wanted one with a tokenizer, got none; save it beside the model")
    if limit is not None and limit < 1:
        raise UserError(f"limit: wanted at least 1 document, got {limit}")
    if out.exists():  # found out now, and not after all texts have been read
        raise UserError(f"datastore {out}: wanted a new folder, got one that exists; remove it or choose another name")
    sequences, tokens = [], 0
    for ids in itertools.islice(_sequences(tokenizer, source), limit):
        sequences.append(ids)
        tokens += len(ids)
        progress(len(sequences), tokens)
    if not tokens:
        raise UserError(f"source {source}: wanted at least one document with text, got none")
    try:
        return build_datastore(sequences, out, target.fingerprint()["tokenizer"])
    except OSError as error:
        raise UserError(f"datastore {out}: wanted a folder that can be written, got {error.strerror or error}; choose another") from error


def _sequences(tokenizer: PreTrainedTokenizerBase, source: str) -> Iterator[list[int]]:
    """Token ids, document by document; those without a token are left out."""
    path = Path(source)
    if source == "stdlib":
        texts: Iterator[str] = (file.text for file in _corpus())
    elif path.is_dir():
        texts = _folder(path)
    elif not path.is_file():
        raise UserError(f'source: wanted "stdlib", a .jsonl, a text file or a folder of text files, got {source}, which does not exist')
    elif path.suffix == ".jsonl":
        texts = _jsonl(tokenizer, path)
    else:
        texts = iter([_read(path)])
    for text in texts:
        # No special tokens: the template has written those of a conversation, and elsewhere they would stand where no generation has them.
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids:
            yield ids


def _corpus() -> Iterator[SourceFile]:
    try:
        yield from source_files("train")
    except FileNotFoundError as error:
        raise UserError(f"source stdlib: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"source {path}: wanted UTF-8 text, got a file that cannot be read as such ({error})") from error


def _folder(folder: Path) -> Iterator[str]:
    """All text files below, by name; hidden ones and those that are not UTF-8 text, such as images, are passed over."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            data = path.read_bytes()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                yield text


def _jsonl(tokenizer: PreTrainedTokenizerBase, path: Path) -> Iterator[str]:
    for number, line in enumerate(_read(path).split("\n"), 1):  # not splitlines: JSON strings may hold other line separators
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            texts = [entry["text"]] if "text" in entry else _conversation(tokenizer, entry["messages"])
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("text is no string")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, TemplateError) as error:  # chat templates refuse in many ways
            wanted = '{"text": ..} or {"messages": [..]} that the chat template takes'
            raise UserError(f"{path}:{number}: wanted {wanted}, got {line[:80]!r} ({type(error).__name__}: {error})") from error
        yield from texts


def _conversation(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[str]:
    """As the target sees it; without a chat template every turn is a document of its own."""
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    if tokenizer.chat_template is None:
        return [turn["content"] for turn in turns]
    return [str(tokenizer.apply_chat_template(turns, tokenize=False))]
