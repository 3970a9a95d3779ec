"""Draft-length policies: what they decide, by hand, and that none of them changes what is generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.length import Acceptance, Additive, Confidence, CostAware, DraftLength, Entropy, Latencies
from draftsmith.decode.proposer import Accepted, Extent
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.standalone import Standalone
from transformers import AutoModelForCausalLM, LlamaConfig

PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11]]
LATENCIES = Latencies(level=0.5, verify=((1, 10.0), (2, 10.5), (8, 12.0), (16, 20.0)))
POLICIES: dict[str, Callable[[], DraftLength]] = {
    "additive": lambda: Additive(2),
    "acceptance": lambda: Acceptance(LATENCIES),
    "confidence": lambda: Confidence(0.2),
    "entropy": lambda: Entropy(0.3),
}


def tiny(seed: int, scale: float = 24) -> Target:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=97, head_dim=8, max_position_embeddings=128, **sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return Target(model, None, "tiny")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_changes_a_token(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(0)
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(3)]
    plain = Engine(target).generate(PROMPTS, params, 30).tokens
    for draft in (tiny(0), tiny(1)):  # accepted always, and hardly ever
        proposer = Standalone(draft).bind(target).proposer(depth=6)
        proposer.length = POLICIES[name]()
        depths: list[int] = []
        grow = proposer.propose

        def watched(*arguments: Any, grow: Any = grow, depths: list[int] = depths) -> Any:
            tree = grow(*arguments)
            depths.append(tree.max_depth)
            return tree

        monkeypatch.setattr(proposer, "propose", watched)
        assert Engine(target, proposer).generate(PROMPTS, params, 30).tokens == plain
        assert min(depths) >= 1 and max(depths) <= 6 and len(set(depths)) > 1  # it really decided something


def test_additive_is_transformers_heuristic() -> None:
    policy = Additive(5)
    steps = []
    for drafted, accepted in ((5, [5]), (7, [3]), (6, [6, 0]), (8, [7]), (1, [0])):
        policy.observe(drafted, accepted)
        steps.append(policy.limit(20))
    assert steps == [7, 6, 8, 7, 1]
    assert policy.limit(3) == 1
    policy.reset()
    assert policy.limit(3) == 3 and policy.limit(9) == 5


def test_acceptance_chooses_the_fastest_length() -> None:
    policy = Acceptance(LATENCIES, start=0.6, memory=0.5)
    for rate in (0.1, 0.4, 0.6, 0.8, 0.95):
        policy.rate = rate
        expected = {d: (1 - rate ** (d + 1)) / (1 - rate) / LATENCIES.round(d) for d in range(1, 13)}
        assert policy.limit(12) == max(expected, key=lambda d: expected[d])
    policy.reset()
    policy.observe(3, [1, 3])  # judged: hit, miss; hit, hit, hit
    rate = 0.6
    for hit in (1, 0, 1, 1, 1):
        rate = 0.5 * rate + 0.5 * hit
    assert math.isclose(policy.rate, rate)


def test_latencies_are_linear_between_and_past_the_points() -> None:
    assert LATENCIES.round(0) == 10.0 and LATENCIES.round(1) == 11.0
    assert LATENCIES.round(4) == pytest.approx(4 * 0.5 + 10.5 + 1.5 * 3 / 6)
    assert LATENCIES.round(31) == pytest.approx(31 * 0.5 + 20 + 16.0)
    with pytest.raises(UserError, match="at least two sizes, ascending"):
        Latencies(level=1, verify=((4, 1.0), (2, 2.0)))


def test_confidence_stops_where_the_path_becomes_unlikely() -> None:
    """Against whole forward passes without a cache: the chain ends with the first token whose path probability is below the threshold."""
    draft = tiny(3)
    proposer = Standalone(draft).proposer(depth=8)
    seen = set()
    for threshold in (0.9, 0.3, 0.05, 0.001):
        proposer.length = Confidence(threshold)
        for prompt in ([5, 9, 33, 2], [71, 8, 15, 60, 4, 4], [12, 80, 6]):
            ids, root = torch.tensor([prompt]), 17
            with torch.no_grad():
                proposer.reset(1, 64)
                length_B = torch.tensor([len(prompt)])
                proposer.observe(Accepted(ids, torch.tensor([[*prompt[1:], root]]), None, torch.zeros(1, dtype=torch.int64), length_B))
                proposer.extent = Extent(len(prompt), True)
                tree = proposer.propose(torch.tensor([root]), Sampler([SamplingParams()], "cpu"), None)
                text, probability = [*prompt, root], 1.0
                for _ in range(8):
                    p = draft.model(torch.tensor([text])).logits[0, -1].softmax(-1)
                    probability *= float(p.max())
                    text.append(int(p.argmax()))
                    if probability < threshold:
                        break
            assert tree.tokens_BN[0].tolist() == text[len(prompt) :]
            seen.add(tree.max_depth)
    assert len(seen) > 2


@pytest.mark.parametrize("settings", [{"tree": "dynamic", "depth": 3, "topk": 2, "nodes": 6}, {"depth": 3, "kind": "iid"}])
def test_policies_are_refused_where_they_would_be_ignored(settings: dict[str, Any]) -> None:
    proposer = Standalone(tiny(3)).proposer(**settings)
    with pytest.raises(UserError, match="draft length: wanted a chain that is not sampled"):
        proposer.length = Additive()
    assert proposer.length is None


def test_the_size_of_a_tree_is_the_one_with_most_tokens_a_millisecond() -> None:
    policy = CostAware(LATENCIES, sizes=(2, 4, 8), memory=0.5)
    mass = [0.0, 0.8, 1.2, 1.4, 1.5, 1.55, 1.57, 1.58, 1.59, 1.6]
    by_hand = {n: (1 + mass[n]) / (2 * 0.5 + verify) for n, verify in ((1, 10.5), (3, 11.0), (7, 12.0))}
    assert policy.choose(mass, 2) == max(by_hand, key=lambda n: by_hand[n]) == 3
    assert policy.choose(mass[:3], 2) == 1  # of two candidates only one is a size that is verified
    assert policy.choose(mass[:1] + mass[1:2], 1) == 1
    free = CostAware(Latencies(level=0.0, verify=((1, 10.0), (64, 10.0))), sizes=(2, 4, 8))
    dear = CostAware(Latencies(level=0.0, verify=((1, 1.0), (64, 640.0))), sizes=(2, 4, 8))
    assert free.choose(mass, 2) == 7 and dear.choose(mass, 2) == 1
    # A level costs 0.5 of 10.5 + 2 * 0.5 ms, that is 4.3 %: worth it if its parents' children can add more than that to the tokens expected.
    assert policy.goes_on(2, 2, 0.8, 0.08) and not policy.goes_on(2, 2, 0.8, 0.07)
    policy.choose(mass, 2)  # predicts mass[3] accepted tokens; half a one is
    policy.observe([0, 1])
    assert policy.scale == pytest.approx(0.5 * 1 + 0.5 * 0.5 / 1.4)
    policy.reset()
    assert policy.scale == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_cost_changes_a_token(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, params = tiny(0, 10), [SamplingParams(temperature=temperature, seed=i) for i in range(3)]
    plain = Engine(target).generate(PROMPTS, params, 30).tokens
    sizes: dict[str, list[int]] = {"free": [], "some": [], "dear": []}
    costs = {"free": (0.0, 0.0), "some": (0.05, 0.1), "dear": (0.0, 10.0)}  # ms a level, ms a token
    for name, (level, token) in costs.items():
        proposer = Standalone(tiny(0, 10)).bind(target).proposer(tree="dynamic", depth=4, topk=3, nodes=15)
        proposer.cost = CostAware(Latencies(level=level, verify=((1, 1.0), (16, 1.0 + 15 * token))))
        grow = proposer.propose

        def watched(*arguments: Any, grow: Any = grow, seen: list[int] = sizes[name]) -> Any:
            tree = grow(*arguments)
            tree.check_integrity()
            seen.append(tree.num_nodes)
            return tree

        monkeypatch.setattr(proposer, "propose", watched)
        engine = Engine(target, proposer)
        assert not engine.overlap and engine.generate(PROMPTS, params, 30).tokens == plain
    assert set(sizes["free"]) == {16} and set(sizes["dear"]) == {2}
    assert set(sizes["some"]) <= {2, 4, 8, 16} and len(set(sizes["some"])) > 1


def test_a_free_tree_is_the_whole_one() -> None:
    target = tiny(0)
    proposer = Standalone(tiny(1, 12)).bind(target).proposer(tree="dynamic", depth=3, topk=3, nodes=15)
    want = Engine(target, proposer).generate(PROMPTS, SamplingParams(), 20)
    proposer.cost = CostAware(Latencies(level=0.0, verify=((1, 1.0), (16, 1.0))))
    out = Engine(target, proposer).generate(PROMPTS, SamplingParams(), 20)
    assert out.rounds == want.rounds


def test_bad_settings_are_refused() -> None:
    chain = Standalone(tiny(3)).proposer(depth=3)
    with pytest.raises(UserError, match="cost-aware tree: wanted a dynamic tree, got topk 1"):
        chain.cost = CostAware(LATENCIES)
    for make, says in (
        (lambda: Additive(0), "a start of at least 1, got 0"),
        (lambda: Acceptance(LATENCIES, start=1.0), "start in (0, 1)"),
        (lambda: Confidence(1.5), "a threshold in (0, 1), got 1.5"),
        (lambda: Entropy(0.3, 0.0), "a factor > 0, got 0.0"),
        (lambda: CostAware(LATENCIES, sizes=(4, 2)), "ascending sizes of at least 2"),
        (lambda: CostAware(LATENCIES, memory=1.0), "memory in [0, 1), got 1.0"),
    ):
        with pytest.raises(UserError) as error:
            make()
        assert says in str(error.value)
