"""Llama-shaped decoder layers in fewer operations, for the target's forward passes through our own cache.

A decoding step of a small model, or of any model on a CPU, is mostly the cost of starting operations. So the projections that read the same input are
one matrix product, norms are one operation, queries and keys are rotated together, and query heads that share keys are rows of one matrix instead of
copies of the keys. The arithmetic is the family's own, up to rounding. `generate` of transformers keeps its own layers: it is the baseline.

Dims: B batch, N tokens, L visible slots, H hidden, W head width, G query heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Families whose layer is: norm, attention with optional biases and optional norms of queries and keys, residual; norm, gated SiLU MLP, residual.
FAMILIES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
PARTS = ("gate", "up", "down")
FEW = 64  # up to so many tokens heads are grouped as rows, which repeats the mask; beyond, keys are repeated instead


class Fused:
    """The fused layers of one model. They take effect inside `with fused.active():` only."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._on = False
        self._mask: Tensor | None = None
        self._grouped: Tensor | None = None
        self._rotary: Tensor | None = None
        self._cos = self._sin = torch.empty(0)
        for layer in layers:
            self._replace(layer)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forward passes inside go through the fused layers."""
        self._on = True
        try:
            yield
        finally:
            self._on, self._mask, self._grouped, self._rotary = False, None, None, None

    def _replace(self, layer: nn.Module) -> None:
        own, fused = layer.forward, _Layer(layer)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._on or args:
                return own(hidden_states, *args, **kwargs)
            return fused(hidden_states, self, kwargs["attention_mask"], kwargs["position_embeddings"], kwargs.get("past_key_values"))

        layer.forward = forward

    def turn(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate queries and keys [B, heads, N, W]; all layers of a pass share the tables, whose halves are joined with their signs once."""
        if self._rotary is not rotary[0]:
            cos, sin = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
            half = sin.shape[-1] // 2
            self._rotary, self._cos, self._sin = rotary[0], cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return torch.addcmul(states * self._cos, states.roll(states.shape[-1] // 2, dims=-1), self._sin)

    def grouped(self, mask_B1NL: Tensor, group: int) -> Tensor:
        """[B, 1, G * N, L]: the mask of query heads laid out as rows; made once a pass, since all layers are given the same tensor."""
        if mask_B1NL.shape[2] == 1 or group == 1:
            return mask_B1NL
        if self._mask is not mask_B1NL:
            self._mask, self._grouped = mask_B1NL, mask_B1NL.repeat(1, 1, group, 1)
        assert self._grouped is not None
        return self._grouped


def fuse(layers: Sequence[nn.Module], attention: str) -> Fused | None:
    """Fuse a model's decoder layers; None if they are not all of a known family, unquantised and unadapted, with sdpa attention."""
    if attention != "sdpa" or not all(type(layer).__name__ in FAMILIES for layer in layers):
        return None
    for layer in layers:
        # Exactly plain linear layers: a quantised or adapted one computes something else than its weight says.
        parts = [layer.get_submodule(f"self_attn.{name}_proj") for name in "qkvo"] + [layer.get_submodule(f"mlp.{name}_proj") for name in PARTS]
        if any(type(part) is not nn.Linear or part.weight.is_meta for part in parts):
            return None
    return Fused(layers)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights [R_i, H] of projections that read the same input as one matrix [H, sum R_i], for `x @ it`: half the time of `linear` on a CPU.

    The weights become views of it, so that nothing is held twice.
    """
    sizes, first = [w.shape[0] for w in weights], weights[0]
    total, place, shared = sum(sizes), first.data_ptr(), True
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        shared &= same and weight.stride() == (1, total) and weight.data_ptr() == place
        place += weight.shape[0] * weight.element_size()
    if shared:  # joined before, by a model that shares its tensors with this one
        return first.detach().as_strided((first.shape[1], total), (total, 1))
    whole = torch.cat([weight.detach() for weight in weights]).t().contiguous()
    for weight, own in zip(weights, torch.split(whole, sizes, dim=1), strict=True):
        weight.data = own.t()
    return whole


def _side_by_side(biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases of joined projections as one, or None if there are none."""
    given = [bias.detach() for bias in biases if bias is not None]
    return torch.cat(given) if given else None


def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x @ matrix + bias, of rows [M, H]."""
    return x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix)


class _Norm:
    """RMSNorm as the families do it: normalised in float32, scaled in the model's dtype."""

    def __init__(self, module: Any) -> None:
        self._weight: Tensor = module.weight
        self._eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))

    def __call__(self, x: Tensor) -> Tensor:
        shape = self._weight.shape
        if x.dtype == torch.float32:
            return functional.rms_norm(x, shape, self._weight, self._eps)
        return self._weight * functional.rms_norm(x.float(), shape, eps=self._eps).to(x.dtype)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        read, gates = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        self._qkv, self._qkv_bias = joined([p.weight for p in read]), _side_by_side([p.bias for p in read])
        self._output, self._output_bias = joined([attention.o_proj.weight]), attention.o_proj.bias
        self._gate_up, self._gate_up_bias = joined([p.weight for p in gates]), _side_by_side([p.bias for p in gates])
        self._down, self._down_bias = joined([mlp.down_proj.weight]), mlp.down_proj.bias
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
        self._width, self._index, self._scale = int(attention.head_dim), int(attention.layer_idx), float(attention.scaling)
        self._heads = attention.q_proj.weight.shape[0] // self._width
        self._kv_heads = attention.k_proj.weight.shape[0] // self._width

    def __call__(self, hidden_BNH: Tensor, model: Fused, mask: Tensor, rotary: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        batch, count, size = hidden_BNH.shape
        heads, kv_heads, group = self._heads, self._kv_heads, self._heads // self._kv_heads
        hidden = hidden_BNH.reshape(-1, size)
        mixed = product(self._before(hidden), self._qkv, self._qkv_bias).view(batch, count, -1, self._width).transpose(1, 2)
        turning = mixed[:, : heads + kv_heads]
        if self._norms is not None:
            turning = torch.cat([self._norms[0](mixed[:, :heads]), self._norms[1](mixed[:, heads : heads + kv_heads])], dim=1)
        turned = model.turn(turning, rotary)
        query, keys, values = turned[:, :heads], turned[:, heads:], mixed[:, heads + kv_heads :]
        if cache is not None:
            keys, values = cache.update(keys, values, self._index)
        if count <= FEW:
            rows, mask = query.reshape(batch, kv_heads, group * count, self._width), model.grouped(mask, group)
        else:
            rows, keys, values = query, keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        attended = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=self._scale)
        attended = attended.reshape(batch, heads, count, self._width).transpose(1, 2).reshape(-1, heads * self._width)
        hidden = hidden + product(attended, self._output, self._output_bias)
        gate, up = product(self._between(hidden), self._gate_up, self._gate_up_bias).chunk(2, dim=-1)
        return (hidden + product(functional.silu(gate) * up, self._down, self._down_bias)).view(batch, count, size)
