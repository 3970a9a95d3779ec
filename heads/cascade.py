"""A cascade: the draft model's own chain is produced by speculative decoding, with a drafter for the drafter (2312.11462, vertical cascade; the
staged speculative decoding of 2308.04623). It drafts the very chain that the draft model would draft alone, in fewer passes of it.

The inner drafter observes only what the target accepted. Within a round it is asked what would follow if the tokens drafted so far came next:
`Inner.after`, which changes nothing, so that there is nothing to take back when the target rejects some of them.

Slots of a row in the draft model's cache, for the chain d1 d2 ... and inner drafts c of which the first two passes reject some:

    committed ... root | d1  c  c | .            first pass: chooses d2, as the draft would; c is not d2 and is rejected
    committed ... root | d1 d2  c | c            second pass: writes from d2 on, over what was rejected; no token sees a slot past its own

Dims: B batch, M accepted columns, W columns of a pass, D depth, H hidden, V vocabulary, L cache slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from .. import UserError
from ..decode.free.drafts import Trie, continuation
from ..decode.free.lookup import PromptLookup
from ..decode.free.recycling import TokenRecycling
from ..decode.free.suffix import Automaton, SuffixAutomaton
from ..decode.length import DraftLength
from ..decode.proposer import Accepted, LogitObserver
from ..decode.sampling import Sampler
from ..decode.tree import DraftTree
from .standalone import Standalone, StandaloneProposer


class Inner(Protocol):
    """A drafter for the drafter. One that is a `LogitObserver` too is shown the draft model's logits, after every pass but `observe`'s."""

    def reset(self, batch: int, capacity: int) -> None:
        """Forget everything."""

    def observe(self, accepted: Accepted) -> None:
        """Take in what the target accepted."""

    def after(self, drafted: Sequence[Sequence[int]]) -> list[list[int]]:
        """What follows each row's text if these tokens (one at least) came next. Of nothing that is asked here anything is kept."""


class _Lookup(PromptLookup):
    def after(self, drafted: Sequence[Sequence[int]]) -> list[list[int]]:
        """The continuation of the longest n-gram that the text shows already: n-grams that end within `drafted` are not indexed."""
        return [self._following(row, list(tokens)) for row, tokens in enumerate(drafted)]

    def _following(self, row: int, tokens: list[int]) -> list[int]:
        text, ends = self._texts[row], self._ends[row]
        last = [*text[-self._sizes[0] :], *tokens]
        for size in self._sizes:
            found = ends.get(tuple(last[-size:])) if size <= len(last) else None
            if found:
                return continuation([*text[found[-1] : found[-1] + self.max_depth], *tokens], 0, self.max_depth)
        return []


class _Walked(Automaton):
    def occurrences_after(self, tokens: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """(length of the longest suffix of text + tokens that is in the text, up to `limit` of its ends there). Nothing is appended."""
        at, length = self._last, len(self.text)
        for token in tokens:
            while at >= 0 and token not in self._next[at]:
                at = self._link[at]
                length = self._length[at] if at >= 0 else 0
            at, length = (self._next[at][token], length + 1) if at >= 0 else (0, 0)
        ends: list[int] = []
        stack = [at] if length else []
        while stack and len(ends) < limit:
            at = stack.pop()
            if self._end[at]:
                ends.append(self._end[at])
            stack += self._below[at]
        return length, ends


class _Suffix(SuffixAutomaton):
    def reset(self, batch: int, capacity: int) -> None:
        """Forget all texts."""
        self._walked = [_Walked() for _ in range(batch)]
        self._automata = [*self._walked]

    def after(self, drafted: Sequence[Sequence[int]]) -> list[list[int]]:
        """The most frequent continuation of the longest suffix that is in the text, found by walking its automaton."""
        return [self._following(automaton, tokens) for automaton, tokens in zip(self._walked, drafted, strict=True)]

    def _following(self, automaton: _Walked, tokens: Sequence[int]) -> list[int]:
        trie = Trie()
        for end in automaton.occurrences_after(tokens, self._matches)[1]:
            trie.add(continuation([*automaton.text[end : end + self.max_depth], *tokens], 0, self.max_depth))
        return trie.heaviest_path()


class _Recycled(TokenRecycling):
    """Its matrix knows single tokens and belongs to no text; it learns the draft model's candidates."""

    def __init__(self, depth: int) -> None:
        super().__init__([[0] * length for length in range(1, depth + 1)])

    def after(self, drafted: Sequence[Sequence[int]]) -> list[list[int]]:
        """The best candidate after the last token, the best one after that, and so on."""
        if self._matrix_VK is None:
            return [[] for _ in drafted]
        at_B = torch.tensor([tokens[-1] for tokens in drafted], device=self._matrix_VK.device)
        chain = []
        for _ in range(self.max_depth):
            at_B = torch.where(at_B < 0, -1, self._matrix_VK[at_B.clamp(min=0), 0])
            chain.append(at_B)
        rows: list[list[int]] = torch.stack(chain, dim=1).tolist()
        return [row[: row.index(-1)] if -1 in row else row for row in rows]


INNERS: dict[str, Callable[[int], Inner]] = {"prompt_lookup": _Lookup, "suffix_automaton": _Suffix, "token_recycling": _Recycled}


def check_inner(name: str) -> None:
    """Raise UserError unless it is in INNERS."""
    if name not in INNERS:
        raise UserError(f"cascade: wanted an inner drafter that can draft from tokens which are not accepted yet ({', '.join(INNERS)}), got {name}")


class Cascade:
    """A draft model, bound to its target, with an inner drafter of this name. Raises UserError for one that is not in INNERS."""

    def __init__(self, inner: str, draft: Standalone) -> None:
        check_inner(inner)
        self.inner, self.draft = inner, draft

    @property
    def method(self) -> str:
        """Both names."""
        return f"cascade:{self.inner}+{self.draft.method}"

    def parameters(self) -> Iterator[nn.Parameter]:
        """The draft model's: inner drafters have none."""
        yield from self.draft.parameters()

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16) -> CascadeProposer:
        """A proposer of chains, whatever `tree` is. Raises UserError unless depth is at least 1."""
        if depth < 1:
            raise UserError(f"decode.depth: wanted at least 1, got {depth}")
        return CascadeProposer(self.draft, INNERS[self.inner](max(1, depth - 1)), depth=depth)


class CascadeProposer(StandaloneProposer):
    """Proposes the chain that `StandaloneProposer` proposes, at any temperature: draft token i is the argmax of the draft's scores with the noise
    of its depth. A pass of the draft runs over the last token that it chose and what the inner drafter expects after it, and every choice up to
    the first that was not expected is a draft token. Rows need different numbers of passes; those that are done ride along.
    """

    def __init__(self, model: Standalone, inner: Inner, *, depth: int) -> None:
        super().__init__(model, depth=depth, topk=1, nodes=depth)
        self.inner = inner
        self._observer = inner if isinstance(inner, LogitObserver) and inner.wants_logits else None
        self._finished: list[bool] = []

    @property
    def asynchronous(self) -> bool:
        """No: the inner drafter works on the host."""
        return False

    @property
    def length(self) -> DraftLength | None:
        """None: the chain is always max_depth long. Setting a policy raises UserError."""
        return None

    @length.setter
    def length(self, policy: DraftLength | None) -> None:
        if policy is not None:
            raise UserError("draft length: wanted no policy for a cascade, which drafts several levels in one pass; set no policy")

    def reset(self, batch: int, capacity: int) -> None:
        """Reset both drafters."""
        super().reset(batch, capacity)
        self.inner.reset(batch, capacity)

    def observe(self, accepted: Accepted) -> None:
        """Both drafters take in what the target accepted."""
        super().observe(accepted)
        self.inner.observe(accepted)
        self._finished = [count == 0 for count in accepted.count_B.tolist()]

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """The chain. A finished row's is filled up with its first token."""
        first_B1: Tensor = self._scores(self._hidden_BH.unsqueeze(1), sampler, noise_BDV, 0).argmax(-1)
        rows: list[list[int]] = first_B1.tolist()
        for row, finished in zip(rows, self._finished, strict=True):
            if finished:
                row *= self.max_depth
        while min(map(len, rows)) < self.max_depth:
            # The last draft token need not be fed: nothing is drafted after it.
            expected = self.inner.after(rows)
            fed = [[row[-1], *tokens[: max(0, self.max_depth - len(row) - 1)]] for row, tokens in zip(rows, expected, strict=True)]
            for row, tokens, choices in zip(rows, fed, self._choices(rows, fed, sampler, noise_BDV), strict=True):
                for next_expected, choice in zip([*tokens[1:], -1], choices, strict=False):
                    if len(row) < self.max_depth:
                        row.append(choice)
                    if next_expected != choice:
                        break
        return DraftTree.chain(torch.cat([root_B.unsqueeze(1), torch.tensor(rows, device=root_B.device)], dim=1))

    def _choices(self, rows: Sequence[Sequence[int]], fed: Sequence[Sequence[int]], sampler: Sampler, noise_BDV: Tensor | None) -> list[list[int]]:
        """[B][W] what the draft chooses after each fed token, of which the first is its row's last. One pass, and one transfer each way."""
        width, levels = max(map(len, fed)), [len(row) for row in rows]
        rows_of = [[level, len(tokens), *tokens, *[0] * (width - len(tokens))] for level, tokens in zip(levels, fed, strict=True)]
        packed = torch.tensor(rows_of, device=self._length_B.device)
        level_B1, count_B1, ids_BW = packed[:, :1], packed[:, 1:2], packed[:, 2:]
        column_W = torch.arange(width, device=ids_BW.device)
        level_BW = level_B1 + column_W
        # Columns that are not real may lie past the room for the chain; they share its last slot, which no chain's token needs.
        slots_BW = self._length_B.unsqueeze(1) + (level_BW - 1).clamp(max=self.max_depth - 1)
        longest = self._entries.longest
        start = longest + levels[0] - 1 if self._entries.exact and min(levels) == max(levels) else None
        slot_L = torch.arange(longest + min(self.max_depth, max(levels) - 1 + width), device=ids_BW.device)
        known_BW = ids_BW.clamp(max=self.draft.vocab_size - 1)  # an expected token of the target's that the draft lacks is never chosen
        hidden_BWH = self._advance(
            self._hidden_BH, known_BW, slots_BW, slots_BW, slot_L <= slots_BW.unsqueeze(-1), slot_L.expand(len(rows), -1), start
        )
        logits_BWV = self._logits(hidden_BWH)
        if self._observer is not None:
            self._observer.observe_logits(known_BW, logits_BWV, (column_W < count_B1) & (level_BW < self.max_depth))
        noise_BWV = None
        if noise_BDV is not None:
            row_B1 = torch.arange(len(rows), device=ids_BW.device).unsqueeze(1)
            noise_BWV = noise_BDV[row_B1, level_BW.clamp(max=self.max_depth - 1)][..., : logits_BWV.shape[-1]]
        choices: list[list[int]] = sampler.scores(logits_BWV, noise_BWV).argmax(-1).tolist()
        return choices
