"""Memory: measured peaks, and what speculation needs beyond plain decoding."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..decode.engine import Engine
from ..decode.target import Target

MIB = 2**20


class Peak:
    """The highest memory since `reset`: of the device where it is a GPU, else of the process (Linux only; None elsewhere)."""

    def __init__(self, device: torch.device, process: Path = Path("/proc/self")) -> None:
        self._device, self._process = device, process

    def reset(self) -> None:
        """From now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            (self._process / "clear_refs").write_text("5")  # the kernel's "peak resident set size" starts anew
        except OSError:
            self._process = Path()

    def mebibytes(self) -> float | None:
        """Since `reset`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / MIB
        try:
            lines = (self._process / "status").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta and t.numel()}
    return sum(storages.values())


def drafter_bytes(drafter: Any, target: Target) -> int:
    """Of the drafter's own weights: those that it shares with the target are not counted."""
    shared = {t.untyped_storage().data_ptr() for t in [*target.model.parameters(), *target.model.buffers()]}
    return nbytes(p for p in drafter.parameters() if p.untyped_storage().data_ptr() not in shared)


def speculation_bytes(engine: Engine, batch: int) -> int:
    """What a request of `batch` rows holds beyond plain decoding, weights apart, after it has run.

    That is the drafter's state, the cache slots of draft nodes, and the logits of more than one token a row.
    """
    target, nodes = engine.target, engine.num_nodes
    state = nbytes(engine.proposer.tensors()) if engine.proposer is not None and hasattr(engine.proposer, "tensors") else 0
    slot = sum(t.nbytes // t.shape[-2] for t in target.tensors())  # [.., slots, width]
    extra = (nodes - 1) + (engine.max_depth) * (1 + engine.overlap)
    logits = batch * (nodes - 1) * target.vocab_size * (target.dtype.itemsize + 4)
    return int(state + slot * extra + logits)
