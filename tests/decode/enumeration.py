"""An exact enumerator of speculative decoding on toy models: every drawn tree, and every outcome of a rule's own draws, in float64.

It runs the real tensor code: `ScriptedChance` stands in for the random generator, each row follows another script of outcomes, and the row's
weight is the probability of that script. Sums over rows are then exact laws.

Dims: B rows, N nodes, D depth, V vocabulary, S sequences of D + 1 tokens (V ** (D + 1), flattened).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from draftsmith.decode.tree import DraftTree
from draftsmith.decode.verify import Verify
from torch import Tensor

Edit = Callable[[tuple[int | None, ...], Tensor], tuple[int | None, ...]]  # (children in draw order, q) -> children; None: no such child
# Node numbering does not matter as long as parents precede children and siblings stand in draw order: breadth first, and depth first.
BINARY = [0, 0, 0, 1, 1, 2, 2]
BINARY_DEPTH_FIRST = [0, 0, 1, 1, 0, 4, 4]
UNEVEN = [0, 0, 0, 0, 1, 2, 2]  # three children, of which the last is a leaf


class ToyModel:
    """p[d] and q[d]: [V^d, V] conditionals after d tokens, the context a base-V number. q has one level fewer: leaves have no children."""

    def __init__(self, seed: int, *, depth: int = 2, vocab: int = 3, scale: float = 1.0, sparse: bool = False) -> None:
        self.depth, self.vocab = depth, vocab
        random = torch.Generator().manual_seed(seed)

        def conditionals(level: int) -> Tensor:
            logits = scale * torch.randn(vocab**level, vocab, generator=random, dtype=torch.float64)
            # Sparse: as after top-k; every context loses one token, half of them two.
            drop = torch.rand(logits.shape, generator=random).argsort(-1) < torch.randint(1, vocab, (vocab**level, 1), generator=random)
            return logits.masked_fill(drop & torch.tensor(sparse), -torch.inf).softmax(-1)

        self.p = [conditionals(level) for level in range(depth + 1)]
        self.q = [conditionals(level) for level in range(depth)]

    @property
    def target_law_S(self) -> Tensor:
        """The target's own law of D + 1 tokens."""
        law = torch.ones(1, dtype=torch.float64)
        for p in self.p:
            law = (law.unsqueeze(1) * p).flatten()
        return law


@dataclass
class Forest:
    """All trees that a draft can yield, as the rows of one batch, with p after each node and each tree's probability."""

    tree: DraftTree
    p_BNV: Tensor
    probability_B: Tensor


class ScriptedChance:
    """Outcomes are the digits of each row's script number, in call order; weight_B is the probability of the row's outcomes so far."""

    def __init__(self, script_B: Tensor) -> None:
        self.script_B, self.scripts = script_B, 1  # scripts: how many differ so far
        self.weight_B = torch.ones(script_B.shape, dtype=torch.float64)
        self.sites: set[tuple[str, int]] = set()

    def _digit(self, base: int) -> Tensor:
        digit_B = self.script_B // self.scripts % base
        self.scripts *= base
        return digit_B

    def _visit(self, method: str, site: int) -> None:
        assert (method, site) not in self.sites, "two draws at one site would not be independent"
        self.sites.add((method, site))

    def accept(self, probability: Tensor, site: int) -> Tensor:
        self._visit("accept", site)
        assert bool(((probability >= 0) & (probability <= 1)).all())
        outcomes = []
        for probability_B in probability.reshape(len(probability), -1).unbind(1):
            outcomes.append(self._digit(2) == 1)
            self.weight_B = self.weight_B * torch.where(outcomes[-1], probability_B, 1 - probability_B)
        return torch.stack(outcomes, 1).view(probability.shape)

    def choose(self, p_BV: Tensor, site: int) -> Tensor:
        self._visit("choose", site)
        token_B = self._digit(p_BV.shape[1])
        self.weight_B = self.weight_B * p_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
        return token_B

    def noise(self, depths: int, vocab_size: int) -> Tensor:
        raise NotImplementedError("continuous noise has no finite script")


def draws(q_V: Tensor, count: int, kind: str) -> Iterator[tuple[tuple[int | None, ...], float]]:
    """Every outcome of drawing `count` children from q, in draw order, with its probability. An exhausted q yields None."""
    for children in product([*range(len(q_V)), None], repeat=count):
        probability, left_V = 1.0, q_V.clone()
        for token in children:
            total = float(left_V.sum())
            if token is None:
                probability *= float(total == 0)
                continue
            probability *= float(left_V[token]) / total if total > 0 else 0.0
            if kind == "without_replacement":
                left_V[token] = 0
        if probability > 0:
            yield children, probability


def unedited(children: tuple[int | None, ...], q_V: Tensor) -> tuple[int | None, ...]:
    """The honest draft."""
    return children


def sampled_forest(toy: ToyModel, parents: list[int], kind: str, edit: Edit = unedited) -> Forest:
    """Every tree of this shape drawn from q; `edit` tampers with each node's children before their own children are drawn."""
    children_of = [[n for n in range(1, len(parents)) if parents[n] == node] for node in range(len(parents))]
    partial: list[tuple[list[int | None], list[int], float]] = [([0] + [None] * (len(parents) - 1), [0] * len(parents), 1.0)]
    depth = [0] * len(parents)
    for node, children in enumerate(children_of):
        depth[node] = depth[parents[node]] + (node > 0)
        if not children:
            continue
        grown = []
        for tokens, contexts, probability in partial:
            if tokens[node] is None:
                grown.append((tokens, contexts, probability))
                continue
            q_V = toy.q[depth[node]][contexts[node]]
            for drawn, chance in draws(q_V, len(children), kind):
                new_tokens, new_contexts = list(tokens), list(contexts)
                for child, token in zip(children, edit(drawn, q_V), strict=True):
                    new_tokens[child] = token
                    new_contexts[child] = contexts[node] * toy.vocab + (token or 0)
                grown.append((new_tokens, new_contexts, probability * chance))
        partial = grown
    return _forest(toy, parents, kind, [tokens for tokens, _, _ in partial], [probability for _, _, probability in partial])


def every_forest(toy: ToyModel, parents: list[int]) -> Forest:
    """Every assignment of tokens to this shape, duplicates among siblings included, each of probability 1: one deterministic tree a row."""
    rows: list[list[int | None]] = [[0, *tokens] for tokens in product(range(toy.vocab), repeat=len(parents) - 1)]
    return _forest(toy, parents, "deterministic", rows, [1.0] * len(rows))


def _forest(toy: ToyModel, parents: list[int], kind: str, rows: list[list[int | None]], probabilities: list[float]) -> Forest:
    tokens_BN = torch.tensor([[token or 0 for token in row] for row in rows])
    valid_BN = torch.tensor([[token is not None for token in row] for row in rows])
    parents_BN = torch.tensor(parents).expand(len(rows), -1)
    tree = DraftTree.from_parents(tokens_BN, parents_BN, toy.depth, valid_BN)
    context, p, q = [torch.zeros(len(rows), dtype=torch.int64)], [], []
    for node, parent in enumerate(parents):
        if node:
            context.append(context[parent] * toy.vocab + tokens_BN[:, node])
        depth = int(tree.depth_BN[0, node])
        p.append(toy.p[depth][context[node]])
        # A leaf of full depth has no q: NaN, so that a rule that reads it shows.
        q.append(toy.q[depth][context[node]] if depth < toy.depth else torch.full_like(p[-1], torch.nan))
    tree.q_BNV, tree.kind, tree.is_chain = torch.stack(q, 1), kind, parents == [0, *range(len(parents) - 1)]
    return Forest(tree, torch.stack(p, 1), torch.tensor(probabilities, dtype=torch.float64))


def select(tree: DraftTree, rows: Tensor) -> DraftTree:
    """The tree's batch rows by index."""
    return replace(
        tree,
        tokens_BN=tree.tokens_BN[rows],
        parents_BN=tree.parents_BN[rows],
        depth_BN=tree.depth_BN[rows],
        ancestors_BNN=tree.ancestors_BNN[rows],
        valid_BN=None if tree.valid_BN is None else tree.valid_BN[rows],
        q_BNV=None if tree.q_BNV is None else tree.q_BNV[rows],
    )


@dataclass
class Outcome:
    """law_BS: for each tree, the law of the first D + 1 tokens: emitted by the rule, then continued with the target's p. accepted_B: expected."""

    law_BS: Tensor
    accepted_B: Tensor


def enumerate_rule(rule: Verify, toy: ToyModel, forest: Forest) -> Outcome:
    """Run the rule on every tree with every script of outcomes."""
    batch = len(forest.probability_B)
    probe = ScriptedChance(torch.zeros(1, dtype=torch.int64))
    rule(select(forest.tree, torch.tensor([0])), forest.p_BNV[:1], probe)
    of_tree = torch.arange(batch).repeat_interleave(probe.scripts)
    chance = ScriptedChance(torch.arange(probe.scripts).repeat(batch))
    tree = select(forest.tree, of_tree)
    verdict = rule(tree, forest.p_BNV[of_tree], chance)
    assert chance.scripts == probe.scripts and bool(chance.weight_B.isfinite().all())

    possible = chance.weight_B > 0
    emitted_BT = torch.cat([tree.tokens_BN.gather(1, verdict.path_BP)[:, 1:], verdict.next_B.unsqueeze(1)], 1)
    emitted_BT = emitted_BT.scatter(1, verdict.accepted_B.unsqueeze(1), verdict.next_B.unsqueeze(1))[possible]
    of_tree, weight_B, accepted_B = of_tree[possible], chance.weight_B[possible], verdict.accepted_B[possible]
    law_BS = weight_B.unsqueeze(1)
    for place in range(toy.depth + 1):
        given_BV = torch.nn.functional.one_hot(emitted_BT[:, place], toy.vocab).double()
        next_BSV = torch.where((place <= accepted_B).view(-1, 1, 1), given_BV.unsqueeze(1), toy.p[place])
        law_BS = (law_BS.unsqueeze(2) * next_BSV).flatten(1)
    return Outcome(
        torch.zeros(batch, law_BS.shape[1], dtype=torch.float64).index_add(0, of_tree, law_BS),
        torch.zeros(batch, dtype=torch.float64).index_add(0, of_tree, weight_B * accepted_B),
    )


def total_variation(outcome: Outcome, toy: ToyModel, forest: Forest) -> float:
    """Between the law of the first D + 1 tokens, over all trees, and the target's."""
    law_S = forest.probability_B @ outcome.law_BS
    return float((law_S - toy.target_law_S).abs().sum()) / 2


def bias(rule: Verify, toy: ToyModel, forest: Forest) -> float:
    """Total variation of rule on forest."""
    return total_variation(enumerate_rule(rule, toy, forest), toy, forest)


def expected_accepted(rule: Verify, toy: ToyModel, forest: Forest) -> float:
    """Expected accepted draft tokens a round."""
    return float(forest.probability_B @ enumerate_rule(rule, toy, forest).accepted_B)
