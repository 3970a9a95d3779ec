"""Losslessness of the verification rules: exactly, by enumeration on toy models, and statistically, with the production randomness on a model.

The enumerator must also see the known mistakes: a proof that cannot fail proves nothing.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.draw import PhiloxChance, iid_children, invert, uniform, without_replacement_children
from draftsmith.decode.sampling import Sampler, SamplingParams, gumbel_noise
from draftsmith.decode.tree import DraftTree
from draftsmith.decode.verify import RULES, Verdict, kind_of, live, lossy_typical, postorder, rule_for, verify
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .enumeration import (
    BINARY,
    BINARY_DEPTH_FIRST,
    UNEVEN,
    Edit,
    Forest,
    ToyModel,
    bias,
    enumerate_rule,
    every_forest,
    expected_accepted,
    sampled_forest,
    select,
    unedited,
)

EXACT = 1e-12  # float64 sums of some 1e5 products; measured 1e-15
SCRIPTED = [name for name, rule in RULES.items() if rule.lossless == "L1" and name != "shared_noise"]  # noise is continuous: no finite script
CHAIN = [0, 0, 1]
NARROW = [0, 0, 0, 1, 1]  # the second child is a leaf: as biased as BINARY, and a ninth of the trees
SHAPES = [BINARY, BINARY_DEPTH_FIRST, UNEVEN]
SMALL = [NARROW, [0, 0, 0, 0, 2]]
# Dense models have all tokens; sparse ones have conditionals with zeros, as after top-k, in which a draft can run out of tokens.
FORESTS = {
    "dense": (ToyModel(5), {"iid": [BINARY], "without_replacement": SHAPES, "chain": [CHAIN]}),
    "sparse": (ToyModel(7, sparse=True), {"iid": SHAPES, "without_replacement": SHAPES, "chain": [CHAIN]}),
    "dense, four tokens": (ToyModel(2, vocab=4), {"iid": [NARROW], "without_replacement": SMALL, "chain": [CHAIN]}),
    "sparse, four tokens": (ToyModel(1, vocab=4, sparse=True), {"iid": SMALL, "without_replacement": SMALL, "chain": [CHAIN]}),
}


@cache
def forest(model: str, kind: str, shape: int) -> Forest:
    toy, shapes = FORESTS[model]
    made = sampled_forest(toy, shapes[kind][shape], "iid" if kind == "chain" else kind)
    made.tree.check_integrity()
    torch.testing.assert_close(made.probability_B.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert kind_of(made.tree) == kind
    return made


# Exactness.


@pytest.mark.parametrize("model", FORESTS)
@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in SCRIPTED for k in RULES[n].kinds if k != "deterministic"])
def test_valid_pairs_have_exactly_the_target_law(name: str, kind: str, model: str) -> None:
    toy, shapes = FORESTS[model]
    for shape in range(len(shapes[kind])):
        assert bias(partial(verify, name), toy, forest(model, kind, shape)) < EXACT


@pytest.mark.parametrize("name", ["target_sampling", "one_hot"])
@pytest.mark.parametrize("sparse", [False, True])
def test_rules_for_deterministic_trees_are_exact_on_every_single_tree(name: str, sparse: bool) -> None:
    """All 729 binary trees: any choice and order of children, duplicate siblings included."""
    toy = ToyModel(1, sparse=sparse)
    every = every_forest(toy, BINARY)
    every.tree.q_BNV = None
    law_BS = enumerate_rule(partial(verify, name), toy, every).law_BS
    assert float((law_BS - toy.target_law_S).abs().sum(1).max()) / 2 < EXACT


@pytest.mark.parametrize("name", [name for name in SCRIPTED if "chain" in RULES[name].kinds])
def test_longer_chains_are_exact(name: str) -> None:
    toy = ToyModel(3, depth=4, vocab=2, scale=2)
    assert bias(partial(verify, name), toy, sampled_forest(toy, [0, 0, 1, 2, 3], "iid")) < EXACT


@pytest.mark.parametrize("name", ["token_wise", "block", "multi_round", "traversal_iid", "target_sampling"])
def test_shorter_rows_in_a_chain_batch_are_exact(name: str) -> None:
    """A row may end early, as long as that was decided before its tokens were drawn."""
    toy = ToyModel(5)
    short = sampled_forest(toy, CHAIN, "iid")
    assert short.tree.valid_BN is not None
    short.tree.valid_BN[:, 2] = False
    assert bias(partial(verify, name), toy, short) < EXACT


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in SCRIPTED for k in RULES[n].kinds if k != "deterministic"])
def test_float32_is_exact_up_to_rounding(name: str, kind: str) -> None:
    """1e-6 is some ten roundings of a float32 of size 1; the smallest known mistake is 0.01."""
    toy = ToyModel(3)
    drawn = sampled_forest(toy, CHAIN if kind == "chain" else NARROW, "iid" if kind == "chain" else kind)
    single = Forest(
        replace(drawn.tree, q_BNV=None if drawn.tree.q_BNV is None else drawn.tree.q_BNV.float()), drawn.p_BNV.float(), drawn.probability_B
    )
    assert bias(partial(verify, name), toy, single) < 1e-6


# The known mistakes.


def top_k(children: tuple[int | None, ...], q_V: Tensor) -> tuple[int | None, ...]:
    return tuple(q_V.argsort(descending=True)[: len(children)].tolist())


def sort_by_q(children: tuple[int | None, ...], q_V: Tensor) -> tuple[int | None, ...]:
    return tuple(sorted(children, key=lambda token: -1.0 if token is None else -float(q_V[token])))


def drop_unlikely(children: tuple[int | None, ...], q_V: Tensor) -> tuple[int | None, ...]:
    return tuple(None if token is None or q_V[token] < 0.3 else token for token in children)


# Name: (how the children were drawn, what was done to them, the rule, total variation). The first five are the table's.
MISTAKES: dict[str, tuple[str, Edit, str, float]] = {
    "top-k children, softmax as q": ("without_replacement", top_k, "without_replacement", 0.331),
    "siblings sorted by q": ("without_replacement", sort_by_q, "without_replacement", 0.231),
    "siblings dropped for their small q": ("without_replacement", drop_unlikely, "without_replacement", 0.212),
    "i.i.d. tree as without replacement": ("iid", unedited, "without_replacement", 0.036),
    "q not updated": ("without_replacement", unedited, "multi_round", 0.131),
    "traversal, i.i.d. tree as without replacement": ("iid", unedited, "traversal_without_replacement", 0.178),
    "traversal, q not updated": ("without_replacement", unedited, "traversal_iid", 0.097),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_enumerator_sees_each_known_mistake(mistake: str) -> None:
    kind, edit, name, expected = MISTAKES[mistake]
    toy = ToyModel(5)
    wrong = sampled_forest(toy, NARROW if kind == "iid" else BINARY, kind, edit)
    assert bias(RULES[name].run, toy, wrong) == pytest.approx(expected, abs=6e-4)
    # The same tampered trees are harmless to a rule that does not use q.
    assert bias(RULES["target_sampling"].run, toy, wrong) < EXACT


def test_an_unupdated_q_looks_faster() -> None:
    toy, drawn = ToyModel(5), forest("dense", "without_replacement", 0)
    assert expected_accepted(RULES["multi_round"].run, toy, drawn) > expected_accepted(RULES["without_replacement"].run, toy, drawn)


def test_the_enumerator_sees_lossy_acceptance() -> None:
    assert bias(lossy_typical, ToyModel(5), forest("dense", "chain", 0)) > 0.01


# Acceptance.


@pytest.mark.parametrize(
    ("better", "worse", "kind", "parents"),
    [
        ("block", "token_wise", "iid", CHAIN),
        ("traversal_iid", "multi_round", "iid", NARROW),
        ("traversal_without_replacement", "without_replacement", "without_replacement", NARROW),
    ],
)
def test_block_and_traversal_accept_at_least_as_much(better: str, worse: str, kind: str, parents: list[int]) -> None:
    gains = []
    for seed in range(8):
        toy = ToyModel(seed)
        drawn = sampled_forest(toy, parents, kind)
        gains.append(expected_accepted(RULES[better].run, toy, drawn) - expected_accepted(RULES[worse].run, toy, drawn))
    assert min(gains) > -EXACT and max(gains) > 0.01


@pytest.mark.parametrize("name", ["block", "token_wise"])
def test_acceptance_on_a_chain_of_one_is_one_minus_total_variation(name: str) -> None:
    toy = ToyModel(4, depth=1)
    accepted = expected_accepted(RULES[name].run, toy, sampled_forest(toy, [0, 0], "iid"))
    assert accepted == pytest.approx(float(torch.minimum(toy.p[0], toy.q[0]).sum()), abs=EXACT)


@pytest.mark.parametrize("name", [name for name in SCRIPTED if "chain" in RULES[name].kinds and RULES[name].kinds[0] != "deterministic"])
def test_a_perfect_drafter_is_always_accepted(name: str) -> None:
    """q = p, where residuals are 0 / 0."""
    toy = ToyModel(4, sparse=True)
    toy.q = toy.p[:2]
    drawn = sampled_forest(toy, CHAIN, "iid")
    assert expected_accepted(RULES[name].run, toy, drawn) == pytest.approx(2, abs=EXACT)
    assert bias(RULES[name].run, toy, drawn) < EXACT


# The production randomness.


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=5, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12)  # else all next-token distributions are nearly uniform
    return model


@torch.no_grad()
def conditionals(model: LlamaForCausalLM, params: SamplingParams, depth: int) -> list[Tensor]:
    """[5^d, 5] warped float32 next-token distributions after a prompt and every continuation of d = 0 .. depth tokens."""
    tables = []
    for level in range(depth + 1):
        places = [torch.arange(5**level) // 5 ** (level - 1 - place) % 5 for place in range(level)]
        ids = torch.stack([torch.full((5**level,), 1), torch.full((5**level,), 3), *places], 1)
        tables.append(Sampler([params], "cpu").warp(model(ids).logits[:, -1:]).softmax(-1).squeeze(1))
    return tables


ROWS, ROOT_POSITION = 20_000, 7
FILTERS: dict[str, dict[str, Any]] = {"top-k 3": {"top_k": 3}, "top-p 0.9": {"top_p": 0.9}, "min-p 0.05": {"min_p": 0.05}}
SETTINGS = {f"{t:g}, {name}": SamplingParams(temperature=t, **filters) for t in (0.7, 1.0) for name, filters in FILTERS.items()}
# 60 tests of this size: correct rules would fail for 6 in 10,000 choices of seeds. The seeds are fixed, so a run is not random.
FALSE_ALARM = 1e-5


def draw_tree(q: list[Tensor], kind: str, seed_B: Tensor) -> DraftTree:
    """Depth 2, with the production draws: a chain, or a binary tree in breadth-first order."""
    position_B, root_B1 = torch.full_like(seed_B, ROOT_POSITION), torch.zeros(len(seed_B), 1, dtype=torch.int64)
    branching = 1 if kind == "chain" else 2
    tokens, valid, context_BM, first = [root_B1], [root_B1 == 0], root_B1, 0
    for q_of_level in q:
        q_BMV = q_of_level[context_BM]
        if kind == "without_replacement":
            drawn_BMK, exists_BMK = without_replacement_children(q_BMV, branching, seed_B, position_B, first)
        else:
            drawn_BMK = iid_children(q_BMV, branching, seed_B, position_B, first)
            exists_BMK = torch.ones_like(drawn_BMK, dtype=torch.bool)
        first += context_BM.shape[1]
        context_BM = (context_BM.unsqueeze(-1) * 5 + drawn_BMK).flatten(1)
        tokens.append(drawn_BMK.flatten(1))
        valid.append(exists_BMK.flatten(1))
    tokens_BN = torch.cat(tokens, 1)
    parents = [0, *((node - 1) // branching for node in range(1, tokens_BN.shape[1]))]
    tree = DraftTree.from_parents(tokens_BN, torch.tensor(parents).expand_as(tokens_BN), 2, torch.cat(valid, 1))
    tree.kind, tree.is_chain = "iid" if kind == "chain" else kind, branching == 1
    return tree


def after_each_node(tables: list[Tensor], tree: DraftTree) -> Tensor:
    """[B, N, V] the conditional after each node; leaves of a table that ends above them get zeros."""
    tables = [*tables, torch.zeros(25, 5)]
    context: list[Tensor] = [torch.zeros_like(tree.tokens_BN[:, 0])]
    parents, depth = tree.parents_BN[0].tolist(), tree.depth_BN[0].tolist()
    for node in range(1, tree.num_nodes):
        context.append(context[parents[node]] * 5 + tree.tokens_BN[:, node])
    return torch.stack([tables[depth[node]][context[node]] for node in range(tree.num_nodes)], 1)


def emitted(tree: DraftTree, verdict: Verdict) -> Tensor:
    """[B, D + 1] emitted tokens; those past the accepted length are garbage."""
    tokens_BT = torch.cat([tree.tokens_BN.gather(1, verdict.path_BP)[:, 1:], verdict.next_B.unsqueeze(1)], 1)
    return tokens_BT.scatter(1, verdict.accepted_B.unsqueeze(1), verdict.next_B.unsqueeze(1))


def significance(name: str, kind: str, p: list[Tensor], q: list[Tensor], told: list[Tensor] | None = None) -> float:
    """Chi-square p-value of the first three tokens against the target's law; a round is continued with the plain sampler's p.

    `told` is what the rule takes for q (None: q itself). Bins that expect fewer than 5 are merged. Power: a total variation of 0.05 between the
    merged laws gives a noncentrality of at least 4 x ROWS x 0.05^2 = 200, which at no more than 124 degrees of freedom (threshold 204, mean 324,
    deviation 32) is missed with probability below 1e-3.
    """
    seed_B = torch.arange(ROWS)
    tree = draw_tree(q, kind, seed_B)
    p_BNV, tree.q_BNV = after_each_node(p, tree), after_each_node(told or q, tree)
    chance = PhiloxChance(seed_B, torch.full_like(seed_B, ROOT_POSITION))
    verdict = RULES[name].run(tree, p_BNV, chance)
    tokens_BT, context_B = emitted(tree, verdict), torch.zeros_like(seed_B)
    for place in range(3):
        plain_B = chance.choose(p[place][context_B], 100 + place)
        context_B = context_B * 5 + torch.where(place <= verdict.accepted_B, tokens_BT[:, place], plain_B)
    law_S = (p[0].view(-1, 1, 1) * p[1].view(5, 5, 1) * p[2].view(5, 5, 5)).flatten().double()
    counts_S, expected_S = torch.bincount(context_B, minlength=125).double(), law_S / law_S.sum() * ROWS
    if bool(counts_S[expected_S == 0].any()):
        return 0.0
    common_S = expected_S >= 5
    counts = torch.cat([counts_S[common_S], counts_S[~common_S].sum(0, keepdim=True)])
    expected = torch.cat([expected_S[common_S], expected_S[~common_S].sum(0, keepdim=True).clamp(min=1e-9)])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(common_S.sum()) - 1 + float(expected_S[~common_S].sum() > 0), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize("setting", SETTINGS)
def test_production_draws_have_the_target_law_on_a_model(setting: str) -> None:
    p, q = (conditionals(tiny_llama(seed), SETTINGS[setting], depth) for seed, depth in ((1, 2), (2, 1)))
    pairs = [(n, k) for n in SCRIPTED for k in RULES[n].kinds if k != "deterministic" and (k == "chain") <= (n in ("token_wise", "block"))]
    assert len(pairs) == 10
    for name, kind in pairs:
        assert significance(name, kind, p, q) > FALSE_ALARM, (name, kind)


def test_the_statistical_test_sees_mistakes() -> None:
    params = SETTINGS["1, min-p 0.05"]
    p, q = (conditionals(tiny_llama(seed), params, depth) for seed, depth in ((1, 2), (2, 1)))
    assert significance("multi_round", "without_replacement", p, q) < FALSE_ALARM
    # The classic trap: the draft is drawn at one temperature, and the ratio formed at another.
    told = conditionals(tiny_llama(2), replace(params, temperature=1.5), 1)
    assert significance("token_wise", "chain", p, q, told) < FALSE_ALARM
    assert significance("token_wise", "chain", p, q) > FALSE_ALARM


def random_batch(rows: int, nodes: int, vocab: int) -> tuple[DraftTree, Tensor]:
    """Random shapes, tokens, p and q; a fifth of the nodes does not exist."""
    random = torch.Generator().manual_seed(0)
    parents_BN = torch.stack([(torch.rand(rows, generator=random) * node).long() for node in range(nodes)], 1)
    parents_BN = torch.cat([parents_BN[:, :1], (parents_BN[:, 1:] + torch.arange(nodes - 1)) // 2], 1)  # mostly recent parents: deep trees
    tokens_BN = torch.randint(0, vocab, (rows, nodes), generator=random)
    valid_BN = torch.rand(rows, nodes, generator=random) > 0.2
    valid_BN[:, 0] = True
    tree = DraftTree.from_parents(tokens_BN, parents_BN, nodes - 1, valid_BN)
    p_BNV, q_BNV = (torch.randn(rows, nodes, vocab, generator=random).softmax(-1) for _ in range(2))
    tree.q_BNV = q_BNV
    return tree, p_BNV


def padded_chain(tree: DraftTree) -> DraftTree:
    """A chain with the tree's tokens and q, of random lengths."""
    assert tree.valid_BN is not None
    valid_BN = tree.valid_BN.long().cumprod(1).bool()
    return replace(DraftTree.chain(tree.tokens_BN, valid_BN), q_BNV=tree.q_BNV)


def pad(tree: DraftTree, count: int) -> DraftTree:
    """The tree with `count` invalid nodes behind it, children of the root (of the last node in a chain)."""
    assert tree.valid_BN is not None and tree.q_BNV is not None
    tokens_BN, q_BNV = (torch.cat([x, x[:, :count]], 1) for x in (tree.tokens_BN, tree.q_BNV))
    valid_BN, parents_BN = (torch.cat([x, torch.zeros_like(x[:, :count])], 1) for x in (tree.valid_BN, tree.parents_BN))
    longer = DraftTree.chain(tokens_BN, valid_BN) if tree.is_chain else DraftTree.from_parents(tokens_BN, parents_BN, tree.max_depth, valid_BN)
    return replace(longer, q_BNV=q_BNV, kind=tree.kind)


def for_rule(name: str, tree: DraftTree) -> DraftTree:
    """A tree of a kind that the rule accepts."""
    kind = RULES[name].kinds[0]
    return replace(padded_chain(tree), kind="iid") if kind == "chain" else replace(tree, kind=kind)


@pytest.mark.parametrize("name", RULES)
def test_a_row_does_not_depend_on_its_batch_or_padding(name: str) -> None:
    tree, p_BNV = random_batch(24, 9, 3)
    tree, seed_B, position_B = for_rule(name, tree), torch.arange(24) + 2**35, torch.arange(24) * 3
    together = verify(name, tree, p_BNV, PhiloxChance(seed_B, position_B))
    assert int(together.accepted_B.max()) > 1 and bool(live(tree).gather(1, together.path_BP).all())
    for row in range(24):
        pick = torch.tensor([row])
        alone = verify(name, select(tree, pick), p_BNV[pick], PhiloxChance(seed_B[pick], position_B[pick]))
        assert all(torch.equal(getattr(alone, f.name)[0], getattr(together, f.name)[row]) for f in fields(Verdict))
    longer = pad(tree, 2)
    padded = verify(name, longer, torch.cat([p_BNV, p_BNV[:, :2]], 1), PhiloxChance(seed_B, position_B))
    assert torch.equal(padded.next_B, together.next_B) and torch.equal(padded.path_BP[:, :9], together.path_BP)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.lossless != "L3"])
def test_a_one_hot_target_is_decoded_greedily(name: str) -> None:
    tree, _ = random_batch(200, 9, 3)
    tree = for_rule(name, tree)
    # A target's choice depends on the tokens so far, so duplicate siblings must agree.
    choice_BN = (tree.depth_BN + 2 * tree.tokens_BN) % 3
    p_BNV, seed_B = torch.nn.functional.one_hot(choice_BN, 3).float(), torch.arange(200)
    verdict = verify(name, tree, p_BNV, PhiloxChance(seed_B, seed_B, torch.zeros(200, dtype=torch.bool)))
    inside_BP = torch.arange(tree.max_depth + 1) <= verdict.accepted_B.unsqueeze(1)
    assert torch.equal(emitted(tree, verdict)[inside_BP], choice_BN.gather(1, verdict.path_BP)[inside_BP])
    assert int(verdict.accepted_B.max()) > 1


@pytest.mark.parametrize("name", RULES)
def test_no_rule_reads_the_device(name: str) -> None:
    """On the meta device tensors have no data: reading any back is an error."""
    tree, p_BNV = random_batch(2, 6, 5)
    tree = for_rule(name, tree)
    tensors = {f.name: getattr(tree, f.name).to("meta") for f in fields(tree) if isinstance(getattr(tree, f.name), Tensor)}
    seed_B = torch.zeros(2, dtype=torch.int64, device="meta")
    verdict = verify(name, replace(tree, **tensors), p_BNV.to("meta"), PhiloxChance(seed_B, seed_B))
    assert verdict.path_BP.shape == (2, tree.max_depth + 1) and verdict.next_B.device.type == "meta"


@pytest.mark.parametrize("name", RULES)
def test_a_lone_root_is_plain_sampling(name: str) -> None:
    seed_B, p_BNV = torch.arange(500), torch.tensor([0.5, 0.0, 0.5]).expand(500, 1, 3)
    root = replace(DraftTree.root_only(torch.zeros(500, dtype=torch.int64)), q_BNV=p_BNV, kind="iid")
    verdict = RULES[name].run(root, p_BNV, PhiloxChance(seed_B, seed_B))
    assert not verdict.accepted_B.any() and not (verdict.next_B == 1).any() and verdict.path_BP.shape == (500, 1)


def test_shared_noise_equals_the_plain_seeded_sampler() -> None:
    """Trees drafted with the same noise, whole and arbitrarily pruned: the tokens are those that the plain sampler draws one by one."""
    rows = 400
    toy, seed_B = ToyModel(2, scale=2), torch.arange(rows)
    chance = PhiloxChance(seed_B, torch.full((rows,), ROOT_POSITION))
    noise_BDV = gumbel_noise(seed_B, ROOT_POSITION + 1 + torch.arange(3).expand(rows, 3), 3)
    plain, context_B = [], torch.zeros(rows, dtype=torch.int64)
    for place in range(3):
        plain.append((toy.p[place][context_B].log() + noise_BDV[:, place]).argmax(-1))
        context_B = context_B * 3 + plain[-1]
    first_BK = (toy.q[0].log() + noise_BDV[:, 0]).topk(2).indices
    second_BMK = (toy.q[1][first_BK].log() + noise_BDV[:, 1].unsqueeze(1)).topk(2).indices
    tokens_BN = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), first_BK, second_BMK.flatten(1)], 1)
    tree = DraftTree.from_parents(tokens_BN, torch.tensor(BINARY).expand(rows, 7), 2)
    depths = [0, 1, 1, 2, 2, 2, 2]
    contexts = [torch.zeros(rows, dtype=torch.int64), tokens_BN[:, 1], tokens_BN[:, 2]]
    contexts += [tokens_BN[:, BINARY[node]] * 3 + tokens_BN[:, node] for node in range(3, 7)]
    p_BNV = torch.stack([toy.p[depths[node]][contexts[node]] for node in range(7)], 1)
    for pruned in (False, True):
        if pruned:
            tree.valid_BN = torch.rand(rows, 7, generator=torch.Generator().manual_seed(0)) > 0.3
        verdict = verify("shared_noise", tree, p_BNV, chance)
        inside_BT = torch.arange(3) <= verdict.accepted_B.unsqueeze(1)
        assert bool((emitted(tree, verdict) == torch.stack(plain, 1))[inside_BT].all())
        assert float(verdict.accepted_B.double().mean()) > (0.5 if pruned else 1.0)


def test_streams_are_functions_of_seed_position_and_counter_alone() -> None:
    seed_B, position_B = torch.tensor([3, 2**40 + 3]), torch.tensor([5, 5])
    values_BX = uniform(seed_B, position_B, 10, 6)
    assert torch.equal(values_BX[1:, 2:4], uniform(seed_B[1:], position_B[1:], 12, 2))
    assert len(set(values_BX.flatten().tolist())) == 12 and bool(((values_BX >= 0) & (values_BX < 1)).all())
    chance = PhiloxChance(seed_B, position_B)
    certain = torch.tensor([0.0, 1.0])
    assert chance.accept(certain, 0).tolist() == [False, True]
    drawn = iid_children(torch.tensor([0.0, 1.0, 0.0]).expand(2, 1, 3), 2, seed_B, position_B, 0)
    assert bool((drawn == 1).all())
    # A uniform of exactly 0, too rare to meet, must not draw a first token of zero probability.
    assert invert(torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(1, 1)).tolist() == [[1]]
    tokens, exists = without_replacement_children(torch.tensor([0.0, 0.5, 0.5]).expand(2, 1, 3), 3, seed_B, position_B, 0)
    assert exists.tolist() == [[[True, True, False]]] * 2 and not tokens[..., 2].any()


def test_postorder_of_both_numberings() -> None:
    for parents, order in ((BINARY, [6, 2, 5, 0, 1, 3, 4]), (BINARY_DEPTH_FIRST, [6, 2, 0, 1, 5, 3, 4])):
        tree = DraftTree.from_parents(torch.zeros(1, 7, dtype=torch.int64), torch.tensor([parents]), 2)
        assert postorder(tree).tolist() == [order]


# The registry.


def test_invalid_pairs_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"valid for deterministic trees \(greedy, .*\), got block; choose one of these or draft chain trees"):
        rule_for("block", "deterministic")
    with pytest.raises(UserError, match=r"wanted one of greedy, .*, got 'typical'"):
        rule_for("typical", "iid")
    for name, kind in (("multi_round", "without_replacement"), ("without_replacement", "iid"), ("traversal_iid", "deterministic")):
        with pytest.raises(UserError, match="verification rule") as caught:
            rule_for(name, kind)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="valid for pruned trees"):
        rule_for("greedy", "pruned")
    tree, p_BNV = random_batch(2, 4, 3)
    seed_B = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UserError, match="got None; use a rule that needs no q"):
        verify("multi_round", replace(tree, kind="iid", q_BNV=None), p_BNV, PhiloxChance(seed_B, seed_B))


def test_only_names_with_lossy_are_lossy() -> None:
    assert {name for name, rule in RULES.items() if rule.lossless == "L3"} == {name for name in RULES if "lossy" in name}


def test_typical_acceptance_takes_the_deepest_path_above_the_threshold() -> None:
    """Entropy 0.52 gives the threshold min(0.09, 0.3 * 0.6): p(x) = 0.1 passes, 0.05 does not."""
    p_V = torch.tensor([0.85, 0.1, 0.05])
    tree = DraftTree.from_parents(torch.tensor([[0, 2, 1, 0, 1]]), torch.tensor([[0, 0, 0, 2, 1]]), 2)
    chance = PhiloxChance(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    verdict = verify("lossy_typical", tree, p_V.expand(1, 5, 3), chance)
    assert verdict.path_BP.tolist() == [[0, 2, 3]] and verdict.accepted_B.tolist() == [2]
    # Twenty equal tokens: exp(-H) = 0.05 gives the threshold min(0.09, 0.3 * 0.05), and 0.05 passes; with epsilon alone it would not.
    flat_BNV, delta = torch.full((1, 5, 20), 0.05), partial(lossy_typical, delta=3.0)
    assert [rule(tree, flat_BNV, chance).accepted_B.tolist() for rule in (lossy_typical, delta)] == [[2], [0]]
