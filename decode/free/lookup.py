"""Prompt lookup: what followed the last n tokens the last time they occurred, in the prompt or in the output."""

from __future__ import annotations

from torch import Tensor

from ... import UserError
from ..proposer import Accepted
from ..sampling import Sampler
from ..tree import DraftTree
from .drafts import Trie, continuation, new_tokens, pack_chains, pack_trees, require


class PromptLookup:
    """Drafts the continuation of the longest suffix n-gram that occurred before (prompt lookup decoding, Saxena 2023; LLMA 2304.04487).

    The longest n of min_ngram .. max_ngram that has an earlier occurrence decides; of its occurrences the most recent one gives a chain of `depth`
    tokens, or, with matches > 1, the most recent `matches` give a tree of at most `nodes` draft nodes (all of them, if not given).
    Each row keeps an index of its n-grams, so that a lookup does not grow with the text. Raises UserError on impossible sizes.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = 10, max_ngram: int = 3, min_ngram: int = 1, *, matches: int = 1, nodes: int | None = None) -> None:
        require("depth", depth, 1)
        require("max_ngram", max_ngram, 1)
        require("min_ngram", min_ngram, 1, max_ngram)
        require("matches", matches, 1)
        if matches == 1 and nodes not in (None, depth):
            raise UserError(f"decode.nodes: wanted depth {depth} for the chain of a single match, got {nodes}; ask for more matches")
        self._nodes = depth * matches if nodes is None else nodes
        require("nodes", self._nodes, depth, depth * matches)
        self.max_depth, self.num_nodes = depth, self._nodes + 1
        self._sizes, self._matches = range(max_ngram, min_ngram - 1, -1), matches
        self.reset(0, 0)

    def reset(self, batch: int, capacity: int) -> None:
        """Forget all texts."""
        self._texts: list[list[int]] = [[] for _ in range(batch)]
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(batch)]  # n-gram -> where it ended, in order

    def observe(self, accepted: Accepted) -> None:
        """Index the new n-grams."""
        for text, ends, tokens in zip(self._texts, self._ends, new_tokens(accepted, self._texts), strict=True):
            text += tokens
            for end in range(len(text) - len(tokens) + 1, len(text) + 1):
                for size in self._sizes:
                    if size <= end:
                        ends.setdefault(tuple(text[end - size : end]), []).append(end)

    def _continuations(self, row: int) -> list[list[int]]:
        """What followed the earlier occurrences of the longest known suffix, the most recent first."""
        text, ends = self._texts[row], self._ends[row]
        for size in self._sizes:
            earlier = ends.get(tuple(text[-size:]), [])[:-1] if size <= len(text) else []  # the last one is the suffix itself
            if earlier:
                return [continuation(text, end, self.max_depth) for end in earlier[: -self._matches - 1 : -1]]
        return []

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A chain, or a tree over several matches. The noise is not used: nothing is sampled."""
        found = [self._continuations(row) for row in range(root_B.shape[0])]
        if self._matches == 1:
            return pack_chains(root_B, [paths[0] if paths else [] for paths in found], self.max_depth)
        drafts = []
        for paths in found:
            trie = Trie()
            for path in paths:
                trie.add(path)
            drafts.append(trie.best(self._nodes))
        return pack_trees(root_B, drafts, self._nodes, self.max_depth)
