"""Retrieval: what followed the last tokens in a datastore of other texts."""

from __future__ import annotations

from torch import Tensor

from ..proposer import Accepted
from ..sampling import Sampler
from ..tree import DraftTree
from .datastore import Datastore
from .drafts import Trie, new_tokens, pack_trees, require


class Retrieval:
    """Drafts the most frequent continuations of the longest suffix found in a datastore (REST, 2311.08252).

    The longest suffix of min_ngram .. max_ngram tokens (max_ngram: the datastore's `context` if not given) that occurs there decides. Up to `matches`
    of its occurrences, each with the `depth` tokens that follow within its document, form a trie weighted by counts; the `nodes` heaviest nodes
    are the draft tree. Raises UserError on impossible sizes.
    Load the datastore with the target's tokenizer fingerprint: other ids mean nothing to it.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, datastore: Datastore, depth: int = 10, nodes: int = 32, *, max_ngram: int | None = None, min_ngram: int = 2, matches: int = 64
    ) -> None:
        require("depth", depth, 1)
        require("matches", matches, 1)
        require("nodes", nodes, 1, depth * matches)
        require("max_ngram", datastore.context if max_ngram is None else max_ngram, 1, datastore.context)
        self._most = datastore.context if max_ngram is None else max_ngram
        require("min_ngram", min_ngram, 1, self._most)
        self.datastore, self.max_depth, self.num_nodes = datastore, depth, nodes + 1
        self._least, self._matches = min_ngram, matches
        self.reset(0, 0)

    def reset(self, batch: int, capacity: int) -> None:
        """Forget all texts."""
        self._texts: list[list[int]] = [[] for _ in range(batch)]

    def observe(self, accepted: Accepted) -> None:
        """Remember as much of the texts as a lookup needs."""
        for text, tokens in zip(self._texts, new_tokens(accepted, self._texts), strict=True):
            text += tokens
            del text[: -self._most]

    def _trie(self, text: list[int]) -> Trie:
        trie = Trie()
        size, found = self.datastore.longest_suffix(text, self._least, self._most)
        for tokens in self.datastore.continuations(found, size, self.max_depth, self._matches):
            trie.add(tokens)
        return trie

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree of the heaviest continuations. The noise is not used: nothing is sampled."""
        drafts = [self._trie(text).best(self.num_nodes - 1) for text in self._texts]
        return pack_trees(root_B, drafts, self.num_nodes - 1, self.max_depth)
