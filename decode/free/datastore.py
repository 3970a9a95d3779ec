"""A datastore of token sequences with a suffix array: every occurrence of a short context by binary search, from files that are memory-mapped.

A folder: `tokens.npy` (int32; documents end with a separator), `suffixes.npy` (sorted start positions), `datastore.json` (format, fingerprint,
checksums). The separator is in no context, so that no match and no continuation crosses from one document into the next.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import UserError

SEPARATOR = -1
_FORMAT, _VERSION = "draftsmith-datastore", 1
_INT32_LIMIT = 2**31
_CHUNK = 2**24  # bytes checked at a time


@dataclass(frozen=True, eq=False)
class Datastore:
    """tokens: all documents, each followed by SEPARATOR. suffixes: start positions, sorted by the `context` tokens that begin there.

    fingerprint: of the tokenizer that made the tokens. Contexts of up to `context` tokens can be looked up.
    """

    tokens: NDArray[np.int32]
    suffixes: NDArray[Any]
    fingerprint: str
    context: int
    documents: int

    def occurrences(self, pattern: Sequence[int]) -> range:
        """The stretch of `suffixes` that begin with this pattern of 1 .. `context` tokens."""
        wanted = list(pattern)

        def head(start: int) -> list[int]:
            found: list[int] = self.tokens[start : start + len(wanted)].tolist()
            return found

        first = bisect_left(self.suffixes, wanted, key=head)
        return range(first, bisect_right(self.suffixes, wanted, lo=first, key=head))

    def longest_suffix(self, text: Sequence[int], least: int, most: int) -> tuple[int, range]:
        """(n, occurrences) of the longest suffix of the text, least <= n <= most, that is in the datastore; (0, nothing) if none is.

        Whatever contains a suffix contains its shorter ones, so the length is found by bisection too.
        """
        best: tuple[int, range] = (0, range(0))
        low, high = least, min(most, self.context, len(text))
        while low <= high:
            size = (low + high + 1) // 2 if best[0] else low  # the shortest first: most contexts that fail, fail there
            found = self.occurrences(text[len(text) - size :])
            if found:
                best, low = (size, found), size + 1
            else:
                high = size - 1
        return best

    def continuations(self, found: range, size: int, length: int, limit: int) -> list[list[int]]:
        """What follows `limit` of these occurrences of a context of `size` tokens: up to `length` tokens, cut at the end of the document.

        Occurrences are sorted by what follows; evenly spaced ones keep the proportions.
        """
        spaced = found if len(found) <= limit else [found[index * len(found) // limit] for index in range(limit)]
        out = []
        for index in spaced:
            start = int(self.suffixes[index]) + size
            tokens: list[int] = self.tokens[start : start + length].tolist()
            out.append(tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens)
        return out


def sort_suffixes(tokens: NDArray[np.int32], context: int) -> NDArray[Any]:
    """Start positions sorted by (at least) the `context` tokens that begin there, equal ones by position: prefix doubling, O(n log n log context).

    Further tokens would only matter to longer lookups, and their sorting is what makes texts with long repeats slow.
    """
    count = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1  # 0 is past the end
    length = 1
    while length < context:
        later = np.zeros_like(rank)
        later[: max(0, count - length)] = rank[length:]
        key = rank * (int(rank.max()) + 1) + later
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        length *= 2
    return np.argsort(rank, kind="stable")


def build_datastore(sequences: Iterable[Sequence[int]], path: str | Path, fingerprint: str, *, context: int = 16) -> Datastore:
    """Write the datastore of these documents (token ids) as the new folder `path`, and load it. Empty documents are left out.

    fingerprint: the tokenizer's, as `Target.fingerprint()["tokenizer"]`. Memory: about 40 bytes a token while sorting.
    Raises UserError if there is no token, an id is out of range, or the folder exists. Nothing is left behind on failure.
    """
    folder = Path(path)
    if folder.exists():
        raise UserError(f"datastore {folder}: wanted a new folder, got one that exists; remove it or choose another name")
    if not 1 <= context <= 1024:
        raise UserError(f"datastore.context: wanted 1 .. 1024 tokens, got {context}")
    documents = [np.asarray(sequence, dtype=np.int64) for sequence in sequences if len(sequence)]
    if not documents:
        raise UserError(f"datastore {folder}: wanted at least one token, got none; give token sequences")
    low, high = min(int(d.min()) for d in documents), max(int(d.max()) for d in documents)
    if low < 0 or high >= _INT32_LIMIT:
        raise UserError(f"datastore {folder}: wanted token ids in 0 .. {_INT32_LIMIT - 1}, got {low if low < 0 else high}")
    separator = np.array([SEPARATOR])
    tokens = np.concatenate(list(chain.from_iterable((d, separator) for d in documents))).astype(np.int32)
    suffixes = sort_suffixes(tokens, context)
    suffixes = suffixes[tokens[suffixes] != SEPARATOR].astype(np.int32 if len(tokens) < _INT32_LIMIT else np.int64)
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": fingerprint,
        "context": context,
        "documents": len(documents),
        "crc32": {"tokens": _checksum(tokens), "suffixes": _checksum(suffixes)},
    }
    _write(folder, about, {"tokens": tokens, "suffixes": suffixes})
    return load_datastore(folder, fingerprint)


def _write(folder: Path, about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    """Under a temporary name first: a folder of the final name is complete."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        for name, array in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        with open(temporary / "datastore.json", "w", encoding="utf-8") as text:
            json.dump(about, text, indent=2)
            text.flush()
            os.fsync(text.fileno())
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def load_datastore(path: str | Path, fingerprint: str | None = None, *, check: bool = True) -> Datastore:
    """Map a datastore into memory. check: read it once and compare checksums (a damaged one could point anywhere).

    Raises UserError if it is damaged, or, with a fingerprint given, if it was made with another tokenizer.
    """
    folder = Path(path)
    if not (folder / "datastore.json").is_file():
        raise UserError(f"datastore {folder}: wanted a folder written by build_datastore, got none with datastore.json; build it first")
    try:
        about = json.loads((folder / "datastore.json").read_text(encoding="utf-8"))
        if (about["format"], about["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {about['format']} {about['version']}, not {_FORMAT} {_VERSION}")
        # asarray: the same pages as a plain array, whose slices are cheaper than a memmap's.
        tokens, suffixes = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)) for name in ("tokens", "suffixes"))
        if tokens.dtype != np.int32 or suffixes.dtype not in (np.int32, np.int64) or tokens.ndim != 1 or suffixes.ndim != 1:
            raise ValueError(f"tokens of {tokens.dtype} and suffixes of {suffixes.dtype}, not one-dimensional integers")
        sums = {"tokens": _checksum(tokens), "suffixes": _checksum(suffixes)} if check else about["crc32"]
        if sums != about["crc32"]:
            raise ValueError(f"checksums {sums}, not {about['crc32']}")
        store = Datastore(tokens, suffixes, str(about["fingerprint"]), int(about["context"]), int(about["documents"]))
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:  # missing or cut files, wrong header, wrong content
        raise UserError(f"datastore {folder}: wanted an intact one, got {' '.join(str(error).split())[:300]}; build it again") from error
    if fingerprint is not None and fingerprint != store.fingerprint:
        raise UserError(
            f"datastore {folder}: wanted the target's tokenizer {fingerprint}, got {store.fingerprint}; build it again with this tokenizer"
        )
    return store


def _checksum(array: NDArray[Any]) -> int:
    data = array.data.cast("B")
    total = 0
    for start in range(0, len(data), _CHUNK):
        total = zlib.crc32(data[start : start + _CHUNK], total)
    return total
