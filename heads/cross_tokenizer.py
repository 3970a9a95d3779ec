"""A draft model with another tokenizer: token-level intersection, TLI (Timor et al., 2502.05202, algorithm 4).

*Output.* The draft's distribution is restricted to the tokens that both vocabularies have, compared by the bytes they stand for; each is one of the
target's tokens, so that what is drafted is a draft tree over the target's ids like any other. Noise and penalties are those of the target's ids.

*Input.* The draft reads the text so far in its own tokenization, as it has learned to, since the target's tokens need not be in its vocabulary.
As the text grows, its end may be cut into other tokens than before: the draft's cache is cut back to what the two have in common, and goes on from
there. Only the end of the text is tokenized anew in each round (see `Reader`).

Nothing of this decides what is generated, as the target verifies: a text that the draft reads in an odd way is drafted for less well, that is all.

Dims: B batch, M columns fed, K nodes a level, C shared tokens, V target vocabulary, L cache slots.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .. import UserError
from ..decode.free.drafts import new_tokens
from ..decode.growth import Kind
from ..decode.prompts import eos_ids
from ..decode.proposer import Accepted, Extent
from ..decode.target import Target
from .head import draft_shape
from .standalone import Standalone, StandaloneProposer

LEAST_SHARED = 0.01  # of the target's tokens
WINDOW = 32  # the target's tokens that are tokenized anew, beside the new ones
_EDGE = 8  # the first of them, whose new tokens mean little, as the window begins anywhere
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece writes it in place of a blank
_RAW_BYTE = re.compile("<0x[0-9A-F]{2}>")  # sentencepiece's token of a byte


def _byte_characters() -> dict[str, int]:
    """{character: byte} of byte-level BPE (GPT-2): printable bytes of Latin-1 stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What each token id of a tokenizer stands for: text (as bytes: a token may be a part of a character), or a special token of that name."""

    text: dict[int, bytes]
    special: dict[int, str]
    begin: int | None  # the special token that texts may begin with
    prefixed: bool  # the tokenizer puts a blank before a text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, name: str, size: int) -> Vocabulary:
        """That of a byte-level or sentencepiece tokenizer, for ids below `size`. name: the model's, for errors. Raises UserError for others.

        Each kind marks blanks with a character of its own, by which it is known. Tokens that were added to the vocabulary are written as they are.
        """
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        plain = {index: token for token, index in tokenizer.get_vocab().items() if index not in added and index < size}
        characters = _byte_characters()
        blank = next(character for character, byte in characters.items() if byte == 32)
        byte_level, pieces = (sum(token.startswith(mark) for token in plain.values()) for mark in (blank, _SPACE))
        if byte_level > pieces:
            text = {index: _bytes_of(token, characters) for index, token in plain.items()}
        elif pieces:
            raw = {index: bytes([int(token[3:5], 16)]) for index, token in plain.items() if _RAW_BYTE.fullmatch(token)}
            # Where a piece and a raw byte stand for the same, the piece is what texts are made of: it comes first.
            text = {index: token.replace(_SPACE, " ").encode() for index, token in plain.items() if index not in raw} | raw
        else:
            raise UserError(
                f"cross-tokenizer: wanted a byte-level or sentencepiece tokenizer, got {name}'s, which marks no blanks; use another model"
            )
        special = {index: token.content for index, token in added.items() if token.special and index < size}
        text |= {index: token.content.encode() for index, token in added.items() if not token.special and index < size}
        first = tokenizer("a", add_special_tokens=False)["input_ids"]
        return cls(text, special, tokenizer.bos_token_id, bool(first) and text.get(first[0], b"").startswith(b" "))


def _bytes_of(token: str, characters: dict[str, int]) -> bytes:
    """What a token of a byte-level tokenizer stands for; as it is written, if that is in no byte's character."""
    return bytes(characters[c] for c in token) if all(c in characters for c in token) else token.encode()


def intersection(draft: Vocabulary, target: Vocabulary, ends: tuple[Sequence[int], Sequence[int]] = ((), ())) -> dict[int, int]:
    """{draft id: target id} of the tokens that both have; one to one. Text is compared with text, special tokens with special tokens.

    ends: the ids that end a generation, the draft's and the target's: those that have no counterpart by name are each other's, in order.
    """
    names = {name: index for index, name in target.special.items()}
    pairs = {ours: names[name] for ours, name in draft.special.items() if name in names}
    used = set(pairs.values())
    lonely = [index for index in ends[0] if index not in pairs], [index for index in ends[1] if index not in used]
    pairs |= dict(zip(*lonely, strict=False))
    spelled: dict[bytes, int] = {}
    for index, text in target.text.items():
        spelled.setdefault(text, index)
    taken = set(pairs.values())
    for ours, text in draft.text.items():
        theirs = spelled.get(text)
        if text and theirs is not None and theirs not in taken and ours not in pairs:
            pairs[ours] = theirs
            taken.add(theirs)
    return pairs


class CrossTokenizer:
    """A draft model for a target with another tokenizer, with the map between their tokens.

    Raises UserError if one of them has no tokenizer, or one that cannot be read (`Vocabulary.of`), or if they share too few tokens.
    """

    method = "draft_model_tli"

    def __init__(self, draft: Target, target: Target) -> None:
        if draft.tokenizer is None or target.tokenizer is None:
            raise UserError(f"cross-tokenizer: wanted models with tokenizers, got {(draft if draft.tokenizer is None else target).name} without one")
        self.draft = draft
        ours = Vocabulary.of(draft.tokenizer, draft.name, draft.vocab_size)
        theirs = Vocabulary.of(target.tokenizer, target.name, target.vocab_size)
        self.shared = intersection(ours, theirs, (_ends(draft), _ends(target)))
        every = len(theirs.text) + len(theirs.special)
        if len(self.shared) < max(1, LEAST_SHARED * every):
            raise UserError(
                f"draft model {draft.name}: wanted at least {LEAST_SHARED:.0%} of the {every} tokens of target {target.name}, got {len(self.shared)} "
                "that both have; choose a model with a tokenizer that is more alike"
            )
        self.reader = Reader(draft.tokenizer, ours, theirs, self.shared)
        self.vocab_size, self.target_vocab_size = len(self.shared), target.vocab_size

    def parameters(self) -> Iterator[nn.Parameter]:
        """The draft's parameters."""
        yield from self.draft.model.parameters()

    def proposer(
        self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic"
    ) -> CrossTokenizerProposer:
        """A proposer of chains, or of dynamic trees with `nodes` draft nodes. Raises UserError for a `kind` of sampled drafts."""
        if kind != "deterministic":  # they are drawn by the position in the draft's text, which may be the same in two rounds
            raise UserError(f"cross-tokenizer: wanted drafts that are not sampled, got kind {kind}; use the rule shared_noise")
        return CrossTokenizerProposer(self, **draft_shape(self.vocab_size, tree, depth, topk, nodes))


def _ends(model: Target) -> list[int]:
    """The ids that end a generation, by the model, else by its tokenizer."""
    assert model.tokenizer is not None
    own: int | None = model.tokenizer.eos_token_id
    return eos_ids(model.model) or ([] if own is None else [own])


class Reader:
    """Reads the target's tokens as the draft's: the text's own tokenization by the draft's tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, draft: Vocabulary, target: Vocabulary, shared: dict[int, int]) -> None:
        self._tokenizer, self._prefixed = tokenizer, target.prefixed
        begins = draft.begin is not None and tokenizer("")["input_ids"][:1] == [draft.begin]
        self._begin = [draft.begin] if begins and draft.begin is not None else []  # what the draft wants before every text
        self._blank = draft.begin or tokenizer.eos_token_id or 0
        # A special token is written as its counterpart, of which the draft's tokenizer makes that token; one that has none, by its own name.
        named = {theirs: draft.special[ours] for ours, theirs in shared.items() if ours in draft.special}
        written = {index: named.get(index, "" if index == target.begin else name) for index, name in target.special.items()}
        self._spelled = target.text | {index: name.encode() for index, name in written.items()}
        self._width = {index: len(text) for index, text in draft.text.items()} | {index: len(name.encode()) for index, name in draft.special.items()}
        self._bytes: dict[int, int] = {}
        for index, text in draft.text.items():
            if len(text) == 1:
                self._bytes.setdefault(text[0], index)

    def read(self, ids: Sequence[int]) -> list[int]:
        """The draft's tokens for a text of the target's, from its beginning. At least one."""
        spelled = self._spell(ids)
        tokens = self._encode(spelled.removeprefix(b" ") if self._prefixed else spelled)
        begin = self._begin if tokens[:1] != self._begin else []
        return [*begin, *tokens] or [self._blank]

    def read_on(self, before: Sequence[int], ids: Sequence[int], new: int) -> list[int]:
        """`read(ids)`, knowing that all but the last `new` of the ids are read as `before`; its cost does not grow with the text.

        The last WINDOW ids before the new ones, and those, are tokenized together. From the first place on, past the window's edge, where both the
        old tokens and the new ones begin a token, the new ones are taken; what lies before it is taken to stay as it is. If there is no such place
        (as in a long run of blanks), the whole text is read.
        """
        if len(ids) <= new + WINDOW:
            return self.read(ids)
        added, most = len(self._spell(ids[-new:])), len(self._spell(ids[-new - WINDOW + _EDGE :]))
        again = self._encode(self._spell(ids[-new - WINDOW :]))
        # Places are counted in bytes from the end, which does not depend on what tokenizers put before a text.
        old_places = accumulate((self._width.get(token, 0) for token in reversed(before)), initial=added)
        kept: dict[int, int] = {}  # place: how many old tokens lie before it
        for index, place in enumerate(old_places):
            if place > most:
                break
            kept.setdefault(place, len(before) - index)
        place = sum(self._width.get(token, 0) for token in again)
        for index, token in enumerate(again):
            if added < place <= most and place in kept:
                return [*before[: kept[place]], *again[index:]]
            place -= self._width.get(token, 0)
        return self.read(ids)

    def _spell(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._spelled.get(index, b"") for index in ids)

    def _encode(self, text: bytes) -> list[int]:
        """Tokens of a text whose last character may be incomplete: its bytes become single tokens, where the draft has such."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        whole = decoder.decode(text)
        tokens: list[int] = self._tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"] if whole else []
        return tokens + [self._bytes[byte] for byte in decoder.getstate()[0] if byte in self._bytes]


class CrossTokenizerProposer(StandaloneProposer):
    """Grows chains and dynamic trees over the shared tokens. Its cache holds each row's text in the draft's tokens, root included.

    For the same text the draft may need more tokens than the target. What `memory` and `max_positions` say supposes that it does not: if it does, its
    cache grows, and past its last position it drafts badly, but goes on.
    """

    def __init__(self, model: CrossTokenizer, *, depth: int, topk: int, nodes: int) -> None:
        super().__init__(Standalone(model.draft), depth=depth, topk=topk, nodes=nodes)
        self._reader, self._target_vocab_size = model.reader, model.target_vocab_size
        pairs = sorted(model.shared.items(), key=lambda pair: pair[1])
        ours_C, theirs_C = torch.tensor(pairs, device=model.draft.device).unbind(1)
        self._ours_C, self._theirs_C = ours_C.contiguous(), theirs_C.contiguous()
        self._ours_V = torch.zeros(model.target_vocab_size, dtype=torch.int64, device=model.draft.device).scatter(0, self._theirs_C, self._ours_C)
        self._texts: list[list[int]] = []  # the target's tokens
        self._read: list[list[int]] = []  # the draft's, as they lie in the cache

    @property
    def asynchronous(self) -> bool:
        """No: texts are tokenized on the host."""
        return False

    @property
    def _entries(self) -> Extent:
        lengths = [len(tokens) for tokens in self._read]
        return Extent(max(lengths), min(lengths) == max(lengths))

    def reset(self, batch: int, capacity: int) -> None:
        """Forget all texts, and make room."""
        super().reset(batch, capacity)
        self._capacity = capacity
        self._texts, self._read = [[] for _ in range(batch)], [[] for _ in range(batch)]

    def observe(self, accepted: Accepted) -> None:
        """Read what is new, and run the draft from the first token that is not as it was."""
        self._observe_length(accepted)
        before, self._read = (
            self._read,
            [self._read_row(text, new, read) for text, new, read in zip(self._texts, new_tokens(accepted, self._texts), self._read, strict=True)],
        )
        longest = max(len(tokens) for tokens in self._read)
        if longest > self._capacity:  # the draft needs more tokens than the target: its cache begins anew
            self._capacity, before = 2 * longest, [[] for _ in before]
            self.draft.allocate(len(before), self._capacity + self.max_depth * self.topk)
        kept = [_common(old, new) for old, new in zip(before, self._read, strict=True)]
        fed = [tokens[count:] for tokens, count in zip(self._read, kept, strict=True)]
        if any(fed):
            self._feed(fed, kept)

    def _read_row(self, text: list[int], new: list[int], read: list[int]) -> list[int]:
        text += new
        return self._reader.read_on(read, text, len(new)) if new else read

    def _feed(self, fed: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
        """Run the draft over each row's tokens, which follow the first `kept` entries of its cache."""
        width, lengths = max(map(len, fed)), [len(tokens) for tokens in self._read]
        rows = [[count, len(tokens), *tokens, *[0] * (width - len(tokens))] for count, tokens in zip(kept, fed, strict=True)]
        packed = torch.tensor(rows, device=self._length_B.device)
        kept_B1, count_B, ids_BM = packed[:, :1], packed[:, 1], packed[:, 2:]
        # What is no token goes to the slot after the row's last entry, where the next draft begins.
        slots_BM = (kept_B1 + torch.arange(width, device=packed.device)).minimum(kept_B1 + count_B.unsqueeze(1))
        slot_L = torch.arange(max(lengths) + 1, device=packed.device)
        start = kept[0] if min(kept) == max(kept) and min(map(len, fed)) == width else None
        allowed_BML = slot_L <= slots_BM.unsqueeze(-1)
        hidden_BMH = self.draft.extend(ids_BM, slots_BM, slots_BM, allowed_BML, slot_L.expand(len(rows), -1), start).hidden_BNH
        self._length_B.copy_(kept_B1.squeeze(1))
        self._remember(hidden_BMH, count_B)

    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        return super()._advance(fed_BKH, self._ours_V[ids_BK], position_BK, slots_BK, allowed_BKL, key_BL, start)

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        return self.draft.logits(hidden_BKH).index_select(-1, self._ours_C)

    def _draft_ids(self) -> Tensor:
        return self._theirs_C


def _common(old: Sequence[int], new: Sequence[int]) -> int:
    """How many tokens at the beginning are the same; fewer than all of the new ones, unless nothing has changed."""
    if old == new:
        return len(new)
    low, high = 0, min(len(old), len(new) - 1)
    while low < high:  # slices are compared faster than tokens one by one
        middle = (low + high + 1) // 2
        low, high = (middle, high) if old[low:middle] == new[low:middle] else (low, middle - 1)
    return low
