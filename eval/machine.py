"""The machine that is measured on: how many threads are fastest, and what the report calls it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..decode.engine import Engine
from ..decode.sampling import SamplingParams
from ..decode.target import Target


def choose_threads(target: Target, prompt: Sequence[int], threads: int | None, steps: int = 24) -> dict[str, Any]:
    """Set the number of CPU threads to threads, or to the fastest at plain decoding; say which, and what was measured (ms a token)."""
    if target.device.type != "cpu":
        return {}
    cores, milliseconds = os.cpu_count() or 1, {}
    if threads is not None:
        torch.set_num_threads(threads)
        return {"threads": threads}
    engine = Engine(target)
    for threads in dict.fromkeys([1, *(2**i for i in range(1, cores.bit_length()) if 2**i < cores), cores]):
        torch.set_num_threads(threads)
        engine.generate([prompt], SamplingParams(), 6)  # the pool starts, caches warm
        times = [engine.generate([prompt], SamplingParams(), steps + 1).times.decode for _ in range(3)]
        milliseconds[threads] = 1e3 * min(times) / steps
    best = min(milliseconds, key=lambda n: milliseconds[n])
    torch.set_num_threads(best)
    return {"threads": best, "thread_calibration_ms": {str(n): round(ms, 2) for n, ms in milliseconds.items()}}


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def short_name(name: str) -> str:
    """A model's name without this machine's folders: hub names as they are, else the last folder, or the one above if that is a mere "target"."""
    path, comma, rest = name.partition(",")
    folder = Path(path)
    if not folder.is_absolute():
        return name
    return (folder.parent.name if folder.name == "target" else folder.name) + comma + rest


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except FileNotFoundError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()
