"""Which documents of the sources are trained on: mixed by weight, without duplicates, without what is held out or measured with.

    selection = select(data, exclude=benchmark_prompts)         # data: the recipe's section
    selection.documents; selection.left_out                     # {"duplicates": 3, "near duplicates": 40, "in common with prompts that ...": 2}

The order is that of the seed alone. Filters look at one document after the other until there are enough.

Near duplicates are found by MinHash (Broder 1997): 128 permutations of the hashed runs of five words, in 32 bands of 4; documents that agree in a
band are compared by the share of permutations that agree, which estimates the Jaccard similarity of their runs to about 0.035.
Documents that have `exclude_words` words in a row in common with a prompt to be measured with are left out, and so are those of which a user's turn
is such a prompt (shorter ones have no run of so many words).
"""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import UserError
from ..recipes.schema import Data, Source
from .sources import Document, documents

_PERMUTATIONS, _BANDS, _RUN = 128, 32, 5


@dataclass
class Selection:
    """documents: those to train on. held_out: those kept apart. left_out: how many of the others were not taken, and why."""

    documents: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def select(data: Data, exclude: Sequence[str] = ()) -> Selection:
    """The documents of the recipe. exclude: prompts that must not be trained on.

    Raises UserError as `documents` does, and if the sources hold fewer documents than asked for.
    """
    sources, selection = data.parts, Selection()
    filters = _Filters(data, exclude)
    kept: list[list[Document]] = []
    for source, wanted in zip(sources, _shares(data.num_prompts, sources), strict=True):
        found: list[Document] = []
        for document in _shuffled(source, data):
            if wanted is not None and len(found) == wanted:
                break
            if data.held_out and _share_of(document.prompt) < data.held_out:
                selection.held_out.append(document)
            elif reason := filters.against(document):
                selection.left_out[reason] += 1
            else:
                found.append(document)
        if len(found) < (1 if wanted is None else wanted):
            reasons = ", ".join(f"{count} {reason}" for reason, count in selection.left_out.items())
            aside = f" after leaving out {reasons}" if reasons else ""
            raise UserError(f"data.num_prompts: wanted {wanted or 'one or more'} of {source.path}, got {len(found)}{aside}; ask for fewer")
        kept.append(found)
    if data.num_prompts is None and len(sources) > 1:  # as many as the weights allow
        unit = min(len(found) / source.weight for found, source in zip(kept, sources, strict=True))
        kept = [found[: max(1, round(unit * source.weight))] for found, source in zip(kept, sources, strict=True)]
    selection.documents = [document for found in kept for document in found]
    if len(sources) > 1:
        random.Random(data.seed).shuffle(selection.documents)
    return selection


def _shares(total: int | None, sources: Sequence[Source]) -> list[int | None]:
    """How many documents of each source: in proportion to the weights, by the largest remainders."""
    if total is None:
        return [None] * len(sources)
    weight = sum(source.weight for source in sources)
    exact = [total * source.weight / weight for source in sources]
    shares = [int(share) for share in exact]
    for index in sorted(range(len(sources)), key=lambda i: shares[i] - exact[i])[: total - sum(shares)]:
        shares[index] += 1
    return list(shares)


def _shuffled(source: Source, data: Data) -> Iterator[Document]:
    found = documents(source, prompt_chars=data.prompt_chars, prompts=data.responses == "target", seed=data.seed)
    if source.streaming:  # shuffled as it comes
        return found
    everything = list(found)
    random.Random(data.seed).shuffle(everything)
    return iter(everything)


def _share_of(text: str) -> float:
    """A number in [0, 1) that a text always has."""
    return int.from_bytes(hashlib.sha256(" ".join(text.split()).encode()).digest()[:8], "big") / 2**64


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(text: str, length: int) -> Iterator[str]:
    found = words(text)
    return (" ".join(found[i : i + length]) for i in range(len(found) - length + 1))


class _Filters:
    """Says of one document after the other why it is not taken; those that are taken are remembered."""

    def __init__(self, data: Data, exclude: Iterable[str]) -> None:
        self.data = data
        self._prompts, self._measured = set[str](), set[str]()
        for prompt in exclude:
            self._prompts.add(" ".join(words(prompt)))
            self._measured.update(_runs(prompt, data.exclude_words))
        self._digests = set[str]()
        self._near = _NearDuplicates(data.near_similarity)

    def against(self, document: Document) -> str | None:
        """The reason to leave it out, if there is one."""
        asked = document.asked() if self.data.responses == "target" and document.messages else document  # answers are made anew
        if document.messages and not asked.messages:
            return "without a question"
        turns = [str(message["content"]) for message in asked.messages]
        text = "\n".join(turns) if turns else asked.text
        if self._overlaps(text, [turn for turn, message in zip(turns, asked.messages, strict=True) if message["role"] == "user"]):
            return "in common with prompts that are measured with"
        if self.data.deduplicate == "none":
            return None
        digest = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
        if digest in self._digests:
            return "duplicates"
        self._digests.add(digest)
        if self.data.deduplicate == "near" and self._near.seen(text):
            return "near duplicates"
        return None

    def _overlaps(self, text: str, asked: list[str]) -> bool:
        if not self._prompts:
            return False
        return any(" ".join(words(turn)) in self._prompts for turn in asked) or not self._measured.isdisjoint(_runs(text, self.data.exclude_words))


class _NearDuplicates:
    """MinHash signatures of the documents that were taken, found again by bands."""

    def __init__(self, similarity: float) -> None:
        generator = np.random.default_rng(0)
        self.similarity = similarity
        self._a = generator.integers(0, 2**63, _PERMUTATIONS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._b = generator.integers(0, 2**63, _PERMUTATIONS, dtype=np.uint64)
        self._signatures: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    def seen(self, text: str) -> bool:
        """Whether a document like it was taken; if not, it is."""
        runs = set(_runs(text, _RUN)) or {" ".join(words(text))}
        hashes = np.fromiter((zlib.crc32(run.encode()) for run in runs), dtype=np.uint64, count=len(runs))
        # Multiply and shift, modulo 2^64: the upper half of a * h + b.
        signature = ((hashes[:, None] * self._a + self._b) >> np.uint64(32)).min(0)
        rows = _PERMUTATIONS // _BANDS
        keys = [(band, signature[band * rows : (band + 1) * rows].tobytes()) for band in range(_BANDS)]
        alike = {index for key in keys for index in self._bands.get(key, ())}
        if any(float((self._signatures[index] == signature).mean()) >= self.similarity for index in alike):
            return True
        for key in keys:
            self._bands[key].append(len(self._signatures))
        self._signatures.append(signature)
        return False
