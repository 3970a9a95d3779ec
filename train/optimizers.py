"""Optimizers: Muon for matrices, AdamW for everything else; groups of parameters with learning rates of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..recipes.schema import Train

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

    The same update as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, except that the iteration runs on all matrices of one shape at once, and on
    CPUs in float32: torch's runs in bfloat16, which CPUs without bfloat16 units emulate (measured: 2.6 times slower), one matrix after another.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        groups: list[Any] = list(params)
        flat = [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]
        wrong = [tuple(p.shape) for p in flat if p.ndim != 2]
        if wrong:
            raise ValueError(f"Muon: wanted matrices only, got shapes {wrong[:3]}")
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

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
                whole = torch.stack([_whole(direction) for direction in directions])
                updates = orthogonalise(whole.bfloat16() if whole.is_cuda else whole)
                for p, update in zip(params, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(_sharded_like(update.to(p.dtype), p), alpha=-group["lr"] * scale)


def _whole(tensor: Tensor) -> Tensor:
    """All of a matrix of which this process may have a shard (FSDP2): its update hangs on the whole of it."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)  # a cut: every process has it all


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters, by their names, that learn alike: at `lr_scale` times the recipe's rate. weight_decay None: the recipe's. muon: may be used."""

    name: str
    parameters: list[tuple[str, nn.Parameter]]
    lr_scale: float = 1.0
    weight_decay: float | None = None
    muon: bool = True


def make_optimizers(parts: Sequence[Part], train: Train, *, fused: bool = True) -> list[torch.optim.Optimizer]:
    """The recipe's optimizers over all parts. Every parameter group has its part's `lr_scale`, by which the loop multiplies the scheduled rate.

    muon: for the matrices inside the layers; embeddings, lm_head and norms are for AdamW, without decay. fused: AdamW's step of all parameters may be
    one kernel; it is on a GPU.
    """
    groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for part in parts:
        decay = train.weight_decay if part.weight_decay is None else part.weight_decay
        common = {"lr": train.lr * part.lr_scale, "lr_scale": part.lr_scale}
        inner = {name for name, p in part.parameters if _inner(name, p)} if train.optimizer == "muon" and part.muon else set()
        rest = [p for name, p in part.parameters if name not in inner]
        if inner:
            groups[True].append({"params": [p for name, p in part.parameters if name in inner], "weight_decay": decay, **common})
        if rest:
            groups[False].append({"params": rest, "weight_decay": 0.0 if train.optimizer == "muon" and part.muon else decay, **common})
    optimizers: list[torch.optim.Optimizer] = [Muon(groups[True], train.lr)] if groups[True] else []
    if groups[False]:
        on_gpu = all(p.device.type == "cuda" for group in groups[False] for p in group["params"])
        betas = (train.betas[0], train.betas[1])
        optimizers.append(torch.optim.AdamW(groups[False], lr=train.lr, betas=betas, fused=True if fused and on_gpu else None))
    return optimizers


def _inner(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def muon_and_adamw(model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW (no decay) for embeddings, lm_head and norms, at one learning rate."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        Muon([p for name, p in named if _inner(name, p)], lr, weight_decay),
        torch.optim.AdamW([p for name, p in named if not _inner(name, p)], lr=lr, betas=betas, weight_decay=0.0),
    ]
