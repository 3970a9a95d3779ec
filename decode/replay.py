"""Repeating a piece of a round without the host's work: on a GPU it is captured as a CUDA graph once, and replayed from then on.

A piece is a function without arguments whose inputs and outputs are tensors that stay where they are: what it reads was written in place, and what
it leaves behind is overwritten by the next call. Where nothing is captured (on a CPU), it is simply called, so that tests see the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Replay:
    """`piece()`, the first time as it is (which also warms up what libraries set up lazily), the second time captured, then replayed.

    pool: memory that pieces share which never run at the same time (`torch.cuda.graph_pool_handle()`).
    """

    def __init__(self, piece: Callable[[], None], *, capture: bool, pool: Any = None) -> None:
        self._piece, self._capture, self._pool, self._calls = piece, capture, pool, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run it once. A piece with side effects on the host has them in its first two runs only."""
        self._calls += 1
        if not self._capture or self._calls == 1:
            self._piece()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=self._pool):  # only records
                self._piece()
        self._graph.replay()


def bucket(size: int, least: int = 256) -> int:
    """The smallest of least, 2 * least, 4 * least ... that holds `size`: so many different shapes are captured."""
    while least < size:
        least *= 2
    return least
