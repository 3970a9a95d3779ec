"""Matrix products in half precision on a CPU, which are fast with matrix units (AMX) only.

Without AMX, bfloat16 dot products (AVX512-BF16) do at best what float32 does, and measured half of it (72 against 130 GFLOP/s on a Xeon of the 4th
generation); without these either, they are emulated, five times slower. So many rows are multiplied in float32, which is more exact besides. Few
rows, as in decoding, are bound by reading the weights, and stay as they are.

Dims: M rows, H hidden, V outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

COPY_BYTES = 2**26  # of weights in float32 at once
FEW = 64  # rows up to which reading the weights decides


@functools.cache
def _has_matrix_units() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


def fast_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype to multiply many rows in: float32 for half precision on a CPU without matrix units."""
    half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and device == "cpu" and not _has_matrix_units() else dtype


def row_parts(weight_VH: Tensor) -> list[Tensor]:
    """The weight's rows, so many at once that their copy in float32 is small."""
    return list(torch.split(weight_VH, max(1, COPY_BYTES // (4 * weight_VH.shape[1]))))


def linear(x: Tensor, weight_VH: Tensor) -> Tensor:
    """`functional.linear(x, weight)`, differentiable, with products in the fast dtype where there are many rows; memory for small copies only."""
    if x.numel() <= FEW * x.shape[-1] or x.dtype != weight_VH.dtype or fast_dtype(x.dtype, x.device.type) == x.dtype:
        return functional.linear(x, weight_VH)
    out: Tensor = _Wide.apply(x, weight_VH)  # type: ignore[no-untyped-call]
    return out


class Linear(nn.Linear):
    """Without a bias; its products are `linear`'s."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        if torch.is_autocast_enabled(input.device.type):
            return functional.linear(input, self.weight)
        return linear(input, self.weight)


def _wide_parts(weight_VH: Tensor, *along_V: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """(rows of the weight in float32, what of each [M, V] belongs to them)."""
    parts = row_parts(weight_VH)
    sizes = [len(part) for part in parts]
    yield from zip((part.float() for part in parts), *(torch.split(x, sizes, dim=1) for x in along_V), strict=True)


class _Wide(torch.autograd.Function):
    """x @ weight.t() in float32, rounded once at the end; so are the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_VH: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        ctx.save_for_backward(x, weight_VH)
        rows_MH, out_MV = x.flatten(0, -2).float(), x.new_empty(x[..., 0].numel(), weight_VH.shape[0])
        for part_RH, out_MR in _wide_parts(weight_VH, out_MV):
            out_MR.copy_(rows_MH @ part_RH.t())
        return out_MV.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """By x, and by the weight."""
        x, weight_VH = ctx.saved_tensors
        grad_MV, by_x, by_weight = grads[0].flatten(0, -2).float(), None, None
        if ctx.needs_input_grad[0]:
            total_MH = torch.zeros(len(grad_MV), x.shape[-1])
            for part_RH, grad_MR in _wide_parts(weight_VH, grad_MV):
                total_MH.addmm_(grad_MR, part_RH)
            by_x = total_MH.view_as(x).to(x.dtype)
        if ctx.needs_input_grad[1]:
            by_weight = (grad_MV.t() @ x.flatten(0, -2).float()).to(weight_VH.dtype)
        return by_x, by_weight
