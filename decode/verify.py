"""Verification rules: pure, batched tensor functions on a draft tree; no host synchronisation.

Every rule is `rule(tree, p_BNV, chance) -> Verdict`. p is the target's distribution after each node *after* all warping (temperature, filters,
penalties); a greedy row passes the one-hot of its argmax. q (`tree.q_BNV`) is what the children were really drawn from. Rules compute in p's
dtype. "Lossless" has classes: L1 exact target distribution at any temperature, L2 greedy-exact only, L3 lossy.

`RULES` says which rule is lossless on which kind of tree. A wrong pair is biased and often looks *faster*, so `verify` refuses it.

Dims: B batch, N nodes (root included), D the tree's max depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .. import UserError
from .tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """What a rule decided.

    path_BP: [B, D + 1] node indices of the accepted path from the root on; entries past a row's accepted length repeat its last node.
    accepted_B: accepted draft tokens (root not counted), 0 .. D.
    next_B: the token that follows the path (bonus token or correction).
    """

    path_BP: Tensor
    accepted_B: Tensor
    next_B: Tensor


class Chance(Protocol):
    """All the randomness of the rules. One object serves one round; `site` tells the calls of one method within it apart.

    Draws are independent across rows, elements, sites and methods; only `noise` is shared, with the plain sampler and the drafter.
    """

    def accept(self, probability: Tensor, site: int) -> Tensor:
        """Bernoulli draws: bool, of the shape of `probability` [B, ...]; 0 never comes true, 1 always."""

    def choose(self, p_BV: Tensor, site: int) -> Tensor:
        """[B] one token a row, drawn from p."""

    def noise(self, depths: int, vocab_size: int) -> Tensor:
        """[B, depths, V] the plain sampler's Gumbel noise for the token after a node of depth 0 .. depths - 1 (zero in greedy rows)."""


Verify = Callable[[DraftTree, Tensor, Chance], Verdict]
Kind = Literal["deterministic", "iid", "without_replacement", "chain"]


# Rules that follow the target's own choices: exact on any tree.


def walk(tree: DraftTree, choice_BN: Tensor) -> Verdict:
    """Follow the target's own choices down the tree: at each node, descend into the child that is the choice, else stop and emit it.

    With choice = argmax p this is the greedy walk (class L2 for p itself). With choice = argmax(log p + g), g the noise of the plain seeded
    sampler, it is shared-noise (Gumbel) verification (2408.07978): class L1 for any tree, however its nodes were found or pruned, and the
    output is token-identical to the plain sampler's.

    All nodes are judged at once: a node is accepted iff it and all its ancestors carry the token that the target chose at their parents.
    Among duplicate siblings the deepest path wins, and the earliest among equals; the emitted tokens are the same whichever is taken.

    choice_BN: the target's choice after each node.
    """
    leaf_B = _deepest(tree, tree.tokens_BN == choice_BN.gather(1, tree.parents_BN))
    return Verdict(path_to(tree, leaf_B), _at(tree.depth_BN, leaf_B), _at(choice_BN, leaf_B))


def greedy(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """Walk with choice = argmax p. Class L2, any tree.

    Softmax can merge two logits that differ in the last place: where token-identity at near-ties matters, `walk` on the argmax of the logits.
    """
    return walk(tree, p_BNV.argmax(-1))


def shared_noise(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """Walk with choice = argmax(log p + g), g the plain sampler's noise. Class L1, any tree, also one drafted with the same noise.

    Token-identical to a plain sampler that forms log p by the same arithmetic; one that adds g to logits wants `walk` on those scores.
    Source: 2408.07978; list form 2506.05632.
    """
    noise_BDV = chance.noise(tree.max_depth + 1, p_BNV.shape[-1])
    noise_BNV = noise_BDV.gather(1, tree.depth_BN.unsqueeze(-1).expand(p_BNV.shape))
    return walk(tree, (p_BNV.log() + noise_BNV).argmax(-1))


def target_sampling(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """At each node draw y ~ p; if y is a child, descend into it (the first of duplicates), else emit y and stop. Class L1, any tree.

    The tree may depend on anything but this rule's own draws.
    """
    live_BN, index_N, rows_B = live(tree), _index(tree), _rows(tree)
    at_B = torch.zeros_like(rows_B)
    next_B, walking_B = at_B, torch.ones_like(rows_B, dtype=torch.bool)
    for depth in range(tree.max_depth + 1):
        next_B = torch.where(walking_B, chance.choose(p_BNV[rows_B, at_B], depth), next_B)
        child_BN = live_BN & (index_N > 0) & (tree.parents_BN == at_B.unsqueeze(1)) & (tree.tokens_BN == next_B.unsqueeze(1))
        first_B = torch.where(child_BN, index_N, tree.num_nodes).amin(-1)
        walking_B = walking_B & (first_B < tree.num_nodes)
        at_B = torch.where(walking_B, first_B, at_B)
    return Verdict(path_to(tree, at_B), _at(tree.depth_BN, at_B), next_B)


# Rules that judge a node's children one after the other, from the root down.


def one_hot(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """At a node, for each child x in turn: accept with probability p(x), else p(x) := 0 and renormalise; after the last child emit y ~ p.

    The multi-round rule with q = the one-hot of the child. Class L1 for any tree, children in any order: the law of `target_sampling`.
    Source: EAGLE-2 (2406.16858).
    """
    return _descend(tree, p_BNV, chance, "deterministic")


def multi_round(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """At a node, p_1 = p; child x_i is accepted with min(1, p_i(x_i) / q(x_i)), else p_{i+1} = norm((p_i - q)+); at the end emit y ~ p_{k+1}.

    Class L1 for siblings drawn i.i.d. with replacement, only. Source: SpecInfer (2305.09781).
    """
    return _descend(tree, p_BNV, chance, "iid")


def without_replacement(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """As `multi_round`, and after each rejection q_{i+1} = norm(q_i with x_i removed).

    Class L1 for siblings drawn one after the other without replacement and judged in draw order, only. Source: Sequoia (2402.12374).
    """
    return _descend(tree, p_BNV, chance, "without_replacement")


def _descend(tree: DraftTree, p_BNV: Tensor, chance: Chance, kind: Kind) -> Verdict:
    """One pass over the nodes: parents precede children and siblings stand in draw order, so the pass meets each row's decisions in order."""
    q_BNV = None if kind == "deterministic" else _drafted(tree, p_BNV)
    live_BN = live(tree)
    at_B = torch.zeros_like(_rows(tree))
    p_BV = p_BNV[:, 0]  # what is left of the target's distribution at the row's current node
    q_BV = p_BV if q_BNV is None else q_BNV[:, 0]
    for node in range(1, tree.num_nodes):
        token_B1 = tree.tokens_BN[:, node : node + 1]
        if q_BNV is None:
            q_BV = torch.zeros_like(p_BV).scatter(1, token_B1, 1.0)
        here_B = live_BN[:, node] & (tree.parents_BN[:, node] == at_B)
        probability_B = _ratio(p_BV.gather(1, token_B1), q_BV.gather(1, token_B1)).squeeze(1).clamp(max=1)
        accepted_B = chance.accept(probability_B, node) & here_B
        accepted_B1, rejected_B1 = accepted_B.unsqueeze(1), (here_B & ~accepted_B).unsqueeze(1)
        p_BV = torch.where(accepted_B1, p_BNV[:, node], torch.where(rejected_B1, _residual(p_BV, q_BV), p_BV))
        if kind == "without_replacement":
            q_BV = torch.where(rejected_B1, _remove(q_BV, token_B1), q_BV)
        if q_BNV is not None:
            q_BV = torch.where(accepted_B1, q_BNV[:, node], q_BV)
        at_B = torch.where(accepted_B, node, at_B)
    return _emit(tree, at_B, p_BV, chance)


# Rules for sampled chains.


def token_wise(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """Accept x ~ q with probability min(1, p(x) / q(x)); at the first rejection emit y ~ norm((p - q)+), at the end of the chain y ~ p.

    Class L1 for sampled chains. P(accept) = sum_x min(p, q) = 1 - TV(p, q). Source: 2211.17192 and 2302.01318.
    """
    q_BNV, live_BN = _drafted(tree, p_BNV), live(tree)
    accepted_BD = chance.accept(_chain_ratios(tree, p_BNV, q_BNV).clamp(max=1), 0) & live_BN[:, 1:]
    at_B = accepted_BD.long().cumprod(1).sum(1)
    rows_B = _rows(tree)
    p_BV, q_BV = p_BNV[rows_B, at_B], q_BNV[rows_B, at_B]
    ended_B = at_B == live_BN.sum(1) - 1
    return _emit(tree, at_B, torch.where(ended_B.unsqueeze(1), p_BV, _residual(p_BV, q_BV)), chance)


def block(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """Block verification of a chain of g tokens: judge prefixes, and accept the longest one that passes.

    P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i)); S_i = sum_x (P_i p - q)+ after x_i; h_i = S_i / (S_i + 1 - P_i) for i < g, h_g = P_g.
    Accepted length = max{i : u_i <= h_i}, not the first failure; then y ~ p if all are accepted, else y ~ norm((P_i p - q)+).

    Class L1 for sampled chains; never accepts fewer in expectation than `token_wise`. Source: 2403.10444.
    """
    q_BNV, live_BN = _drafted(tree, p_BNV), live(tree)
    ratio_BD = _chain_ratios(tree, p_BNV, q_BNV)
    weights = [torch.ones_like(p_BNV[:, 0, 0])]
    for step in range(tree.max_depth):
        weights.append((weights[-1] * ratio_BD[:, step]).clamp(max=1))
    weight_BN = torch.stack(weights, 1)
    index_N, length_B1 = _index(tree), live_BN.sum(1, keepdim=True) - 1
    excess_BN = (weight_BN.unsqueeze(-1) * p_BNV - q_BNV).clamp(min=0).sum(-1)
    h_BN = torch.where(index_N == length_B1, weight_BN, _odds(excess_BN, weight_BN))
    passed_BD = chance.accept(h_BN[:, 1:].where(live_BN[:, 1:], 0), 0)
    passed_BN = torch.cat([torch.ones_like(live_BN[:, :1]), passed_BD], 1)
    at_B = torch.where(passed_BN, index_N, 0).amax(1)
    rows_B = _rows(tree)
    p_BV, q_BV = p_BNV[rows_B, at_B], q_BNV[rows_B, at_B]
    residual_BV = _normalise(_at(weight_BN, at_B).unsqueeze(1) * p_BV - q_BV, p_BV)
    return _emit(tree, at_B, torch.where(at_B.unsqueeze(1) == length_B1, p_BV, residual_BV), chance)


# Block verification's idea on trees.


def traversal_iid(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """Traversal verification for siblings drawn i.i.d. with replacement (class L1 for these only); see `traversal_without_replacement`."""
    return _traverse(tree, p_BNV, chance, remove=False)


def traversal_without_replacement(tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """Traversal verification, leaf to root, for siblings drawn one after the other without replacement (class L1 for these only).

    a(root) = 1; a(child x) = min(1, a(v) p_v(x) / q_v(x)). Take the first leaf in depth-first draw order: with probability a(leaf) accept its
    whole path and emit y ~ p_leaf. Else delete it, and at its parent v, with S = sum_x (a(v) p_v - q_v)+ of the old values:
    p_v := norm((a(v) p_v - q_v)+), a(v) := S / (S + 1 - a(v)), q_v := norm(q_v without x) (i.i.d.: unchanged). Repeat.

    A child's weight depends only on the ancestors' values after their earlier children were deleted, and on no outcome. So all weights are
    found in one pass, all leaves-to-be are judged at once, and the first in depth-first order that passes is the answer.

    Never accepts fewer in expectation than the top-down rule for the same tree. Source: 2505.12398.
    """
    return _traverse(tree, p_BNV, chance, remove=True)


def _traverse(tree: DraftTree, p_BNV: Tensor, chance: Chance, remove: bool) -> Verdict:
    live_BN, rows_B = live(tree), _rows(tree)
    p_BNV, q_BNV = p_BNV.clone(), _drafted(tree, p_BNV).clone()
    weight_BN = torch.zeros_like(p_BNV[:, :, 0])
    weight_BN[:, 0] = 1
    for node in range(1, tree.num_nodes):
        token_B1, live_B, parent_B = tree.tokens_BN[:, node : node + 1], live_BN[:, node], tree.parents_BN[:, node]
        p_BV, q_BV, weight_B = p_BNV[rows_B, parent_B], q_BNV[rows_B, parent_B], weight_BN[rows_B, parent_B]
        ratio_B = _ratio(p_BV.gather(1, token_B1), q_BV.gather(1, token_B1)).squeeze(1)
        weight_BN[:, node] = (weight_B * ratio_B).clamp(max=1).where(live_B, 0)
        # The parent as it will be once this child and all below it have been deleted.
        excess_BV = (weight_B.unsqueeze(1) * p_BV - q_BV).clamp(min=0)
        live_B1 = live_B.unsqueeze(1)
        p_BNV[rows_B, parent_B] = torch.where(live_B1, _normalise(excess_BV, p_BV), p_BV)
        weight_BN[rows_B, parent_B] = torch.where(live_B, _odds(excess_BV.sum(-1), weight_B), weight_B)
        if remove:
            q_BNV[rows_B, parent_B] = torch.where(live_B1, _remove(q_BV, token_B1), q_BV)
    passed_BN = torch.cat([torch.ones_like(live_BN[:, :1]), chance.accept(weight_BN[:, 1:], 0)], 1)
    at_B = torch.where(passed_BN, postorder(tree), tree.num_nodes).argmin(-1)
    return _emit(tree, at_B, p_BNV[rows_B, at_B], chance)


def postorder(tree: DraftTree) -> Tensor:
    """[B, N] each node's place in the depth-first order that visits children first, siblings by index: the root's is N - 1."""
    order_BN = _index(tree).expand_as(tree.tokens_BN)
    for depth in range(tree.max_depth, 0, -1):  # a radix sort of the paths, least significant depth first
        above_BNN = tree.ancestors_BNN & (tree.depth_BN == depth).unsqueeze(1)
        # A node that ends before this depth sorts behind those that go on: behind its own descendants.
        key_BN = torch.where(above_BNN, _index(tree), tree.num_nodes).amin(-1)
        order_BN = order_BN.gather(1, key_BN.gather(1, order_BN).argsort(dim=1, stable=True))
    return torch.empty_like(order_BN).scatter(1, order_BN, _index(tree).expand_as(order_BN))


def lossy_typical(tree: DraftTree, p_BNV: Tensor, chance: Chance, *, epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """Accept child x if p(x) > min(epsilon, delta exp(-H(p))), H the entropy; take the deepest accepted path, then y ~ p.

    Class L3: it changes the output's distribution. Any tree. Source: Medusa (2401.10774), with its published settings.
    """
    floor_BN = (delta * (-torch.special.entr(p_BNV).sum(-1)).exp()).clamp(max=epsilon)
    p_BN = p_BNV.gather(1, tree.parents_BN.unsqueeze(-1).expand(p_BNV.shape)).gather(2, tree.tokens_BN.unsqueeze(-1)).squeeze(-1)
    at_B = _deepest(tree, p_BN > floor_BN.gather(1, tree.parents_BN))
    return _emit(tree, at_B, p_BNV[_rows(tree), at_B], chance)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule, its class of losslessness, and the kinds of tree for which it has that class. `chain` is a sampled chain."""

    run: Verify
    lossless: Literal["L1", "L2", "L3"]
    kinds: tuple[Kind, ...]


ANY: tuple[Kind, ...] = ("deterministic", "iid", "without_replacement", "chain")
RULES: dict[str, Rule] = {
    "greedy": Rule(run=greedy, lossless="L2", kinds=ANY),
    "shared_noise": Rule(run=shared_noise, lossless="L1", kinds=ANY),
    "target_sampling": Rule(run=target_sampling, lossless="L1", kinds=ANY),
    "one_hot": Rule(run=one_hot, lossless="L1", kinds=ANY),
    "multi_round": Rule(run=multi_round, lossless="L1", kinds=("iid", "chain")),
    "without_replacement": Rule(run=without_replacement, lossless="L1", kinds=("without_replacement", "chain")),
    "token_wise": Rule(run=token_wise, lossless="L1", kinds=("chain",)),
    "block": Rule(run=block, lossless="L1", kinds=("chain",)),
    "traversal_iid": Rule(run=traversal_iid, lossless="L1", kinds=("iid", "chain")),
    "traversal_without_replacement": Rule(run=traversal_without_replacement, lossless="L1", kinds=("without_replacement", "chain")),
    "lossy_typical": Rule(run=lossy_typical, lossless="L3", kinds=ANY),
}


def rule_for(name: str, kind: str) -> Rule:
    """The rule of that name. Raises UserError if there is none, or if it is not valid for trees of that kind."""
    if name not in RULES:
        raise UserError(f"verification rule: wanted one of {', '.join(RULES)}, got {name!r}")
    if kind not in RULES[name].kinds:
        valid = ", ".join(n for n, rule in RULES.items() if kind in rule.kinds)
        raise UserError(
            f"verification rule: wanted one that is valid for {kind} trees ({valid or 'none'}), got {name}; "
            f"choose one of these or draft {' or '.join(RULES[name].kinds)} trees"
        )
    return RULES[name]


def kind_of(tree: DraftTree) -> str:
    """The tree's kind as `Rule.kinds` names it."""
    return "chain" if tree.is_chain and tree.kind in ("iid", "without_replacement") else tree.kind


def verify(name: str, tree: DraftTree, p_BNV: Tensor, chance: Chance) -> Verdict:
    """Run the rule of that name. Raises UserError if it is not valid for this kind of tree, or needs a q that the tree lacks."""
    return rule_for(name, kind_of(tree)).run(tree, p_BNV, chance)


def path_to(tree: DraftTree, leaf_B: Tensor) -> Tensor:
    """[B, D + 1] nodes from the root to `leaf_B`, ordered by depth; entries past the leaf repeat it."""
    batch, nodes = tree.tokens_BN.shape
    on_path_BN = tree.ancestors_BNN.gather(1, leaf_B.view(-1, 1, 1).expand(batch, 1, nodes)).squeeze(1)
    # Each node of the path goes to the column of its depth; all others to a column that is cut off.
    column_BN = torch.where(on_path_BN, tree.depth_BN, tree.max_depth + 1)
    path_BP = leaf_B.unsqueeze(1).repeat(1, tree.max_depth + 2)
    index_BN = torch.arange(nodes, device=leaf_B.device).expand(batch, nodes)
    return path_BP.scatter(1, column_BN, index_BN)[:, : tree.max_depth + 1]


def live(tree: DraftTree) -> Tensor:
    """[B, N] bool: the node and all its ancestors are valid."""
    if tree.valid_BN is None:
        return torch.ones_like(tree.tokens_BN, dtype=torch.bool)
    return ~(tree.ancestors_BNN & ~tree.valid_BN.unsqueeze(1)).any(-1)


def _deepest(tree: DraftTree, good_BN: Tensor) -> Tensor:
    """The deepest node that is good as are all its ancestors, the earliest among equals; the root always is."""
    if tree.valid_BN is not None:
        good_BN = good_BN & tree.valid_BN
    good_BN = good_BN.index_fill(1, torch.zeros(1, dtype=torch.int64, device=good_BN.device), True)
    accepted_BN = ~(tree.ancestors_BNN & ~good_BN.unsqueeze(1)).any(-1)
    # First node of the greatest depth: argmax breaks ties by the lowest index only if the values differ, so rank by (depth, -index).
    nodes = tree.num_nodes
    rank_BN = torch.where(accepted_BN, tree.depth_BN * nodes + (nodes - 1 - _index(tree)), -1)
    return rank_BN.argmax(-1)


def _emit(tree: DraftTree, at_B: Tensor, p_BV: Tensor, chance: Chance) -> Verdict:
    return Verdict(path_to(tree, at_B), _at(tree.depth_BN, at_B), chance.choose(p_BV, 0))


def _drafted(tree: DraftTree, p_BNV: Tensor) -> Tensor:
    if tree.q_BNV is None:
        raise UserError("tree.q_BNV: wanted the distribution that the children were drawn from, got None; use a rule that needs no q")
    return tree.q_BNV.to(p_BNV.dtype)


def _chain_ratios(tree: DraftTree, p_BNV: Tensor, q_BNV: Tensor) -> Tensor:
    """[B, D] p(x_i) / q(x_i); in a chain, node i has depth i."""
    token_BD1 = tree.tokens_BN[:, 1:].unsqueeze(-1)
    return _ratio(p_BNV[:, :-1].gather(2, token_BD1), q_BNV[:, :-1].gather(2, token_BD1)).squeeze(-1)


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    """p / q, finite. A token with q = 0 cannot have been drawn: 0, so that it is not accepted."""
    return torch.where(q > 0, p / q, 0).clamp(max=torch.finfo(p.dtype).max)


def _normalise(mass_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    """norm(mass+); where no mass is left, the other distribution (a branch of probability zero up to rounding)."""
    mass_BV = mass_BV.clamp(min=0)
    total_B1 = mass_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, mass_BV / total_B1, otherwise_BV)


def _residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    return _normalise(p_BV - q_BV, p_BV)


def _remove(q_BV: Tensor, token_B1: Tensor) -> Tensor:
    """norm(q without the token); all zero when that exhausts q."""
    left_BV = q_BV.scatter(1, token_B1, 0.0)
    return _normalise(left_BV, left_BV)


def _odds(excess: Tensor, weight: Tensor) -> Tensor:
    """S / (S + 1 - weight), with 0/0 = 1. The bracket keeps the quotient at most 1, and a small S from being rounded away."""
    total = excess + (1 - weight)
    return torch.where(total > 0, excess / total, 1)


def _index(tree: DraftTree) -> Tensor:
    return torch.arange(tree.num_nodes, device=tree.tokens_BN.device)


def _rows(tree: DraftTree) -> Tensor:
    return torch.arange(tree.tokens_BN.shape[0], device=tree.tokens_BN.device)


def _at(values_BN: Tensor, node_B: Tensor) -> Tensor:
    return values_BN.gather(1, node_B.unsqueeze(1)).squeeze(1)
