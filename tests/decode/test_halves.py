"""Products in half precision on a CPU: values and gradients against float32's, and which way is taken when."""

from __future__ import annotations

import pytest
import torch
from draftsmith.decode import halves
from draftsmith.decode.halves import Linear, fast_dtype, linear
from torch.nn import functional


def test_half_precision_is_multiplied_in_float32_where_there_are_no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_has_matrix_units", lambda: False)
    assert fast_dtype(torch.bfloat16, "cpu") == torch.float32 and fast_dtype(torch.float64, "cpu") == torch.float64
    assert fast_dtype(torch.bfloat16, "cuda") == torch.bfloat16
    monkeypatch.setattr(halves, "_has_matrix_units", lambda: True)
    assert fast_dtype(torch.bfloat16, "cpu") == torch.bfloat16


@pytest.mark.parametrize("copy_bytes", [2**26, 4 * 32 * 7], ids=["whole", "seven rows at once"])
def test_values_and_gradients_are_float32s_rounded_once(copy_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_has_matrix_units", lambda: False)
    monkeypatch.setattr(halves, "COPY_BYTES", copy_bytes)
    random = torch.Generator().manual_seed(0)
    x, weight, upstream = (torch.randn(*shape, generator=random).bfloat16() for shape in ((2, 50, 32), (24, 32), (2, 50, 24)))
    x.requires_grad_()
    weight.requires_grad_()
    out = linear(x, weight)
    out.backward(upstream)  # type: ignore[no-untyped-call]
    exact_x, exact_weight = (part.detach().double().requires_grad_() for part in (x, weight))
    exact = functional.linear(exact_x, exact_weight)
    exact.backward(upstream.double())  # type: ignore[no-untyped-call]
    assert out.dtype == torch.bfloat16 and x.grad is not None and weight.grad is not None
    for got, want in ((out, exact), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert want is not None
        # One rounding to 8 bits is off by at most 2^-8; sums in float32 that cancel add a little.
        torch.testing.assert_close(got.detach().double(), want.detach(), rtol=2**-8 * 1.01, atol=1e-5)


def test_few_rows_other_dtypes_and_autocast_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_has_matrix_units", lambda: False)
    wide: list[torch.Size] = []

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide.append(x.shape)
        return functional.linear(x, weight)

    monkeypatch.setattr(halves._Wide, "apply", apply)
    layer = Linear(16, 8)
    layer(torch.randn(100, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(100, 16)).dtype == torch.bfloat16
    layer.bfloat16()
    layer(torch.randn(1, 64, 16).bfloat16())
    assert not wide
    layer(torch.randn(1, 65, 16).bfloat16())
    assert len(wide) == 1
