"""An online suffix automaton over each row's text: the longest suffix that occurred before, and what followed it."""

from __future__ import annotations

import math

from torch import Tensor

from ..proposer import Accepted
from ..sampling import Sampler
from ..tree import DraftTree
from .drafts import Trie, continuation, new_tokens, pack_chains, pack_trees, require


class Automaton:
    """The suffix automaton of a growing text (Blumer et al. 1985), with the tree of its suffix links.

    A state is a set of substrings that end at the same positions. The link of the state of the whole text leads to its longest suffix that also
    ends elsewhere, that is earlier: the match is known without searching. The positions where a state's substrings end are those of the prefixes
    among the states below it in the link tree.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = []
        self._link: list[int] = []
        self._length: list[int] = []
        self._end: list[int] = []  # length of the prefix that the state was made for; 0 if it was made by a split
        self._below: list[dict[int, None]] = []  # states that link here, in order of arrival
        self._last = self._state(0, {}, 0)

    def _state(self, length: int, following: dict[int, int], end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        self._below.append({})
        return len(self._link) - 1

    def _attach(self, state: int, to: int) -> None:
        if self._link[state] >= 0:
            del self._below[self._link[state]][state]
        self._link[state] = to
        self._below[to][state] = None

    def append(self, token: int) -> None:
        """Add one token; amortised constant time."""
        self.text.append(token)
        state = self._state(len(self.text), {}, len(self.text))
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        if at < 0:
            self._attach(state, 0)
        else:
            found = self._next[at][token]
            self._attach(state, found if self._length[found] == self._length[at] + 1 else self._split(at, token, found))
        self._last = state

    def _split(self, at: int, token: int, found: int) -> int:
        """Take the substrings of `found` that fit in length[at] + 1 tokens, which now end at one position more, into a state of their own."""
        shorter = self._state(self._length[at] + 1, dict(self._next[found]), 0)
        self._attach(shorter, self._link[found])
        self._attach(found, shorter)
        while at >= 0 and self._next[at].get(token) == found:
            self._next[at][token] = shorter
            at = self._link[at]
        return shorter

    @property
    def match(self) -> int:
        """Length of the longest suffix of the text that also ends earlier; 0 if there is none."""
        return self._length[self._link[self._last]] if self.text else 0

    def occurrences(self, limit: int) -> list[int]:
        """Up to `limit` earlier ends of that suffix (tokens before the end), those in younger branches of the link tree first."""
        ends: list[int] = []
        stack = [self._link[self._last]] if self.match else []
        while stack and len(ends) < limit:
            at = stack.pop()
            if self._end[at] and at != self._last:
                ends.append(self._end[at])
            stack += self._below[at]
        return ends


class SuffixAutomaton:
    """Drafts what followed the longest suffix that occurred before (SAM-Decoding 2411.10666; trees by frequency as SuffixDecoding 2411.04975).

    Without `nodes` a chain: at every step the most frequent continuation. With `nodes` a tree of that many draft nodes: the most frequent ones.
    Counts are taken over up to `matches` earlier occurrences. A match shorter than min_match gives no draft, and one of m tokens gives at most
    factor * m levels (SuffixDecoding's alpha): verification takes the same time, but the budget goes to other branches, or to a Hybrid's other
    proposer. Raises UserError on impossible sizes.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = 10, nodes: int | None = None, *, min_match: int = 1, factor: float = math.inf, matches: int = 32) -> None:
        require("depth", depth, 1)
        require("matches", matches, 1)
        require("nodes", depth if nodes is None else nodes, depth, depth * matches)
        require("min_match", min_match, 1)
        require("factor", factor, 0)
        self.max_depth, self.num_nodes = depth, (depth if nodes is None else nodes) + 1
        self._chain, self._min_match, self._factor, self._matches = nodes is None, min_match, factor, matches
        self.reset(0, 0)

    def reset(self, batch: int, capacity: int) -> None:
        """Forget all texts."""
        self._automata = [Automaton() for _ in range(batch)]

    def observe(self, accepted: Accepted) -> None:
        """Append to the automata."""
        new = new_tokens(accepted, [automaton.text for automaton in self._automata])
        for automaton, tokens in zip(self._automata, new, strict=True):
            for token in tokens:
                automaton.append(token)

    def _trie(self, automaton: Automaton) -> Trie:
        """Continuations of the match."""
        trie = Trie()
        if automaton.match >= self._min_match:
            length = int(min(self.max_depth, max(1.0, self._factor * automaton.match)))
            for end in automaton.occurrences(self._matches):
                trie.add(continuation(automaton.text, end, length))
        return trie

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A chain, or a tree. The noise is not used: nothing is sampled."""
        tries = [self._trie(automaton) for automaton in self._automata]
        if self._chain:
            return pack_chains(root_B, [trie.heaviest_path() for trie in tries], self.max_depth)
        return pack_trees(root_B, [trie.best(self.num_nodes - 1) for trie in tries], self.num_nodes - 1, self.max_depth)
