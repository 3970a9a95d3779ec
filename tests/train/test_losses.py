"""Losses: chunked forms against the plain formulas, in values and gradients; closed forms against enumeration; rows that must not count."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode import halves
from draftsmith.recipes import schema
from draftsmith.train import losses
from draftsmith.train.losses import LOSSES, acceptance, chunked_loss, chunked_soft_cross_entropy, make_loss, position_weights
from draftsmith.train.objectives.eagle3 import Eagle3Objective
from torch import Tensor

SETTINGS: dict[str, dict[str, Any]] = {"jsd": {"beta": 0.3}, "lk_lambda": {"decay": 2.0}, "mixed": {"ce": 0.4, "tv": 0.6}, "topk_mass": {"k": 3}}
STEPS, TOKENS, HIDDEN, VOCAB = 3, 21, 12, 29


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, weight, weights with some zeros, p)."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = make(STEPS, TOKENS, HIDDEN).to(dtype).requires_grad_(), make(VOCAB, HIDDEN).mul(0.7).to(dtype).requires_grad_()
    weights = torch.rand(STEPS, TOKENS, generator=generator)
    weights[:, 7:14] *= torch.rand(STEPS, 7, generator=generator) < 0.5
    weights[:, 8], weights[0, 12:18] = 0, 0  # a place that no step is judged at, and a chunk that one step is not
    return hidden, weight, weights, (2 * make(TOKENS, VOCAB)).softmax(-1)


def written_out(name: str, hidden: Tensor, weight: Tensor, weights: Tensor, probs: Tensor) -> Tensor:
    loss = make_loss(name, **SETTINGS.get(name, {}))
    return (loss.plain(hidden @ weight.t(), probs) * weights).sum()


def chunked(name: str, hidden: Tensor, weight: Tensor, weights: Tensor, probs: Tensor, chunk: int = 6) -> Tensor:
    return chunked_loss(name, hidden, weight, weights, lambda a, b: probs[a:b], chunk, **SETTINGS.get(name, {}))


def with_gradients(value: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [value.detach(), *torch.autograd.grad(3 * value, inputs)]


@pytest.mark.parametrize("name", LOSSES)
def test_chunked_equals_the_formula(name: str) -> None:
    """In double to rounding; in float32 to its rounding; in bfloat16 as near to double on the same inputs as its eight bits of logits allow."""
    tolerances = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}
    for dtype, tolerance in tolerances.items():
        hidden, weight, weights, probs = case(dtype)
        wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        want = with_gradients(written_out(name, wide[0], wide[1], weights, probs), *wide)
        got = with_gradients(chunked(name, hidden, weight, weights, probs if dtype == torch.float64 else probs.float()), hidden, weight)
        assert got[1].dtype == got[2].dtype == dtype
        for a, b in zip(got, want, strict=True):
            assert float((a.double() - b).norm()) <= tolerance * float(b.norm()), (dtype, float((a.double() - b).norm() / b.norm()))


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_weight_zero_contribute_exactly_nothing(name: str) -> None:
    hidden, weight, weights, probs = case(torch.float32)
    probs = probs.float()
    want = with_gradients(chunked(name, hidden, weight, weights, probs), hidden, weight)
    unused = weights == 0
    spoiled = torch.where(unused.unsqueeze(-1), torch.nan, hidden.detach()).requires_grad_()
    spoiled_probs = torch.where(unused.all(0).unsqueeze(-1), torch.nan, probs)
    assert unused.all(0).any() and not unused.any(0)[:7].any()
    got = with_gradients(chunked(name, spoiled, weight, weights, spoiled_probs), spoiled, weight)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert not got[1][unused].any()
    nothing = with_gradients(chunked(name, spoiled, weight, torch.zeros_like(weights), spoiled_probs), spoiled, weight)
    assert not any(x.any() for x in nothing)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [0.0, 5.0, 120.0, 1e4])
def test_one_hot_targets_and_underflow_give_the_gradient_of_double(name: str, gap: float) -> None:
    """q falls to exp(-gap) where p is; in float32 that is zero from 104 on. What has a logarithm still pulls it back."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[:, [5, 9]] -= gap  # at 9 p is zero too
    probs = torch.zeros(4, VOCAB)
    probs[:, 5] = 1.0
    probs[3, [5, 6]] = 0.5
    loss = make_loss(name, **SETTINGS.get(name, {}))
    value, gradient = loss.gradient(logits.clone(), probs)
    assert bool(value.isfinite().all() and gradient.isfinite().all())
    assert float(gradient.sum(-1).abs().max()) < 1e-4  # a shift of all logits changes nothing
    if gap <= 5 and name != "match":  # `plain` divides zero by zero there
        leaf = logits.double().requires_grad_()
        want = loss.plain(leaf, probs.double())
        torch.testing.assert_close(value, want.detach().float(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), leaf)[0].float(), atol=1e-5, rtol=1e-4)
    if name in ("ce", "kl", "lk_alpha", "match"):
        want = logits.log_softmax(-1).softmax(-1) - probs
        torch.testing.assert_close(value[:3], -logits.log_softmax(-1)[:3, 5], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient[:3], want[:3], atol=1e-6, rtol=1e-4)


def test_match_is_the_probability_of_the_same_choice_under_shared_noise() -> None:
    """Against drawing: 400,000 draws of shared Gumbel noise, five standard errors; and against both its forms where ratios are equal."""
    generator = torch.Generator().manual_seed(1)
    logits, probs = torch.randn(4, 6, generator=generator), (2 * torch.randn(4, 6, generator=generator)).softmax(-1)
    logits[1] = probs[1].log() + 3  # q = p: always the same choice
    probs[2, 1:3] = probs[2, 1:3].mean()
    logits[2, 1:3] = logits[2, 1]  # two equal ratios
    draws = 400_000
    noise = -torch.rand(draws, 6, generator=generator).log().neg().log()
    for row in range(4):
        same = ((probs[row].log() + noise).argmax(-1) == (logits[row] + noise).argmax(-1)).float().mean()
        value, _ = make_loss("match").gradient(logits[row : row + 1].clone(), probs[row : row + 1])
        assert abs(float((-value).exp()) - float(same)) <= 5 * math.sqrt(0.25 / draws)
        torch.testing.assert_close(value[0], make_loss("match").plain(logits[row], probs[row]), atol=1e-5, rtol=1e-5)
    assert float(make_loss("match").gradient(logits[1:2].clone(), probs[1:2])[0]) == pytest.approx(0, abs=1e-5)


def test_formulas_on_two_tokens() -> None:
    """p = (.75, .25), q = (.5, .5), by hand."""
    logits, probs = torch.zeros(2, dtype=torch.float64), torch.tensor([0.75, 0.25], dtype=torch.float64)
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    m = [0.3 * 0.75 + 0.7 * 0.5, 0.3 * 0.25 + 0.7 * 0.5]
    w = math.exp(-3 * 0.75)
    want = {
        "ce": math.log(2),
        "kl": kl,
        "reverse_kl": 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25),
        "jsd": 0.3 * (0.75 * math.log(0.75 / m[0]) + 0.25 * math.log(0.25 / m[1])) + 0.7 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])),
        "tv": 0.25,
        "lk_alpha": -math.log(0.75),
        "lk_lambda": w * kl + (1 - w) * 0.25,
        "mixed": 0.1 * math.log(2) + 0.9 * 0.25,
        "match": -math.log(1 / (1 + max(0.25 / 0.75, 1)) + 1 / (1 + max(3, 1))),
    }
    for name, value in want.items():
        loss = make_loss(name, **({"beta": 0.3} if name == "jsd" else {}))
        assert float(loss.plain(logits, probs)) == pytest.approx(value), name
        assert float(loss.gradient(logits[None].clone(), probs[None])[0]) == pytest.approx(value), name
    assert float(acceptance(logits, probs)) == pytest.approx(0.75)


def test_cold_top_k_mass_is_the_probability_that_none_of_the_k_best_is_the_targets_token() -> None:
    _, _, _, probs = case()
    logits = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for k in (1, 4, VOCAB):
        missed = 1 - probs.gather(1, logits.topk(k, dim=1).indices).sum(1)
        torch.testing.assert_close(make_loss("topk_mass", k=k, temperature=1e-6, ce=0.0).plain(logits, probs), missed, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_few_steps_of_descent_raise_acceptance(name: str) -> None:
    """From a start near p; a sign error in any gradient fails here."""
    _, _, _, probs = case()
    logits = probs.log() + 0.7 * torch.randn(probs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    loss, before = make_loss(name), acceptance(logits, probs).mean()
    for _ in range(60):
        logits = logits - 0.5 * loss.gradient(logits.clone(), probs)[1]
    assert float(acceptance(logits, probs).mean()) > float(before) + (0 if name == "topk_mass" else 0.02)


def test_a_large_vocabulary_in_float32() -> None:
    """To 1e-4 of double; 5e-4 for the two whose gradient is not written out, and is the difference of two sums over the vocabulary."""
    generator, vocabulary = torch.Generator().manual_seed(0), 151_936
    hidden, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((1, 3, 8), (vocabulary, 8)))
    probs, weights = (2 * torch.randn(3, vocabulary, generator=generator)).softmax(-1), torch.ones(1, 3)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    for name in set(LOSSES) - {"match"}:  # its formula takes V x V, see below
        got = with_gradients(chunked_loss(name, hidden, weight, weights, lambda a, b: probs[a:b], 2), hidden, weight)
        want = with_gradients(make_loss(name).plain(wide[0] @ wide[1].t(), probs.double()).sum(), *wide)
        for a, b in zip(got, want, strict=True):
            assert float((a.double() - b).norm()) <= (5e-4 if name in ("reverse_kl", "jsd") else 1e-4) * float(b.norm()), name
    logits = (hidden[0] @ weight.t()).detach()
    value, gradient = make_loss("match").gradient(logits.clone(), probs)
    exact = make_loss("match").gradient(logits.double(), probs.double())
    torch.testing.assert_close(value, exact[0].float(), atol=1e-4, rtol=1e-4)
    assert float((gradient.double() - exact[1]).norm()) <= 1e-3 * float(exact[1].norm())


def test_half_precision_without_matrix_units_is_copied_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, weights, probs = case(torch.bfloat16)
    monkeypatch.setattr(halves, "_has_matrix_units", lambda: False)
    whole = with_gradients(chunked("ce", hidden, weight, weights, probs), hidden, weight)
    monkeypatch.setattr(halves, "COPY_BYTES", 4 * HIDDEN * 5)
    parts = with_gradients(chunked("ce", hidden, weight, weights, probs), hidden, weight)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-2)
    monkeypatch.setattr(halves, "_has_matrix_units", lambda: True)
    native = with_gradients(chunked("ce", hidden, weight, weights, probs), hidden, weight)
    for a, b in zip(native, whole, strict=True):
        assert float((a - b).float().norm()) <= 2e-2 * float(b.float().norm())


def test_autocast_and_frozen_output_layers() -> None:
    hidden, weight, weights, probs = case(torch.float32)
    want = with_gradients(chunked("ce", hidden, weight, weights, probs), hidden, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = with_gradients(chunked("ce", hidden.bfloat16(), weight, weights, probs), hidden, weight)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and float((a - b).norm()) <= 2e-2 * float(b.norm())
    value = chunked("ce", hidden, weight.detach(), weights, probs)
    assert torch.equal(torch.autograd.grad(3 * value, hidden)[0], want[1])


def test_probs_are_asked_once_a_chunk_and_the_chunk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, weights, probs = case()
    asked: list[tuple[int, int]] = []

    def given(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return probs[start:stop]

    value = chunked_soft_cross_entropy(hidden, weight, weights, given, 8)
    assert asked == [(0, 8), (8, 16), (16, 21)]
    torch.testing.assert_close(value, chunked("ce", hidden, weight, weights, probs, 1024))
    monkeypatch.setattr(losses, "_CPU_CHUNK_BYTES", 0)
    monkeypatch.setattr(losses, "_CPU_CHUNK_TOKENS", 5)
    asked.clear()
    torch.testing.assert_close(value, chunked_soft_cross_entropy(hidden, weight, weights, given, 8))
    assert asked[0] == (0, 5) and len(asked) == 5


def test_gradients_are_handed_out_once() -> None:
    hidden, weight, weights, probs = case()
    value = chunked("ce", hidden, weight, weights, probs)
    torch.autograd.grad(value, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        torch.autograd.grad(value, hidden)


def test_names_and_settings_are_checked() -> None:
    with pytest.raises(UserError, match=r"objective.loss: wanted one of ce, kl, .*got l2"):
        make_loss("l2")
    with pytest.raises(UserError, match="loss jsd: wanted settings among beta, got k"):
        make_loss("jsd", k=3)
    with pytest.raises(UserError, match=r"loss jsd: wanted beta between 0 and 1, got 1\.0"):
        make_loss("jsd", beta=1.0)
    bad: dict[str, dict[str, Any]] = {"reverse_kl": {"floor": 0.0}, "lk_lambda": {"decay": -1.0}, "mixed": {"tv": -1.0}, "topk_mass": {"k": 0}}
    for name, settings in bad.items():
        with pytest.raises(UserError, match=f"loss {name}: wanted"):
            make_loss(name, **settings)


def test_the_recipe_knows_all_losses() -> None:
    literal, _none = get_args(get_type_hints(schema.Objective)["loss"])
    assert list(get_args(literal)) == list(LOSSES)
    assert Eagle3Objective.of({"loss": "lk_lambda"}).loss == "lk_lambda"


def test_position_weights() -> None:
    torch.testing.assert_close(position_weights(3, 0.5), torch.tensor([4.0, 2.0, 1.0]) / 7)
    torch.testing.assert_close(position_weights(8, math.exp(-1 / 4)), torch.exp(-torch.arange(8) / 4).div(torch.exp(-torch.arange(8) / 4).sum()))
