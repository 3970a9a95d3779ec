"""Prompt sets. The embedded code suite comes from the held-out files of the running Python's library; others are JSONL files."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

from .. import UserError
from ..recipes.corpus import Split, source_files, windows

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Suite:
    """Named prompts (conversations), and a hash of them for the report."""

    name: str
    prompts: list[Messages]

    @property
    def digest(self) -> str:
        """Short hash of all prompts, in order."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]


def load_suite(source: str, count: int, *, split: Split, prompt_chars: int = 240, seed: int = 0) -> Suite:
    """`count` prompts of "stdlib" (that split's files) or of a .jsonl with {"messages": [..]} or {"prompt": ..} a line, drawn by seed.

    Raises UserError if the source is none of these, or holds too few.
    """
    prompts = _stdlib(split, prompt_chars) if source == "stdlib" else _jsonl(Path(source))
    random.Random(seed).shuffle(prompts)
    if len(prompts) < count:
        raise UserError(f"prompts of {source} ({split}): wanted {count}, got {len(prompts)}; ask for fewer")
    return Suite(f"{source}/{split}" if source == "stdlib" else Path(source).stem, prompts[:count])


def _stdlib(split: Split, prompt_chars: int) -> list[Messages]:
    found = []
    for file in source_files(split):
        for window in windows(file, prompt_chars=prompt_chars, total_chars=6 * prompt_chars, stride_chars=6 * prompt_chars):
            found.append([{"role": "user", "content": window.prompt}])
    return found


def _jsonl(path: Path) -> list[Messages]:
    if not path.is_file():
        raise UserError(f'prompts: wanted "stdlib" or a .jsonl file, got {path}, which does not exist')
    found: list[Messages] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            messages = entry["messages"] if "messages" in entry else [{"role": "user", "content": entry["prompt"]}]
            while messages[-1]["role"] == "assistant":  # the answer is the target's to give
                messages = messages[:-1]
            found.append([{"role": m["role"], "content": m["content"]} for m in messages])
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise UserError(f'{path}:{number}: wanted {{"messages": [..]}} or {{"prompt": ..}}, got {line[:80]!r}') from error
    return found
