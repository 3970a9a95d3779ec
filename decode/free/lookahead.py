"""Lookahead's n-gram pool: n-grams that the text or the target's own choices have shown, looked up by the last token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..proposer import Accepted
from ..sampling import Sampler
from ..tree import DraftTree
from .drafts import Trie, new_tokens, pack_trees, require


class Lookahead:
    """Drafts from a pool of n-grams that begin with the last token, after lookahead decoding (2402.02057). A pool for each row.

    It is the paper's verification branch without its lookahead branch. The paper runs a window of W positions through the target in every step,
    beside the candidates, and refines it by Jacobi iteration: n-grams are read off its trajectories, and its tokens cost target compute. Here no
    token is fed to the target but the draft tree itself. The pool is filled from the text (of the prompt only if from_prompt is set), and, through
    `observe_logits`, from every verified node: the path that leads to it, then the target's greedy choice after it. On rejected branches these are
    n-grams that the text never showed, the counterpart of the Jacobi trajectories; there are fewer of them than a window would give.

    ngram: tokens of an n-gram, so that drafts are ngram - 1 deep. candidates: n-grams kept for each first token, the newest. nodes: draft nodes, all
    candidates if not given. Raises UserError on impossible sizes.
    """

    taps: tuple[int, ...] = ()
    wants_logits = True

    def __init__(self, ngram: int = 5, candidates: int = 7, *, nodes: int | None = None, from_prompt: bool = True) -> None:
        require("ngram", ngram, 2)
        require("candidates", candidates, 1)
        self._nodes = candidates * (ngram - 1) if nodes is None else nodes
        require("nodes", self._nodes, ngram - 1, candidates * (ngram - 1))
        self.max_depth, self.num_nodes = ngram - 1, self._nodes + 1
        self._ngram, self._candidates, self._from_prompt = ngram, candidates, from_prompt
        self.reset(0, 0)

    def reset(self, batch: int, capacity: int) -> None:
        """Forget texts and pools."""
        self._texts: list[list[int]] = [[] for _ in range(batch)]
        self._begin = [0] * batch  # where the text starts that may enter the pool
        self._contexts: list[list[int]] = [[] for _ in range(batch)]  # the last tokens when the tree was proposed, its root included
        self._parents_BN: Tensor | None = None
        # first token -> the other tokens of its n-grams, oldest first (a dict as an ordered set)
        self._pools: list[dict[int, dict[tuple[int, ...], None]]] = [{} for _ in range(batch)]

    def _remember(self, row: int, gram: list[int]) -> None:
        known = self._pools[row].setdefault(gram[0], {})
        rest = tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._candidates:
            del known[next(iter(known))]

    def observe(self, accepted: Accepted) -> None:
        """Take in the n-grams that the new tokens complete."""
        for row, (text, tokens) in enumerate(zip(self._texts, new_tokens(accepted, self._texts), strict=True)):
            if not text and not self._from_prompt:
                self._begin[row] = max(0, len(tokens) - 1)  # the first generated token is the last one of what comes first
            text += tokens
            for end in range(len(text) - len(tokens) + 1, len(text) + 1):
                if end - self._ngram >= self._begin[row]:
                    self._remember(row, text[end - self._ngram : end])

    def observe_logits(self, tokens_BN: Tensor, logits_BNV: Tensor, valid_BN: Tensor, parents_BN: Tensor | None = None) -> None:
        """Take in the n-grams that end in the greedy choice after each valid node. One transfer."""
        parents_BN = self._parents_BN if parents_BN is None else parents_BN
        assert parents_BN is not None, "propose() comes first"
        packed = torch.stack([tokens_BN, parents_BN, logits_BNV.argmax(-1), valid_BN.long()], dim=1).tolist()
        for row, (tokens, parents, choices, valid) in enumerate(packed):
            if not valid[0]:
                continue
            paths = [self._contexts[row]]  # last ngram - 1 tokens up to each node
            for node in range(len(tokens)):
                if node:
                    paths.append([*paths[parents[node]], tokens[node]][1 - self._ngram :])
                valid[node] &= valid[parents[node]]
                if valid[node] and len(paths[node]) == self._ngram - 1:
                    self._remember(row, [*paths[node], choices[node]])

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree of the pool's n-grams that begin with the root. The noise is not used: nothing is sampled."""
        drafts = []
        for row, text in enumerate(self._texts):
            self._contexts[row] = text[max(self._begin[row], len(text) - self._ngram + 1) :]
            trie = Trie()
            for rest in reversed(self._pools[row].get(text[-1], {}) if text else {}):
                trie.add(rest)
            drafts.append(trie.best(self._nodes))
        tree = pack_trees(root_B, drafts, self._nodes, self.max_depth)
        self._parents_BN = tree.parents_BN
        return tree
