"""Layers that heads are built of, in Llama's arithmetic and names, since serving engines load them under these.

Dims: B batch, M positions, H hidden.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.utils._triton import has_triton

from ..decode.halves import Linear, fast_dtype
from .head import LayerConfig

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * functional.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections of a rotary attention without biases. inputs: the width of what it reads (None: the hidden size; EAGLE-3 reads twice that)."""

    def __init__(self, config: LayerConfig, inputs: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.num_heads, config.num_kv_heads, config.head_dim
        inputs = inputs or config.hidden_size
        self.q_proj = Linear(inputs, self.heads * self.width)
        self.k_proj = Linear(inputs, self.kv_heads * self.width)
        self.v_proj = Linear(inputs, self.kv_heads * self.width)
        self.o_proj = Linear(self.heads * self.width, config.hidden_size)
        inverse = config.rope_theta ** (-torch.arange(0, self.width, 2, dtype=torch.float32) / self.width)
        self.register_buffer("inverse_frequency", inverse, persistent=False)
        self.inverse_frequency: Tensor

    def project(self, x_BMW: Tensor, position_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, M, width], rotated keys and values [B, kv_heads, M, width]."""
        cos, sin = (table.to(x_BMW.dtype).unsqueeze(1) for table in self.rotary(position_BM))
        query, key, value = (
            self.split(projected, heads)
            for projected, heads in ((self.q_proj(x_BMW), self.heads), (self.k_proj(x_BMW), self.kv_heads), (self.v_proj(x_BMW), self.kv_heads))
        )
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def split(self, projected_BMW: Tensor, heads: int) -> Tensor:
        """[B, M, heads * width] -> [B, heads, M, width]."""
        batch, count, _ = projected_BMW.shape
        return projected_BMW.view(batch, count, heads, self.width).transpose(1, 2)

    def rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [..., width] of positions, in float32."""
        angle = torch.cat([position.float().unsqueeze(-1) * self.inverse_frequency] * 2, dim=-1)
        return angle.cos(), angle.sin()

    def expand(self, states: Tensor) -> Tensor:
        """Repeat kv heads to match the query heads."""
        return states if self.kv_heads == self.heads else states.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, heads, M, width] -> [B, M, H]."""
        merged: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return merged


class Documents:
    """Which places of packed sequences attend to which: causally, within a run of equal ids in document_BT. -1 is padding, which nobody judges."""

    def __init__(self, document_BT: Tensor) -> None:
        self.document_BT = document_BT
        self._spans: list[tuple[int, int, int]] | None = None
        self._block_mask: Any = None

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(row, first place, end) of every document."""
        if self._spans is None:
            self._spans = []
            for row, ids in enumerate(self.document_BT.tolist()):
                start = 0
                for document, run in itertools.groupby(ids):
                    stop = start + len(list(run))
                    if document >= 0:
                        self._spans.append((row, start, stop))
                    start = stop
        return self._spans

    @property
    def block_mask(self) -> Any:
        """FlexAttention's form of it."""
        if self._block_mask is None:
            document_BT = self.document_BT

            def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (document_BT[b, q] == document_BT[b, k])

            batch, total = document_BT.shape
            self._block_mask = flex_attention.create_block_mask(sees, batch, None, total, total, device=str(document_BT.device))
        return self._block_mask


def unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    """What the last of several unrolled steps sees: of step 0 what `documents` says, and of every later step its own position's entry.

    query: [B, heads, T, width]; each step's keys and values: [B, kv_heads, T, width]. Returns [B, heads, T, width]: what a cache holds when a head
    drafts on. What padding gets is finite and means nothing. No [T, T] tensor is made: step 0 by a fused kernel, and the other entries joined to it
    through the log-sum-exp. `plain_unrolled_attention` is the same written out.
    """
    if query.device.type == "cpu":
        mixed: Tensor = _UnrolledAttention.apply(query, documents, len(keys), *keys, *values)  # type: ignore[no-untyped-call]
        return mixed
    if query.device.type == "cuda" and has_triton() and query.dtype != torch.float64:
        return _flex_unrolled_attention(query, keys, values, documents, _compiled_flex())
    return plain_unrolled_attention(query, keys, values, within_documents(documents.document_BT))


def plain_unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], allowed: Tensor) -> Tensor:
    """`unrolled_attention` with all scores in memory; step 0 as `allowed` [B, 1, T, T] says."""
    total, scale, group = query.shape[2], query.shape[-1] ** -0.5, query.shape[1] // keys[0].shape[1]
    keys, values = ([x.repeat_interleave(group, dim=1) for x in entries] for entries in (keys, values))
    scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    diagonal = [(query * later).sum(-1, keepdim=True) * scale for later in keys[1:]]
    weights = torch.cat([scores, *diagonal], dim=-1)
    weights = (weights if weights.dtype == torch.float64 else weights.float()).softmax(-1).to(query.dtype)
    mixed = weights[..., :total] @ values[0]
    for index, later in enumerate(values[1:]):
        mixed = mixed + weights[..., total + index : total + index + 1] * later
    return mixed


class _UnrolledAttention(torch.autograd.Function):
    """On a CPU. The backward kernel is given the output and the log-sum-exp over all entries: its gradients are then those of step 0's share."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, documents: Documents, steps: int, *entries: Tensor) -> Tensor:
        """entries: keys of all steps, then their values."""
        dtype = fast_dtype(query.dtype, "cpu")
        grouped = torch.unflatten(query.to(dtype), 1, (entries[0].shape[1], -1))  # [B, kv_heads, group, T, width]
        keys, values = ([x.to(dtype).unsqueeze(2) for x in part] for part in (entries[:steps], entries[steps:]))
        wide = torch.promote_types(dtype, torch.float32)
        out = torch.zeros_like(grouped, memory_format=torch.contiguous_format)
        total = torch.full(grouped.shape[:-1], -torch.inf if steps > 1 else 0.0, dtype=wide)
        for row, start, stop in documents.spans:
            part = slice(start, stop)
            q, k, v = (x[row, ..., part, :].expand(*grouped.shape[1:3], -1, -1) for x in (grouped, keys[0], values[0]))
            out[row, ..., part, :], total[row, ..., part] = _CPU_FORWARD(q, k, v, 0.0, True)
        if steps > 1:
            scores = torch.stack([(grouped * k).sum(-1, dtype=wide) * query.shape[-1] ** -0.5 for k in keys[1:]])
            first, total = total, torch.logaddexp(total, scores.logsumexp(0))
            out *= (first - total).exp().unsqueeze(-1).to(dtype)
            for score, v in zip(scores, values[1:], strict=True):
                out.addcmul_((score - total).exp().unsqueeze(-1).to(dtype), v)
        result = out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, result, total, *entries)
        ctx.documents, ctx.steps = documents, steps
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Step 0 by the kernel, the single entries by hand: with P the weight of an entry, dS = P (dO . v - dO . O)."""
        query, result, total, *entries = ctx.saved_tensors
        dtype, steps, scale = fast_dtype(query.dtype, "cpu"), ctx.steps, query.shape[-1] ** -0.5
        grouped, out, grad = (torch.unflatten(x.to(dtype), 1, (entries[0].shape[1], -1)) for x in (query, result, grads[0]))
        keys, values = ([x.to(dtype).unsqueeze(2) for x in part] for part in (entries[:steps], entries[steps:]))
        by_query = torch.zeros_like(grouped, memory_format=torch.contiguous_format)
        by_keys, by_values = ([torch.zeros_like(x[:, :, 0]) for x in part] for part in (keys, values))
        for row, start, stop in ctx.documents.spans:
            part = slice(start, stop)
            q, k, v, g, o = (x[row, ..., part, :].expand(*grouped.shape[1:3], -1, -1) for x in (grouped, keys[0], values[0], grad, out))
            by_q, by_k, by_v = _CPU_BACKWARD(g, q, k, v, o, total[row, ..., part], 0.0, True)
            by_query[row, ..., part, :] = by_q
            by_keys[0][row, :, part] = by_k.sum(1)
            by_values[0][row, :, part] = by_v.sum(1)
        own = (grad * out).sum(-1, keepdim=True) if steps > 1 else grad
        for step in range(1, steps):
            k, v = keys[step], values[step]
            weight = ((grouped * k).sum(-1, keepdim=True) * scale - total.unsqueeze(-1)).exp().to(dtype)
            by_score = weight * ((grad * v).sum(-1, keepdim=True) - own) * scale
            by_query.addcmul_(by_score, k)
            by_keys[step] = (by_score * grouped).sum(2)
            by_values[step] = (weight * grad).sum(2)
        return by_query.flatten(1, 2).to(query.dtype), None, None, *(x.to(query.dtype) for x in (*by_keys, *by_values))


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention.flex_attention)
    return compiled


def _flex_unrolled_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents, kernel: Callable[..., Any] = flex_attention.flex_attention
) -> Tensor:
    """On a GPU, by FlexAttention (2412.05496), which differentiates through the log-sum-exp too."""
    group, scale = query.shape[1] // keys[0].shape[1], query.shape[-1] ** -0.5
    aux = flex_attention.AuxRequest(lse=True)
    out, extra = kernel(query, keys[0], values[0], block_mask=documents.block_mask, enable_gqa=group > 1, return_aux=aux)
    first: Tensor = extra.lse
    if len(keys) == 1:
        return cast(Tensor, out)
    later_keys, later_values = ([x.repeat_interleave(group, dim=1) for x in entries[1:]] for entries in (keys, values))
    scores = [(query * k).sum(-1, dtype=first.dtype) * scale for k in later_keys]
    weights = torch.stack([first, *scores], dim=-1).softmax(-1).to(query.dtype)
    mixed: Tensor = out * weights[..., :1]
    for index, v in enumerate(later_values, 1):
        mixed = mixed + weights[..., index : index + 1] * v
    return mixed


def anchored_attention(query: Tensor, before: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], allowed: Tensor, causal: bool = False) -> Tensor:
    """What blocks that start at anchors see: of the sequence what `allowed` [B, A, T] says, and their own block (causal: up to themselves).

    query, and the blocks' own keys and values: [B, heads, A * S, width], S entries a block; keys and values before them: [B, heads, T, width].
    Returns [B, heads, A * S, width]. That is what each block sees if it is drafted alone, after its anchor's prefix.
    """
    (batch, heads, _, width), (_, anchors, total) = query.shape, allowed.shape
    query, keys, values = (x.reshape(batch, heads, anchors, -1, width) for x in (query * width**-0.5, *own))
    earlier = (query.flatten(2, 3) @ before[0].transpose(-1, -2)).view(*query.shape[:4], total)
    earlier = earlier.masked_fill(~allowed.unsqueeze(1).unsqueeze(3), -torch.inf)
    inside = query @ keys.transpose(-1, -2)
    if causal:
        inside = inside.masked_fill(torch.ones(inside.shape[-2:], dtype=torch.bool, device=inside.device).triu(1), -torch.inf)
    weights = torch.cat([earlier, inside], dim=-1).float().softmax(-1).to(query.dtype)
    mixed: Tensor = weights[..., :total].flatten(2, 3) @ before[1] + (weights[..., total:] @ values).flatten(2, 3)
    return mixed


@torch.no_grad()
def fused_matrix(*weights: Tensor) -> Tensor:
    """Weights [R_i, H] of projections of one input as a matrix [H, sum R_i]. On a CPU it is laid out anew: a product then takes half the time."""
    whole = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
    return whole.t().contiguous() if whole.device.type == "cpu" else whole.t()


def within_documents(document_BT: Tensor) -> Tensor:
    """[B, 1, T, T] causal attention within each document."""
    causal = torch.ones(document_BT.shape[1], document_BT.shape[1], dtype=torch.bool, device=document_BT.device).tril()
    return (causal & (document_BT.unsqueeze(1) == document_BT.unsqueeze(2))).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the last dimension, halves paired as Llama pairs them."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _Gated(torch.autograd.Function):
    """silu(gate) * up. For the backward pass it keeps these two, and forms silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Of one shape."""
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """By gate, and by up."""
        gate, up = ctx.saved_tensors
        by_gate: Tensor = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return by_gate, functional.silu(gate).mul_(grads[0])


class MLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]
        return out


class DecoderLayer(nn.Module):
    """A Llama layer without biases. inputs: the width of what its attention reads (None: the hidden size); norms: those before the attention."""

    input_layernorm: RMSNorm

    def __init__(self, config: LayerConfig, inputs: int | None = None, norms: Sequence[str] = ("input_layernorm",)) -> None:
        super().__init__()
        self.self_attn = Attention(config, inputs)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        for name in norms:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual, then the MLP with its own."""
        hidden = hidden + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
