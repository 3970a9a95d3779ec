"""Where a training's time and memory go: seconds by part, bytes by part, model FLOPs utilisation.

Seconds are those of the device: on a GPU a part's are measured by events, which are read when they are asked for, so that nothing waits for them.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Dense bfloat16 / float16 tensor-core FLOP/s by the makers' data sheets; the longest name that fits counts.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}


class Clock:
    """Seconds by part of a step, summed up since they were last read."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what is inside."""
        if self._gpu:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            yield
            stop.record()
            self._events.append((part, start, stop))
        else:
            began = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """{part: seconds} since the last time."""
        for part, start, stop in self._events:
            stop.synchronize()
            self._seconds[part] += start.elapsed_time(stop) / 1000
        seconds = dict(self._seconds)
        self._events.clear()
        self._seconds.clear()
        return seconds


def peak_flops(device: torch.device) -> float | None:
    """The device's FLOP/s in half precision; None if they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((PEAK_FLOPS[known] for known in sorted(PEAK_FLOPS, key=len, reverse=True) if known in name), None)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this process's part of the tensors."""
    from torch.distributed.tensor import DTensor

    return sum(part.numel() * part.element_size() for part in ((t.to_local() if isinstance(t, DTensor) else t) for t in tensors))


def memory(model: nn.Module, drafter: nn.Module, optimizers: Iterable[Any], features: int, device: torch.device) -> dict[str, float]:
    """MiB by part: the target, the drafter, its gradients, its optimizers' states, kept features; and the most that was in use."""
    from .bench import resident

    trained = list(drafter.parameters())
    states = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident(peak=True)
    parts = {
        "target": tensor_bytes([*model.parameters(), *model.buffers()]),
        "drafter": tensor_bytes(trained),
        "gradients": tensor_bytes(p for p in trained if p.requires_grad),
        "optimizer": tensor_bytes(states),
        "features": features,
        "peak": peak,
    }
    return {f"{name}_mib": round(value / 2**20, 1) for name, value in parts.items()}
