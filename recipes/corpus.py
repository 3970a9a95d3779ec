"""The embedded code corpus: the running Python's own standard library.

It is present on every machine that can run draftsmith, so the quickstart needs no download. Files are assigned to splits by a hash of their
path inside the library, which keeps a file in the same split on every machine and for every Python version.

Left out: tests, and two folders of generated tables (`encodings`, `pydoc_data`), whose text is trivially predictable and would flatter every figure
measured on it. Packages that are installed are a corpus of their own (`installed_files`), many times as large, for targets that outgrow the library.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "dev", "test"]

EXCLUDED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})
DEV_SHARE, TEST_SHARE = 5, 7  # percent of the files
MIN_FILE_CHARS = 1024
MAX_PACKAGE_FILE_CHARS = 2**18  # of an installed package: longer ones are tables that were generated
COPIED_LINES = 0.2  # share of a file's long lines that a held-out file has too, from which on it counts as a copy: packages vendor backports


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One source file: its path inside the library (posix) and its text."""

    name: str
    text: str


def split_of(name: str) -> Split:
    """The split of a file, from a hash of its posix path inside the library."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if bucket < TEST_SHARE:
        return "test"
    return "dev" if bucket < TEST_SHARE + DEV_SHARE else "train"


def source_files(split: Split, root: Path | None = None) -> list[SourceFile]:
    """All source files of a split, in the order of their names.

    Raises FileNotFoundError if the folder holds no usable file (a zipped or stripped standard library).
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = [file for file in _walk(root) if split_of(file.name) == split]
    if not files:
        raise FileNotFoundError(f"no {split} source files below {root}; draftsmith's quickstart needs a Python with its library's .py files")
    return files


def installed_files(mib: float | None = None, root: Path | None = None, held_out: Iterable[SourceFile] | None = None) -> list[SourceFile]:
    """The train split of the installed packages' source files, in the order of their names' hashes, until `mib` MiB of text; None: all.

    Names begin with "site-packages/". Left out: what copies the library's files of the other splits (`held_out`; None: these), which would be trained
    on else, and what looks generated.
    """
    root = Path(sysconfig.get_paths()["purelib"]) if root is None else root
    kept_apart = [*source_files("dev"), *source_files("test")] if held_out is None else held_out
    theirs = {line for file in kept_apart for line in _long_lines(file.text)}
    names = {path: "site-packages/" + path.relative_to(root).as_posix() for path in root.rglob("*.py")}
    found, left = list[SourceFile](), math.inf if mib is None else mib * 2**20
    for path in sorted(names, key=lambda path: hashlib.sha256(names[path].encode()).digest()):
        if left <= 0:
            break
        if split_of(names[path]) != "train" or EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        text = _text_of(path)
        if text is None or not MIN_FILE_CHARS <= len(text) <= MAX_PACKAGE_FILE_CHARS:
            continue
        lines = _long_lines(text)
        if sum(line in theirs for line in lines) <= COPIED_LINES * len(lines):
            found.append(SourceFile(name=names[path], text=text))
            left -= len(text)
    return found


def _long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= 40]


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a handful of files declare another encoding
        return None


def _walk(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts):
            continue
        text = _text_of(path)
        if text is not None and len(text) >= MIN_FILE_CHARS:
            yield SourceFile(name=relative.as_posix(), text=text)


@dataclass(frozen=True, kw_only=True)
class CodeWindow:
    """A stretch of a file, cut at line ends: what the user gives, and what the file goes on with."""

    name: str
    prompt: str
    continuation: str
    ends_file: bool


def windows(file: SourceFile, *, prompt_chars: int, total_chars: int, stride_chars: int) -> Iterator[CodeWindow]:
    """Cut a file into windows of about `total_chars` characters whose first `prompt_chars` or so are the prompt.

    The newlines that end the prompt open the continuation instead, so that neither side ends in white space that a tokenizer would merge.
    """
    lines = file.text.splitlines(keepends=True)
    starts, offset = [], 0
    for line in lines:
        starts.append(offset)
        offset += len(line)
    next_start = 0
    for index, start in enumerate(starts):
        if start < next_start or not lines[index].strip():
            continue
        split, end = index, index
        while split < len(lines) and starts[split] - start < prompt_chars:
            split += 1
        while end < len(lines) and starts[end] - start < total_chars:
            end += 1
        prompt = "".join(lines[index:split]).rstrip("\n")
        continuation = "".join(lines[index:end])[len(prompt) :]
        if len(continuation) < total_chars // 8:
            return
        yield CodeWindow(name=file.name, prompt=prompt, continuation=continuation, ends_file=end == len(lines))
        next_start = start + stride_chars
