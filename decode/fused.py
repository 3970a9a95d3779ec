"""Llama-shaped decoder layers in fewer operations, for the target's forward passes through our own cache.

A decoding step of a small model, or of any model on a CPU, is mostly the cost of starting operations. So the projections that read the same input are
one matrix product, norms are one operation, queries and keys are rotated together, and query heads that share keys are rows of one matrix instead of
copies of the keys. The arithmetic is the family's own, up to rounding. `generate` of transformers keeps its own layers: it is the baseline.

What lies between two attentions is two functions of tensors alone, `project` and `finish`, which `Fused.compile` hands to `torch.compile`.

Dims: B batch, N tokens, M = B * N rows, L visible slots, H hidden, W head width, G query heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import UserError

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
        self.compiled = False
        self.project: Callable[..., tuple[Tensor, Tensor]] = project
        self.finish: Callable[..., Tensor] = finish
        for layer in layers:
            self._replace(layer)

    def compile(self, device: torch.device) -> None:
        """Compile what lies between the attentions, once for all layers. Raises UserError if nothing can be compiled for this device."""
        try:
            torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(3, device=device))
        except Exception as error:  # torch has no class for a missing or broken compiler, and several for what it leads to
            wanted = "a C++ compiler, such as gcc, and Python's headers" if device.type == "cpu" else "Triton, and a C compiler for its launchers"
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(f"target.compile: wanted {wanted}, got an error of torch.compile ({reason[:200]}); leave it out") from error
        self.project, self.finish, self.compiled = _compiled(project), _compiled(finish), True

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

    def tables(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(cos, sin) [M, 1, W] for `project`; all layers of a pass share them, with the signs of sin's halves set once."""
        if self._rotary is not rotary[0]:
            cos, sin = (table.flatten(0, 1).unsqueeze(1) for table in rotary)
            half = sin.shape[-1] // 2
            self._rotary, self._cos, self._sin = rotary[0], cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return self._cos, self._sin

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
        self.qkv, self.qkv_bias = joined([p.weight for p in read]), _side_by_side([p.bias for p in read])
        self.output, self.output_bias = joined([attention.o_proj.weight]), attention.o_proj.bias
        self.gate_up, self.gate_up_bias = joined([p.weight for p in gates]), _side_by_side([p.bias for p in gates])
        self.down, self.down_bias = joined([mlp.down_proj.weight]), mlp.down_proj.bias
        self.before, self.between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
        self.width, self.index, self.scale = int(attention.head_dim), int(attention.layer_idx), float(attention.scaling)
        self.heads = attention.q_proj.weight.shape[0] // self.width
        self.kv_heads = attention.k_proj.weight.shape[0] // self.width

    def __call__(self, hidden_BNH: Tensor, model: Fused, mask: Tensor, rotary: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        batch, count, size = hidden_BNH.shape
        heads, kv_heads, group = self.heads, self.kv_heads, self.heads // self.kv_heads
        hidden = hidden_BNH.reshape(-1, size)
        turned, values = (x.view(batch, count, -1, self.width).transpose(1, 2) for x in model.project(self, hidden, *model.tables(rotary)))
        query, keys = turned[:, :heads], turned[:, heads:]
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        if count <= FEW:
            rows, mask = query.reshape(batch, kv_heads, group * count, self.width), model.grouped(mask, group)
        else:
            rows, keys, values = query, keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        attended = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=self.scale)
        attended = attended.reshape(batch, heads, count, self.width).transpose(1, 2).reshape(-1, heads * self.width)
        return model.finish(self, hidden, attended).view(batch, count, size)


def project(layer: _Layer, hidden_MH: Tensor, cos_M1W: Tensor, sin_M1W: Tensor) -> tuple[Tensor, Tensor]:
    """(rotated queries, then keys [M, heads + kv_heads, W]; values [M, kv_heads, W])."""
    heads, turning = layer.heads, layer.heads + layer.kv_heads
    mixed = product(layer.before(hidden_MH), layer.qkv, layer.qkv_bias).view(hidden_MH.shape[0], -1, layer.width)
    states = mixed[:, :turning]
    if layer.norms is not None:
        states = torch.cat([layer.norms[0](mixed[:, :heads]), layer.norms[1](mixed[:, heads:turning])], dim=1)
    return torch.addcmul(states * cos_M1W, states.roll(layer.width // 2, dims=-1), sin_M1W), mixed[:, turning:]


def finish(layer: _Layer, hidden_MH: Tensor, attended_MA: Tensor) -> Tensor:
    """[M, H] the output projection, and the MLP, each with its residual."""
    hidden = hidden_MH + product(attended_MA, layer.output, layer.output_bias)
    gate, up = product(layer.between(hidden), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return hidden + product(functional.silu(gate) * up, layer.down, layer.down_bias)


def _compiled(function: Any) -> Callable[..., Any]:
    """A compiled copy. Its code object is its own, since that is what torch counts recompilations by: other targets do not use up this one's.

    A graph that cannot be made, or has to be made too often, is an error and no silent way back.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True)
    return compiled
