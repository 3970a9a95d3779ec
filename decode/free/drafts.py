"""What the drafter-free proposers share: the rows' texts on the host, tries of continuations, and packing drafts into trees.

Token structures live on the host; per round, token ids leave the device in one transfer and drafts return in one.

Dims: B batch, N nodes (root included), M tokens processed, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import UserError
from ..proposer import Accepted
from ..tree import DraftTree

# One row's draft: (token, parent) of nodes 1, 2, ...; parents precede children, 0 is the root.
Draft = list[tuple[int, int]]


def require(name: str, value: float, least: float, most: float | None = None) -> None:
    """Raise UserError unless least <= value <= most."""
    if not (value >= least and (most is None or value <= most)):
        raise UserError(f"decode.{name}: wanted {f'at least {least}' if most is None else f'{least} .. {most}'}, got {value}")


def new_tokens(accepted: Accepted, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What to append to each row's text: the prompt and the root the first time, later what a round emitted. One transfer, however many rows.

    A text holds prompt and output so far; its last token is the root of the next tree.
    """
    columns = torch.cat([accepted.count_B.unsqueeze(1), accepted.tokens_BM[:, :1], accepted.next_BM], dim=1).tolist()
    # The tokens that follow those processed are the text itself, but for its very first token.
    return [
        following[:count] if text or not count else [first, *following[:count]]
        for text, (count, first, *following) in zip(texts, columns, strict=True)
    ]


def continuation(text: Sequence[int], start: int, length: int) -> list[int]:
    """The `length` tokens from `start` on. Past the end of the text it goes on with what it has copied, so that a loop is continued as a loop."""
    out = list(text[start : start + length])
    period = len(out)
    while period and len(out) < length:
        out.append(out[-period])
    return out


class Trie:
    """Continuations of one context, merged by common prefix; a node's weight is the sum over the continuations through it."""

    def __init__(self) -> None:
        self._tokens, self._weights = [-1], [0]
        self._children: list[dict[int, int]] = [{}]

    def add(self, path: Sequence[int], weight: int = 1) -> None:
        """Add one continuation."""
        at = 0
        for token in path:
            child = self._children[at].get(token)
            if child is None:
                child = self._children[at][token] = len(self._tokens)
                self._tokens.append(token)
                self._weights.append(0)
                self._children.append({})
            self._weights[child] += weight
            at = child

    def best(self, nodes: int) -> Draft:
        """The `nodes` heaviest nodes, a tree; among equal weights the shallower, then the one added first. Fewer if there are fewer."""
        draft: Draft = []
        heap = [(-self._weights[child], 1, child, 0) for child in self._children[0].values()]
        heapq.heapify(heap)
        while heap and len(draft) < nodes:
            _, depth, at, parent = heapq.heappop(heap)
            draft.append((self._tokens[at], parent))
            for child in self._children[at].values():
                heapq.heappush(heap, (-self._weights[child], depth + 1, child, len(draft)))
        return draft

    def heaviest_path(self) -> list[int]:
        """The heaviest child at every step; among equals the one added first."""
        path: list[int] = []
        at = 0
        while self._children[at]:
            at = max(self._children[at].values(), key=self._weights.__getitem__)
            path.append(self._tokens[at])
        return path


def pack_chains(root_B: Tensor, drafts: Sequence[Sequence[int]], depth: int) -> DraftTree:
    """Chains below the roots, at most `depth` draft nodes; as deep as the longest draft, so that a round without drafts verifies the roots alone.

    A row with a shorter draft is filled with invalid nodes.
    """
    lengths = [min(len(draft), depth) for draft in drafts]
    depth = max(lengths, default=0)
    rows = [[length, *draft[:length], *[0] * (depth - length)] for length, draft in zip(lengths, drafts, strict=True)]
    packed = torch.tensor(rows, dtype=torch.int64).to(root_B.device)
    valid_BN = torch.arange(depth + 1, device=root_B.device) <= packed[:, :1]
    return DraftTree.chain(torch.cat([root_B.unsqueeze(1), packed[:, 1:]], dim=1), valid_BN)


def pack_trees(root_B: Tensor, drafts: Sequence[Draft], nodes: int, max_depth: int) -> DraftTree:
    """Trees below the roots, at most `nodes` draft nodes; as large as the largest draft. A row with fewer nodes is filled with invalid ones."""
    nodes = min(nodes, max((len(draft) for draft in drafts), default=0))
    rows = [[(0, 0, 1), *((token, parent, 1) for token, parent in draft), *[(0, 0, 0)] * (nodes - len(draft))] for draft in drafts]
    tokens_BN, parents_BN, valid_BN = torch.tensor(rows, dtype=torch.int64).to(root_B.device).unbind(-1)
    tokens_BN = torch.cat([root_B.unsqueeze(1), tokens_BN[:, 1:]], dim=1)
    return DraftTree.from_parents(tokens_BN, parents_BN.contiguous(), max_depth, valid_BN.bool())
