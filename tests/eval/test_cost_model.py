"""The cost model against synthetic machines whose latencies are known exactly."""

from __future__ import annotations

import math

import pytest
from draftsmith import UserError
from draftsmith.eval.cost_model import Condition, CostModel, chain_tau, explain, fit, never_falling


def stairs(tokens: int) -> float:
    """A machine whose verification costs the same up to 8, 16, 32, 64 tokens."""
    return {8: 5.0, 16: 5.2, 32: 7.0, 64: 12.0}[min(edge for edge in (8, 16, 32, 64) if tokens <= edge)]


def machine_round(depth: int, nodes: int) -> float:
    return 0.6 + 0.8 * depth + 0.01 * nodes + stairs(nodes + 1)


SHAPES = [(1, 1), (2, 3), (4, 15), (5, 31), (6, 63), (3, 7)]


def fitted() -> Condition:
    sizes = [1, 8, 9, 16, 17, 32, 33, 64]  # both sides of every edge
    return fit(batch=1, context=100, t_ar=5.0, verify=[(n, stairs(n)) for n in sizes], rounds=[(d, n, machine_round(d, n)) for d, n in SHAPES])


def test_the_fit_finds_the_machine_and_predicts_unseen_sizes() -> None:
    costs = fitted()
    assert (costs.fixed, costs.level, costs.node) == pytest.approx((0.6, 0.8, 0.01), rel=1e-6)
    for depth, nodes in [(2, 2), (3, 11), (4, 20), (6, 40), (8, 8)]:
        assert costs.round(depth, nodes) == pytest.approx(machine_round(depth, nodes), rel=1e-6)


def test_noise_of_five_per_cent_leaves_predictions_within_fifteen() -> None:
    noisy = [(d, n, machine_round(d, n) * (1.05 if i % 2 else 0.95)) for i, (d, n) in enumerate(SHAPES)]
    sizes = [(n, stairs(n) * (1.05 if i % 2 else 0.95)) for i, n in enumerate([1, 4, 8, 9, 16, 17, 32, 33, 64])]
    costs = fit(batch=1, context=100, t_ar=5.0, verify=sizes, rounds=noisy)
    assert [ms for _, ms in costs.verify] == sorted(ms for _, ms in costs.verify)
    for depth, nodes in [(2, 2), (3, 11), (4, 20), (6, 40)]:
        assert abs(costs.round(depth, nodes) / machine_round(depth, nodes) - 1) < 0.15


def test_latencies_that_fall_are_pooled() -> None:
    """By hand: 3, 1 -> 2, 2; then 2, 2, 1.4 -> 1.8 thrice."""
    assert never_falling([(1, 3.0), (2, 1.0), (4, 5.0)]) == ((1, 2.0), (2, 2.0), (4, 5.0))
    assert [ms for _, ms in never_falling([(4, 1.4), (1, 3.0), (2, 1.0)])] == pytest.approx([1.8, 1.8, 1.8])


def test_a_cost_is_never_negative() -> None:
    costs = fit(batch=1, context=10, t_ar=1.0, verify=[(1, 1.0), (8, 1.0)], rounds=[(1, 1, 2.0), (4, 4, 1.9), (2, 2, 2.0)])
    assert costs.level == 0 and costs.fixed == pytest.approx(0.965, abs=0.02)


def test_the_published_example_of_a_draft_that_cannot_pay() -> None:
    """8B target, 1B draft, eager mode on an H100 (c = t_draft / t_target): break-even .832, ceiling 1.507, at 5 draft tokens."""
    c = (6 / 1.507 - 1) / 5
    costs = Condition(batch=1, context=0, t_ar=25.0, verify=((1, 25.0), (64, 25.0)), fixed=0.0, level=25.0 * c)
    assert costs.ceiling(5, 5) == pytest.approx(1.507)
    needed = costs.break_even(5)
    assert needed is not None and chain_tau([needed], 5) == pytest.approx(5 * c + 1)
    assert needed == pytest.approx(0.832, abs=0.002)


def test_break_even_and_best_length_follow_from_their_definitions() -> None:
    costs = fitted()
    for depth in (1, 3, 6):
        needed = costs.break_even(depth)
        assert needed is not None and costs.speedup(chain_tau([needed], depth), depth, depth) == pytest.approx(1)
    length, gain = costs.best_length([0.8], 12)
    by_hand = {d: (1 - 0.8 ** (d + 1)) / 0.2 * 5.0 / costs.round(d, d) for d in range(1, 13)}
    assert by_hand[length] == max(by_hand.values()) == pytest.approx(gain)
    assert costs.needed_anywhere(8) == min(a for d in range(1, 9) if (a := costs.break_even(d)) is not None)
    hopeless = Condition(batch=1, context=0, t_ar=1.0, verify=((1, 1.0), (8, 1.0)), fixed=0.0, level=1.5)
    assert hopeless.break_even(4) is None and hopeless.needed_anywhere(8) is None and hopeless.ceiling(4, 4) < 1
    assert "no chain of up to 8 tokens can pay" in " ".join(explain(hopeless, tau=2.0, depth=4, nodes=4, acceptance=[0.5]))


def test_chain_tau_uses_each_position_s_own_acceptance() -> None:
    assert chain_tau([0.5, 0.25], 4) == pytest.approx(1 + 0.5 + 0.125 + 0.03125 + 0.0078125)
    with pytest.raises(UserError, match=r"wanted acceptances in 0 \.\. 1"):
        chain_tau([1.5], 2)


def test_batches_and_contexts_between_the_measured_ones() -> None:
    def condition(batch: int, context: float) -> Condition:
        def ms(tokens: int) -> float:
            return 4 + 0.01 * context + 0.1 * batch * tokens

        return Condition(batch=batch, context=context, t_ar=ms(1), verify=tuple((n, ms(n)) for n in (1, 4, 16)), fixed=0.5, level=1.0 * batch)

    costs = CostModel(tuple(condition(b, c) for b in (1, 8) for c in (100, 500)))
    for batch, context in [(1, 100), (4, 300), (8, 500), (1, 900), (16, 100)]:
        got, want = costs.at(batch, context), condition(batch, context)
        assert (got.t_ar, got.t_verify(7), got.level) == pytest.approx((want.t_ar, 4 + 0.01 * context + 0.7 * batch, batch))
    assert CostModel.from_json(costs.to_json()) == costs
    assert costs.at(1).context == 100


def test_edges_are_where_the_next_token_costs_more() -> None:
    assert fitted().edges(63) == [15, 31, 63]  # of 8, 16, 32, 64: the step behind 8 is too small to matter
    assert math.isclose(fitted().t_verify(128), 12.0)  # past the last tread: level, as within it


@pytest.mark.parametrize("verify", [(), ((1, 1.0),), ((4, 1.0), (2, 1.0)), ((1, -1.0), (2, 1.0)), ((1, math.inf), (2, 1.0))])
def test_latencies_that_are_none_are_refused(verify: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UserError, match="cost model: wanted"):
        Condition(batch=1, context=0, t_ar=1.0, verify=verify, fixed=0.0, level=0.0)
    with pytest.raises(UserError, match="cost model: wanted a list"):
        CostModel.from_json([{"batch": 1}])
