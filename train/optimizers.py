"""Optimizers: Muon in float32 for matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices_KMN: Tensor, steps: int = 5) -> Tensor:
    """[K, M, N] -> about the nearest semi-orthogonal matrices U V^T, by the quintic Newton-Schulz iteration, in the dtype given."""
    a, b, c = _QUINTIC
    tall = matrices_KMN.shape[-2] > matrices_KMN.shape[-1]
    x = matrices_KMN.transpose(-2, -1) if tall else matrices_KMN
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(-2, -1) if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with weight decay and the update scale 0.2 sqrt(max(M, N)) of 2502.16982, so that AdamW's learning rates carry over.

    The same update as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, except that the iteration runs in float32 and on all matrices of one
    shape at once: torch's runs in bfloat16, which CPUs without bfloat16 units emulate (measured: 2.6 times slower), one matrix after another.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        params = list(params)
        wrong = [tuple(p.shape) for p in params if p.ndim != 2]
        if wrong:
            raise ValueError(f"Muon: wanted matrices only, got shapes {wrong[:3]}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update. A closure is not supported."""
        if closure is not None:
            raise ValueError("Muon: wanted no closure, got one")
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[tuple(p.shape)].append(p)
            for shape, params in shapes.items():
                directions = []
                for p in params:
                    average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p, dtype=torch.float32))
                    gradient = p.grad.float()  # type: ignore[union-attr]
                    average.lerp_(gradient, 1 - group["momentum"])
                    directions.append(gradient.lerp(average, group["momentum"]))  # Nesterov
                scale = 0.2 * math.sqrt(max(shape))
                for p, update in zip(params, orthogonalise(torch.stack(directions)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.to(p.dtype), alpha=-group["lr"] * scale)


def muon_and_adamw(model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW (no decay) for embeddings, lm_head and norms, at one learning rate."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = {name for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name}
    return [
        Muon([p for name, p in named if name in inner], lr, weight_decay),
        torch.optim.AdamW([p for name, p in named if name not in inner], lr=lr, betas=betas, weight_decay=0.0),
    ]
