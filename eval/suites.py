"""Prompt sets: the embedded code suite, public ones from the hub or from a file of the same form, and the user's own JSONL.

    load_suite("stdlib", 64, split="test")              the held-out files of the running Python's library
    load_suite("gsm8k", 64, split="test")               from the hub, with `datasets`; names: `SOURCES`
    load_suite("gsm8k:questions.jsonl", 64, ...)        the same columns and wording, from a local file
    load_suite("mine.jsonl", 64, ...)                   one conversation a line

A line of a user's JSONL is {"messages": [{"role": .., "content": ..}, ..]}, {"prompt": ".."} or {"turns": ["..", ".."]} (the form of Spec-Bench and
MT-bench: several user turns), each with "category": ".." if there are any. A conversation of several user turns is played turn by turn: each answer
is the target's own, and becomes history. Answers of the assistant that a file holds are left out: they are the target's to give.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import UserError
from ..recipes.corpus import Split, source_files, windows

Messages = list[dict[str, str]]
ALL = "all"  # the category of what has none


@dataclass(frozen=True)
class Conversation:
    """What comes before the target speaks for the first time; the user's later turns; a category."""

    opening: Messages
    later: tuple[str, ...] = ()
    category: str = ALL


@dataclass(frozen=True)
class Suite:
    """Named prompts (conversations), and a hash of them for the report. later[i]: further user turns of prompt i; categories[i]: its category."""

    name: str
    prompts: list[Messages]
    later: list[tuple[str, ...]] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Short hash of all prompts, in order."""
        whole: Any = self.prompts if not any(self.later) else [self.prompts, self.later]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]

    @property
    def conversations(self) -> list[Conversation]:
        """The prompts with their later turns and categories."""
        later = self.later or [()] * len(self.prompts)
        return [Conversation(*parts) for parts in zip(self.prompts, later, self.categories or [ALL] * len(self.prompts), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public prompt set: where it is, and how one of its rows becomes user turns. category: a column, or nothing."""

    path: str
    turns: Callable[[Mapping[str, Any]], Iterable[str]]
    about: str
    subset: str | None = None
    split: str = "test"
    category: str | None = None
    columns: tuple[str, ...] = ()


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]


def _turns(row: Mapping[str, Any]) -> list[str]:
    turns = row["turns"] if "turns" in row else row["prompt"]  # FastChat's own file, or its copy on the hub
    if isinstance(turns, str):
        raise TypeError("turns are a list of texts")
    return list(turns)


SOURCES: dict[str, Source] = {
    "mt_bench": Source(
        path="HuggingFaceH4/mt_bench_prompts", split="train", turns=_turns, category="category", columns=("turns",),
        about="80 questions of two turns, eight categories",
    ),
    "humaneval": Source(
        path="openai/openai_humaneval", turns=lambda row: [f"Complete the following Python function.\n\n{row['prompt']}"], columns=("prompt",),
        about="164 Python functions to complete",
    ),
    "gsm8k": Source(
        path="openai/gsm8k", subset="main", turns=lambda row: [row["question"]], columns=("question",), about="1,319 problems of school arithmetic",
    ),
    "alpaca": Source(path="tatsu-lab/alpaca", split="train", turns=_alpaca, columns=("instruction", "input"), about="52,002 instructions"),
    "cnn_dm": Source(
        path="abisee/cnn_dailymail", subset="3.0.0", turns=lambda row: [f"Summarize the following article.\n\n{row['article']}"],
        columns=("article",), about="11,490 news articles to summarise",
    ),
    "spec_bench": Source(
        path="hemingkx/Spec-Bench", turns=_turns, category="category", columns=("turns", "category"),
        about="480 questions of six tasks (its question.jsonl, if the hub has no copy: spec_bench:question.jsonl)",
    ),
    "speed_bench": Source(
        path="nvidia/SPEED-Bench", subset="qualitative", turns=_turns, category="category", columns=("turns", "category"),
        about="880 prompts of eleven domains, some of several turns",
    ),
}  # fmt: skip


def load_suite(source: str, count: int, *, split: Split, prompt_chars: int = 240, seed: int = 0) -> Suite:
    """`count` conversations of a source (see the module's docstring), drawn by seed.

    split: the embedded code suite's files are split by hash. Other sources are shuffled, and "dev" takes from the end what others take from the
    start: apart, unless both together are more than there is.
    Raises UserError if the source is none of these, or holds too few.
    """
    if source == "stdlib":
        found, name = _stdlib(split, prompt_chars), f"{source}/{split}"
    elif source in SOURCES:
        found, name = _public(source, _hub(source)), source
    elif source.partition(":")[0] in SOURCES:
        kind, _, file = source.partition(":")
        found, name = _public(kind, (row for _, row in _rows(Path(file)))), kind
    else:
        path = Path(source)
        found, name = [_conversation(row, f"{path}:{number}") for number, row in _rows(path)], path.stem
    random.Random(seed).shuffle(found)
    if len(found) < count:
        raise UserError(f"prompts of {source} ({split}): wanted {count}, got {len(found)}; ask for fewer")
    kept = found[::-1][:count] if split == "dev" and source != "stdlib" else found[:count]
    later = [c.later for c in kept] if any(c.later for c in kept) else []
    categories = [c.category for c in kept] if any(c.category != ALL for c in kept) else []
    return Suite(name, [c.opening for c in kept], later, categories)


def _stdlib(split: Split, prompt_chars: int) -> list[Conversation]:
    found = []
    for file in source_files(split):
        for window in windows(file, prompt_chars=prompt_chars, total_chars=6 * prompt_chars, stride_chars=6 * prompt_chars):
            found.append(Conversation([{"role": "user", "content": window.prompt}]))
    return found


def _hub(name: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a public set."""
    source = SOURCES[name]
    try:
        from datasets import load_dataset

        return load_dataset(source.path, source.subset, split=source.split)  # type: ignore[no-any-return]
    except ImportError as error:
        raise UserError(f"suite {name}: wanted the library datasets, which is not installed; install it, or give {name}:FILE.jsonl") from error
    except Exception as error:  # whatever the hub, the network or the cache may raise
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"suite {name}: cannot load {source.path} ({reason}); give a local copy: {name}:FILE.jsonl") from error


def _public(name: str, rows: Iterable[Mapping[str, Any]]) -> list[Conversation]:
    source = SOURCES[name]
    found = []
    for number, row in enumerate(rows, 1):
        try:
            opening, *later = source.turns(row)
            category = str(row[source.category]) if source.category else ALL
        except (KeyError, TypeError, ValueError) as error:
            wanted = ", ".join(source.columns)
            raise UserError(f"suite {name}, row {number}: wanted the columns {wanted}, got {', '.join(map(str, row))[:80]}") from error
        found.append(Conversation([{"role": "user", "content": opening}], tuple(later), category))
    return found


def _rows(path: Path) -> Iterable[tuple[int, Any]]:
    """(number, value) of each line of a JSONL that is not empty."""
    if not path.is_file():
        wanted = f'"stdlib", a .jsonl file, or one of {", ".join(SOURCES)} (also NAME:FILE.jsonl)'
        raise UserError(f"prompts: wanted {wanted}, got {path}, which does not exist")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: wanted a text file in UTF-8, got byte {error.start} that is not; save it as UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):  # a text within may hold what else ends a line, such as U+2028
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: wanted one JSON object a line, got {line[:80]!r}") from error


def _conversation(row: Any, where: str) -> Conversation:
    """A line of a user's own file."""
    try:
        category = str(row.get("category") or ALL)
        if "turns" in row:
            opening, *later = _texts(row["turns"])
            return Conversation([{"role": "user", "content": opening}], tuple(later), category)
        if "messages" not in row:
            (prompt,) = _texts([row["prompt"]])
            return Conversation([{"role": "user", "content": prompt}], (), category)
        contents = _texts([m["content"] for m in row["messages"]])
        messages = [{"role": str(m["role"]), "content": content} for m, content in zip(row["messages"], contents, strict=True)]
        spoken = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        if not messages[:spoken]:
            raise ValueError("nothing before the assistant")
        return Conversation(messages[:spoken], tuple(m["content"] for m in messages[spoken:] if m["role"] == "user"), category)
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        wanted = '{"messages": [..]}, {"prompt": ..} or {"turns": [..]}'
        raise UserError(f"{where}: wanted {wanted}, got {json.dumps(row)[:80]}") from error


def _texts(values: Any) -> list[str]:
    """Raises TypeError for what is no list of texts: a text alone would be taken for its letters."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a list of texts")
    return values
