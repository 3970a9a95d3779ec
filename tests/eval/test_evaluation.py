"""The harness against drafters whose figures are known, verifiers that are broken, and flaws of published harnesses, planted one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode import engine as engine_module
from draftsmith.decode.draw import PhiloxChance
from draftsmith.decode.engine import Engine, Generation, Round
from draftsmith.decode.prompts import render_prompt
from draftsmith.decode.proposer import Proposer
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.decode.tree import DraftTree
from draftsmith.decode.verify import Verdict, path_to
from draftsmith.eval import baselines, harness
from draftsmith.eval.evaluation import run_evaluation
from draftsmith.eval.gate import audit
from draftsmith.eval.harness import evaluate
from draftsmith.eval.rows import together
from draftsmith.eval.runs import Settings
from draftsmith.eval.schema import Row
from draftsmith.heads.standalone import Standalone
from draftsmith.recipes.schema import Decode, Eval

from .tiny import Oracle, suite, tiny

QUICK: dict[str, Any] = {"bootstrap": 50, "eager": False}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny()


def itself(target: Target, **settings: Any) -> Proposer:
    """The target as its own draft."""
    return Standalone(Target(target.model, target.tokenizer, "twin")).bind(target).proposer(**settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target_is_always_right(target: Target, temperature: float) -> None:
    """Four rounds of depth + 1 tokens after the first: no round is cut off."""
    settings = Settings(temperatures=(temperature,), max_new_tokens=1 + 4 * 4, **QUICK)
    (row,) = evaluate(target, itself(target, depth=3), suite(), settings).rows
    assert row.acceptance_rate == 1 and row.tau == 4 and row.tau_ci == (4, 4)
    assert row.conditional_acceptance == [1, 1, 1] and row.accepted_length_histogram == [0, 0, 0, 16]
    assert row.passed and row.lossless.identical == 4


def test_a_drafter_that_is_right_by_a_coin_has_the_tau_of_the_formula(target: Target) -> None:
    """With acceptance 1/2 a token, (1 - a^4) / (1 - a) = 1.875 tokens a round of three.

    There are about 500 rounds with a standard deviation of 1.05 each, so that three standard errors are 0.14.
    """
    prompts, count = suite(8), 120
    plain = Engine(target)
    ids = [target.tokenizer(messages[0]["content"])["input_ids"] for messages in prompts.prompts]  # type: ignore[misc]
    texts = {tuple(prompt): plain.generate([prompt], SamplingParams(seed=i), count).tokens[0] for i, prompt in enumerate(ids)}
    oracle = Oracle(texts, 3, 0.5)
    settings = Settings(temperatures=(0.0,), max_new_tokens=count, **QUICK)
    (row,) = evaluate(target, oracle, prompts, settings).rows
    assert row.passed and row.rounds > 450
    assert abs(row.tau - 1.875) < 0.14 + 0.03  # the last round of a text is cut off: at most 2 tokens of 120
    assert all(abs(share - 0.5) < 0.12 for share in row.conditional_acceptance)
    assert row.acceptance_rate == pytest.approx((row.tau - 1) / 3, abs=0.03)


def accept_everything(tree: DraftTree, choice_BN: torch.Tensor) -> Verdict:
    """A broken rule: the first child is always taken."""
    at_B = torch.full_like(choice_BN[:, 0], tree.num_nodes - 1)
    return Verdict(path_to(tree, at_B), tree.depth_BN.gather(1, at_B.unsqueeze(1)).squeeze(1), choice_BN.gather(1, at_B.unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_verifier_fails_the_gate(target: Target, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Standalone(tiny(1)).bind(target)
    settings = Settings(temperatures=(temperature,), max_new_tokens=12, **QUICK)
    (good,) = evaluate(target, draft.proposer(depth=3), suite(), settings).rows
    monkeypatch.setattr(engine_module, "walk", accept_everything)
    (bad,) = evaluate(target, draft.proposer(depth=3), suite(), settings).rows
    assert good.passed and not bad.passed and bad.tau > max(3, good.tau)  # it looks faster


# Flaws that published harnesses have


def flawed(monkeypatch: pytest.MonkeyPatch, target: Target, spoil: Any, max_new_tokens: int = 18) -> Row:
    honest = Engine.generate

    def generate(self: Engine, *args: Any, **kwargs: Any) -> Generation:
        return spoil(self, honest(self, *args, **kwargs))  # type: ignore[no-any-return]

    monkeypatch.setattr(Engine, "generate", generate)
    settings = Settings(temperatures=(0.0,), max_new_tokens=max_new_tokens, **QUICK)
    return evaluate(target, itself(target, depth=3), suite(), settings).rows[0]


def test_tokens_past_the_end_that_are_counted_fail_the_gate(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last round is cut off at the limit; a harness that adds up what the rounds accepted counts three tokens more."""

    def spoil(engine: Engine, out: Generation) -> Generation:
        for rounds in out.rounds if engine.proposer else []:
            rounds[-1] = Round(3, 4, 3)
        return out

    row = flawed(monkeypatch, target, spoil)
    assert not row.passed and "rounds count 20 tokens, 17 were returned" in str(row.lossless.reason)


def test_tokens_past_the_end_that_are_returned_fail_the_gate(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(engine: Engine, out: Generation) -> Generation:
        for tokens, rounds in zip(out.tokens, out.rounds, strict=True) if engine.proposer else []:
            tokens += [5, 6]
            rounds[-1] = dataclasses.replace(rounds[-1], accepted=rounds[-1].accepted + 2, emitted=rounds[-1].emitted + 2)
        return out

    row = flawed(monkeypatch, target, spoil)
    assert not row.passed and "past the end" in str(row.lossless.reason)


def test_a_baseline_whose_text_was_tokenised_again_fails_the_gate(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the tokens of the cleaned text makes the baseline slower than it is."""

    def spoil(engine: Engine, out: Generation) -> Generation:
        if engine.proposer is None:
            out.tokens = [tokens[:1] + [token for token in tokens[1:] if token % 7] for tokens in out.tokens]
        return out

    row = flawed(monkeypatch, target, spoil, 40)
    assert not row.passed and "plain: rounds count 39 tokens" in str(row.lossless.reason)


def test_the_audit_knows_an_end_within_the_text() -> None:
    assert audit(Generation([[4, 5, 6]], [[Round(1, 2, 2)]]), [1], 8) is None
    assert "past the end" in str(audit(Generation([[4, 1, 6]], [[Round(1, 2, 2)]]), [1], 8))
    assert "more tokens than it accepted" in str(audit(Generation([[4, 5, 6]], [[Round(0, 2, 2)]]), [1], 8))


# Rules, batches, categories, turns


@pytest.mark.parametrize(
    ("rule", "kind", "tree"),
    [("target_sampling", None, "dynamic"), ("block", "iid", "chain"), ("without_replacement", "without_replacement", "dynamic")],
)
def test_other_rules_pass_a_test_of_their_distribution(target: Target, rule: str, kind: str | None, tree: str) -> None:
    draft = Standalone(tiny(1)).bind(target)
    options: dict[str, Any] = {} if kind is None else {"kind": kind}
    proposer = draft.proposer(tree=tree, depth=2, topk=2, nodes=4, **options)
    settings = Settings(temperatures=(0.0, 1.0), max_new_tokens=48, rule=rule, timed_prompts=1, **QUICK)
    greedy, sampled = evaluate(target, proposer, suite(6), settings).rows
    assert greedy.passed and greedy.lossless.identical == 6 and greedy.lossless.test is None
    test = sampled.lossless.test
    assert sampled.passed and test is not None and test.tokens == 6 * 47 and test.p_value > test.level == 1e-3
    assert 0 < test.detects_tv < 0.3 and sampled.rule == rule


def test_a_biased_rule_is_found_by_the_test_of_distributions(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are taken too readily: with probability sqrt(p) instead of p."""
    draft = Standalone(tiny(1)).bind(target)
    settings = Settings(temperatures=(1.0,), max_new_tokens=64, rule="one_hot", timed_prompts=1, **QUICK)
    honest = PhiloxChance.accept
    monkeypatch.setattr(PhiloxChance, "accept", lambda self, p, site: honest(self, p.sqrt(), site))
    (row,) = evaluate(target, draft.proposer(tree="dynamic", depth=2, topk=4, nodes=8), suite(6), settings).rows
    assert not row.passed and row.lossless.test is not None and row.lossless.test.p_value < 1e-3
    assert "do not follow the target's distribution" in str(row.lossless.reason)


def test_a_lossy_rule_never_passes(target: Target) -> None:
    settings = Settings(temperatures=(1.0,), max_new_tokens=32, rule="lossy_typical", **QUICK)
    (row,) = evaluate(target, itself(target, depth=2), suite(2), settings).rows
    assert not row.passed and row.lossless.lossless_class == "L3" and "lossy by design" in str(row.lossless.reason)


def test_larger_batches_have_rows_of_their_own_and_the_same_texts(target: Target) -> None:
    settings = Settings(temperatures=(1.0,), max_new_tokens=12, batches=(1, 2, 3), bootstrap=50)
    rows = evaluate(target, Standalone(tiny(1)).bind(target).proposer(depth=2), suite(6), settings).rows
    assert [(row.batch, row.observations, row.prompts) for row in rows] == [(1, 6, 6), (2, 3, 6), (3, 2, 6)]
    assert all(row.passed and row.lossless.identical == 6 for row in rows)
    assert len({(row.tau, row.acceptance_rate, row.tokens) for row in rows}) == 1  # a row does not depend on its batch
    assert all(row.tokens_per_second.eager for row in rows)
    assert all(row.memory is not None and row.memory.speculation > 0 for row in rows)
    with pytest.raises(UserError, match=r"eval\.batch: wanted at most 6"):
        evaluate(target, itself(target, depth=2), suite(6), dataclasses.replace(settings, batches=(8,)))


def test_categories_have_rows_that_add_up(target: Target) -> None:
    settings = Settings(temperatures=(0.0,), max_new_tokens=12, timed_prompts=3, **QUICK)
    prompts = suite(5, categories=["a", "b", "a", "b", "c"])
    whole, *parts = evaluate(target, itself(target, depth=2), prompts, settings).rows
    assert [(row.category, row.prompts) for row in parts] == [("a", 2), ("b", 2)]  # c has no timed prompt
    assert whole.category == "all" and whole.prompts == 5 and whole.tokens == sum(row.tokens for row in parts) + 11
    assert whole.lossless.checked == 5 and [row.lossless.checked for row in parts] == [2, 2]


def rendered_by(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations that the harness renders from now on, in order."""
    seen: list[list[dict[str, str]]] = []

    def render(tokenizer: Any, messages: Any) -> list[int]:
        seen.append([dict(m) for m in messages])
        return render_prompt(tokenizer, messages)

    monkeypatch.setattr(harness, "render_prompt", render)
    return seen


def test_each_turn_s_answer_is_generated_and_becomes_history(monkeypatch: pytest.MonkeyPatch) -> None:
    chatting = tiny(chat=True)
    seen = rendered_by(monkeypatch)
    prompts = suite(2, later=[("and then?", "so?"), ()])
    settings = Settings(temperatures=(0.0,), max_new_tokens=8, **QUICK)
    (row,) = evaluate(chatting, itself(chatting, depth=2), prompts, settings).rows
    assert row.prompts == 4 and row.passed  # three turns, and one
    history = seen[3]
    assert [m["role"] for m in history] == ["user", "assistant", "user", "assistant", "user"]
    first = render_prompt(chatting.tokenizer, prompts.prompts[0])
    answer = Engine(chatting).generate([first], SamplingParams(), 8).tokens[0]
    assert history[1]["content"] == chatting.tokenizer.decode(answer)  # type: ignore[union-attr]
    assert [m["content"] for m in history[2::2]] == ["and then?", "so?"]


def test_turns_of_one_conversation_are_drawn_together_and_sampled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the history of a later turn is the very answer that is measured, and both turns are one observation."""
    chatting = tiny(chat=True)
    rendered = rendered_by(monkeypatch)
    prompts = suite(3, later=[(), ("and then?",), ("so?",)])
    bench = harness._Bench(chatting, itself(chatting, depth=2), prompts, Settings(max_new_tokens=8, **QUICK), {}, None, 0.0)
    sampling = harness.samplings(chatting, Settings(temperatures=(1.0,)))[0]
    items = bench.items(sampling)
    assert [(item.conversation, item.turn) for item in items] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    (row,) = evaluate(chatting, itself(chatting, depth=2), prompts, Settings(temperatures=(1.0,), max_new_tokens=8, **QUICK)).rows
    assert (row.prompts, row.observations) == (5, 3)
    first = Engine(chatting).generate([items[1].ids], SamplingParams(temperature=1.0, seed=1), 8).tokens[0]
    assert rendered[3][1]["content"] == chatting.tokenizer.decode(first)  # type: ignore[union-attr]
    assert together([7, 4, 7], [1, 2, 3], [10, 20, 30]) == [[4, 2], [40, 20]]


# Baselines


def test_settings_of_the_model_are_neutralised_or_used_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition penalty that only `generate` applied would make the two systems say different things."""
    strange = tiny(2)
    prompts = [[5, 9, 33, 2, 71, 8]]
    want = Engine(strange).generate(prompts, SamplingParams(), 12).tokens[0]
    config = strange.model.generation_config
    config.do_sample, config.temperature, config.top_k, config.top_p, config.repetition_penalty = True, 0.7, 5, 0.9, 1.3
    got: list[Any] = []
    honest = strange.model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        got.append(honest(*args, **kwargs))
        return got[-1]

    monkeypatch.setattr(strange.model, "generate", generate)
    assert baselines.eager(strange, prompts, SamplingParams(), 12, []).tokens == 11
    assert got[0][0, 6:].tolist() == want
    default = baselines.model_default(strange)
    assert default == SamplingParams(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.3)
    settings = Settings(temperatures=(0.0,), max_new_tokens=10, default_sampling=True, **QUICK)
    rows = evaluate(strange, itself(strange, depth=2), suite(2), settings).rows
    assert [row.temperature for row in rows] == [0, 0.7] and rows[1].defaults and rows[1].passed
    assert rows[1].sampling == {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3, "model_default": True}
    config.typical_p = 0.5
    with pytest.raises(UserError, match=r"typical_p=0\.5"):
        baselines.model_default(strange)
    assert baselines.model_default(tiny()) is None


def test_rows_padded_in_a_batch_count_their_own_tokens_only() -> None:
    ending = tiny(3, end=True)
    prompts = [[5, 9, 33, 2, 71, 8], [7, 7], [12, 44, 9]]
    alone = [Engine(ending).generate([prompt], SamplingParams(), 40, eos_ids=[1]).tokens[0] for prompt in prompts]
    timed = baselines.eager(ending, prompts, SamplingParams(), 40, [1])
    assert timed.tokens == sum(len(tokens) - 1 for tokens in alone)


def test_assisted_generation_is_timed_for_draft_models(target: Target) -> None:
    part = Eval(temperatures=[0.0], num_prompts=3, max_new_tokens=12, eager=False, bootstrap=50, threads=1, batch=[1, 2])
    draft = Standalone(tiny(1)).bind(target)
    report = run_evaluation(target, draft, {}, Decode(depth=3), part, suite=suite(3))
    row, larger = report.results
    assert row.tokens_per_second.assisted and row.speedup.assisted_ci is not None and larger.tokens_per_second.assisted is None
    (floor,) = report.others
    assert floor.drafter == "prompt_lookup" and floor.results[0].passed
    assert report.costs is not None and [c["batch"] for c in report.costs.conditions] == [1, 2]
    tested = [p for p in report.costs.predictions if not p.fitted]
    assert [(p.batch, p.depth, p.nodes) for p in tested] == [(1, 3, 3), (2, 3, 3)]
    assert row.limits is not None and row.limits.ceiling == pytest.approx(row.limits.predicted * 4 / row.tau)
    assert "even a perfect draft of this size" in " ".join(report.costs.words)


def test_wrong_rules_are_refused_before_anything_is_measured(target: Target) -> None:
    lookup = Standalone(tiny(1)).bind(target)
    for part, says in (
        (Eval(rule="no_such"), "verification rule: wanted one of"),
        (Eval(rule="greedy"), r"eval\.temperatures: wanted \[0\] with the rule greedy"),
    ):
        with pytest.raises(UserError, match=says):
            run_evaluation(target, lookup, {}, Decode(depth=2), part, suite=suite(2))
