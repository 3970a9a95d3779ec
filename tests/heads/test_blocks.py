"""Attention of unrolled steps: the fused forms against all scores written out, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draftsmith.heads.blocks import MLP, Documents, _flex_unrolled_attention, plain_unrolled_attention, unrolled_attention, within_documents
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput

PACKED = torch.tensor([[0] * 9 + [1] * 1 + [2] * 20 + [-1] * 7, [5] * 37, [-1] * 3 + [0] * 30 + [-1] * 4])
Form = Callable[[Tensor, list[Tensor], list[Tensor]], Tensor]


def inputs(dtype: torch.dtype, steps: int, heads: int, kv_heads: int, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)

    def make(count: int) -> Tensor:  # as projections give them: heads are split off, then transposed
        flat = torch.randn(*PACKED.shape, count, width, generator=generator, dtype=torch.float64)
        return flat.to(dtype).transpose(1, 2).requires_grad_()

    return [make(heads), *(make(kv_heads) for _ in range(2 * steps))]


def evaluate(form: Form, given: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """[values, gradients of query, keys and values]; padding apart."""
    steps = len(given) // 2
    mixed = form(given[0], given[1 : steps + 1], given[steps + 1 :])
    real = (PACKED >= 0)[:, None, :, None]
    return [mixed * real, *torch.autograd.grad(mixed, given, (upstream * real).to(mixed.dtype))]


def plain(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    return plain_unrolled_attention(query, keys, values, within_documents(PACKED))


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_equals_the_plain_form_on_packed_documents(dtype: torch.dtype, kv_heads: int, steps: int) -> None:
    given = inputs(dtype, steps, 4, kv_heads)
    upstream = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    documents = Documents(PACKED)
    got = evaluate(lambda q, k, v: unrolled_attention(q, k, v, documents), given, upstream)
    want = evaluate(plain, given, upstream)
    atol, rtol = (1e-12, 1e-10) if dtype == torch.float64 else (2e-6, 1e-5)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


def test_bfloat16_is_as_near_to_double_as_the_plain_form_is() -> None:
    given = inputs(torch.bfloat16, 3, 4, 2)
    exact = [x.detach().double().requires_grad_() for x in given]
    upstream = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = evaluate(plain, exact, upstream)
    got = evaluate(lambda q, k, v: unrolled_attention(q, k, v, Documents(PACKED)), given, upstream)
    for a, b, c in zip(got, evaluate(plain, given, upstream), want, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - c).norm() <= 1.2 * (b.double() - c).norm()


def scores_in_memory(query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, AuxOutput]:
    """What FlexAttention computes, differentiable on a CPU too."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~within_documents(PACKED), -torch.inf)
    return scores.softmax(-1) @ value, AuxOutput(lse=scores.logsumexp(-1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_gpu_form_equals_the_plain_form() -> None:
    """FlexAttention itself runs on a CPU uncompiled and without gradients; what surrounds it is differentiated around a stand-in."""
    given, documents = inputs(torch.float32, 3, 4, 2, width=16), Documents(PACKED)
    fixed = [x.detach() for x in given]
    got = _flex_unrolled_attention(fixed[0], fixed[1:4], fixed[4:], documents)
    torch.testing.assert_close(got, plain(fixed[0], fixed[1:4], fixed[4:]), atol=2e-6, rtol=1e-5)
    upstream = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1))
    around = evaluate(lambda q, k, v: _flex_unrolled_attention(q, k, v, documents, scores_in_memory), given, upstream)
    for a, b in zip(around, evaluate(plain, given, upstream), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_spans_are_the_documents_and_padding_is_none() -> None:
    assert Documents(PACKED).spans == [(0, 0, 9), (0, 9, 10), (0, 10, 30), (1, 0, 37), (2, 3, 33)]
    assert Documents(torch.full((1, 4), -1)).spans == []


def test_what_padding_holds_changes_nothing() -> None:
    given, real = inputs(torch.float32, 3, 4, 2), (PACKED >= 0)[:, None, :, None]
    spoiled = [torch.where(real, x, 1e4).detach().requires_grad_() for x in given]
    upstream = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(*(evaluate(lambda q, k, v: unrolled_attention(q, k, v, Documents(PACKED)), x, upstream) for x in (given, spoiled)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a * real, b * real)
        assert bool(b.isfinite().all())


def test_the_gated_mlp_equals_the_formula_and_keeps_three_of_its_four_inner_tensors() -> None:
    torch.manual_seed(0)
    mlp, x = MLP(6, 10).double(), torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    gate, up, down = (layer.weight for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    written_out = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    upstream = torch.randn_like(written_out)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = mlp(x)
    inner = {tensor.data_ptr() for tensor in kept if tensor.shape[-1] == 10 and tensor.numel() == 150}
    assert len(inner) == 3  # gate, up, and what the last product reads
    torch.testing.assert_close(out, written_out)
    want = torch.autograd.grad(written_out, [x, gate, up, down], upstream)
    for a, b in zip(torch.autograd.grad(out, [x, gate, up, down], upstream), want, strict=True):
        torch.testing.assert_close(a, b)
