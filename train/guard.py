"""What stops a training in good order: numbers that are not finite, and signals. And gradients that leap are noticed."""

from __future__ import annotations

import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from .objectives.common import Batch

STOPPED = 3  # exit code: a loss or gradient was not finite
_WINDOW, _LEAST, _LEAP = 64, 16, 10.0


class Diverged(Exception):
    """A loss or gradient is not finite. The message is one line for the user."""


class Interrupted(Exception):
    """A signal came, and everything was saved. The exit code is 128 + its number, as shells have it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"{signal.Signals(number).name}: stopped")


class Interrupts:
    """Inside it SIGTERM and SIGINT are noted in `number` (0: none came), to be acted on between steps.

    One that comes more than two seconds after the first acts at once. (Launchers repeat what a terminal has already sent to all.)
    """

    def __init__(self) -> None:
        self.number, self._first = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and time.monotonic() - self._first > 2:
            self._restore()
            signal.raise_signal(number)
        elif not self.number:
            self.number, self._first = number, time.monotonic()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()


def leap(norms: list[float], norm: float) -> float | None:
    """How many times the median of the last norms this one is, if that is much; notes it among them, of which the oldest are forgotten."""
    usual = statistics.median(norms) if len(norms) >= _LEAST else math.inf
    norms.append(norm)
    del norms[:-_WINDOW]
    return norm / usual if norm > _LEAP * usual > 0 else None


def keep_batch(folder: Path, step: int, process: int, batches: Sequence[Batch], losses: Sequence[float], norm: float | None) -> Path:
    """Write a process's micro-batches of a step for inspection: `torch.load` gives ids_BT, loss_BT, position_BT, document_BT and the loss of each."""
    path = folder / f"stopped-step-{step:08d}-process-{process}.pt"
    parts = [{field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} for batch in batches]
    torch.save({"step": step, "losses": list(losses), "gradient_norm": norm, "micro_batches": parts}, path)
    return path
