"""Layers that heads are built of, in Llama's arithmetic and names, since serving engines load them under these.

Dims: B batch, M positions, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .head import LayerConfig


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
        self.q_proj = nn.Linear(inputs, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)
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


def unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], allowed: Tensor) -> Tensor:
    """What the last of several unrolled steps sees: step 0 as `allowed` [B, 1, T, T] says, and of every later step its own position's entry.

    query, and each step's keys and values: [B, heads, T, width]. Returns [B, heads, T, width]. That is what a cache holds when a head drafts on.
    """
    total, scale = query.shape[2], query.shape[-1] ** -0.5
    scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    diagonal = [(query * later).sum(-1, keepdim=True) * scale for later in keys[1:]]
    weights = torch.cat([scores, *diagonal], dim=-1).float().softmax(-1).to(query.dtype)
    mixed = weights[..., :total] @ values[0]
    for index, later in enumerate(values[1:]):
        mixed = mixed + weights[..., total + index : total + index + 1] * later
    return mixed


def within_documents(document_BT: Tensor) -> Tensor:
    """[B, 1, T, T] causal attention within each document."""
    causal = torch.ones(document_BT.shape[1], document_BT.shape[1], dtype=torch.bool, device=document_BT.device).tril()
    return (causal & (document_BT.unsqueeze(1) == document_BT.unsqueeze(2))).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the last dimension, halves paired as Llama pairs them."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
