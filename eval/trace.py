"""What a proposer really offered: the tree of every round, and the path that the target took through it.

    rounds = trace(target, proposer, prompt, params, 64, eos_ids=stops)

Decoding is deterministic, so a text that was timed without tracing can be traced afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..decode.engine import Engine
from ..decode.proposer import Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree


@dataclass(frozen=True)
class TracedRound:
    """One row's round. tokens, parents: the tree's nodes that exist, root first. path: the accepted nodes, root first.

    emitted[i] is the token that the target chose after path[i]; cut off where the text ended.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    emitted: list[int]

    def children(self, node: int) -> list[int]:
        """Nodes below this one, in the order in which they were drafted: by rank, for drafters that choose the best."""
        return [i for i, parent in enumerate(self.parents) if i and parent == node]


@contextmanager
def recorded(proposer: Any) -> Iterator[list[DraftTree]]:
    """Every tree that the proposer proposes inside, in order."""
    trees: list[DraftTree] = []
    own = proposer.propose

    def propose(*args: Any, **kwargs: Any) -> DraftTree:
        tree: DraftTree = own(*args, **kwargs)
        trees.append(tree)
        return tree

    proposer.propose = propose
    try:
        yield trees
    finally:
        del proposer.propose  # the class's own shows again


def trace(
    target: Target,
    proposer: Proposer,
    prompt: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    rule: str = "shared_noise",
) -> tuple[list[int], list[TracedRound]]:
    """(the new tokens, its rounds) of one prompt. The first token comes from the prefill and belongs to no round."""
    engine = Engine(target, proposer, rule=rule, overlap=False)  # a captured round would not call `propose`
    with recorded(proposer) as trees:
        out = engine.generate([prompt], params, max_new_tokens, eos_ids=eos_ids)
    rounds, at = [], 1
    for tree, entry in zip(trees, out.rounds[0], strict=False):
        rounds.append(_round(tree, out.tokens[0][at : at + entry.emitted], entry.accepted))
        at += entry.emitted
    return out.tokens[0], rounds


def _round(tree: DraftTree, emitted: list[int], accepted: int) -> TracedRound:
    valid = [True] * tree.num_nodes if tree.valid_BN is None else tree.valid_BN[0].tolist()
    tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
    kept = [i for i in range(tree.num_nodes) if i == 0 or valid[i]]
    number = {old: new for new, old in enumerate(kept)}
    tokens, parents = [tokens[i] for i in kept], [number.get(parents[i], -1) for i in kept]
    paths = [[0]]  # several while siblings carry the same token
    for token in emitted[:accepted]:
        longer = [[*path, i] for path in paths for i, parent in enumerate(parents) if i and parent == path[-1] and tokens[i] == token]
        if not longer:  # not this tree's: a decoder that is broken returns what it was not offered
            break
        paths = longer
    return TracedRound(tokens, parents, paths[0], emitted)
