"""On-policy text: at a share of the steps the draft itself has written the responses, and the target judges them (GKD, 2306.13649, algorithm 1).

    train.on_policy=0.5 train.on_policy_refresh=50

Every `refresh` steps the draft, as it is then, writes by the batched engine what is wanted until the next time. Which steps those are, their prompts
and seeds depend on the recipe alone; what was written and is not yet used is part of the stream's state, so that a run goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from ..decode.engine import Engine
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from .data import Sequences, collate
from .objectives.common import Batch
from .stream import Share, Stream, strata
from .templates import Sample


class OnPolicyStream:
    """Steps of `base`, but those that are on-policy. writer: gives the draft as it is now.

    sequences: their prompts are what the draft answers. mixing: share of the steps. tokens: the most that a response has. whole: learn the prompts'
    tokens too. gather: the rows of all processes, those of the first process first.
    """

    ahead = False

    def __init__(
        self,
        base: Stream,
        writer: Callable[[], Target],
        sequences: Sequences,
        share: Share,
        *,
        mixing: float,
        refresh: int,
        temperature: float,
        tokens: int,
        batch: int,
        eos: list[int],
        seed: int,
        whole: bool = False,
        gather: Callable[[list[Sample]], list[Sample]] = list,
    ) -> None:
        self.base, self.share, self.sequences = base, share, sequences
        self._writer, self._mixing, self._refresh, self._temperature = writer, mixing, refresh, temperature
        self._tokens, self._batch, self._eos, self._seed, self._whole, self._gather = tokens, batch, eos, seed, whole, gather
        self.step = 0
        self._written: dict[int, list[Sample]] = {}  # of steps to come, all rows of the global batch

    def on_policy(self, step: int) -> bool:
        """Whether the draft writes this step's text: as evenly spread as can be."""
        return int((step + 1) * self._mixing) > int(step * self._mixing)

    def __next__(self) -> list[Batch]:
        step = self.step
        self.step += 1
        if not self.on_policy(step):
            return next(self.base)
        if step not in self._written:
            self._write([later for later in range(step, step - step % self._refresh + self._refresh) if self.on_policy(later)])
        rows = self._written.pop(step)
        return [collate([sample.whole for sample in part] if self._whole else part) for part in self.share.slices(rows)]

    def _prompts(self, step: int) -> list[list[int]]:
        """Those of a step's global batch: the sequences', in an order of their own."""
        number = int(step * self._mixing)  # of on-policy steps before
        size = max(len(self.sequences) // self.share.batch_size, 1)
        chosen = strata(len(self.sequences), self.share.batch_size, self._seed + 1, number // size)[number % size]
        return [prompt_of(self.sequences[i]) for i in chosen]

    def _write(self, steps: list[int]) -> None:
        """Let the draft answer the prompts of these steps; every process answers those of its own rows."""
        engine, mine = Engine(self._writer()), []
        for step in steps:
            numbered = list(enumerate(self._prompts(step)))
            mine += [(step, row, prompt) for row, prompt in chain.from_iterable(self.share.slices(numbered))]
        written: list[Sample] = []
        with torch.random.fork_rng():
            for start in range(0, len(mine), self._batch):
                part = mine[start : start + self._batch]
                params = [SamplingParams(temperature=self._temperature, seed=self._row_seed(step, row)) for step, row, _ in part]
                out = engine.generate([prompt for _, _, prompt in part], params, self._tokens, eos_ids=self._eos)
                for (_, _, prompt), new in zip(part, out.tokens, strict=True):
                    written.append(Sample(prompt + new, [(len(prompt), len(prompt) + len(new))]))
        each = self.share.batch_size // self.share.processes
        rows = self._gather(written)
        for number, step in enumerate(steps):
            own = [rows[(process * len(steps) + number) * each :][:each] for process in range(self.share.processes)]
            self._written[step] = list(chain.from_iterable(own))

    def _row_seed(self, step: int, row: int) -> int:
        return ((self._seed + 1) * 1_000_003 + step) * 65_537 + row

    def state_dict(self) -> dict[str, Any]:
        """The step, the base's state, and what was written."""
        written = {str(step): [[list(ids), spans[0][0]] for ids, spans in rows] for step, rows in self._written.items()}
        return {"step": self.step, "base": self.base.state_dict(), "written": written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there."""
        self.base.load_state_dict(state["base"])
        self.step = state["step"]
        self._written = {int(step): [Sample(list(ids), [(start, len(ids))]) for ids, start in rows] for step, rows in state["written"].items()}


def prompt_of(sample: Sample) -> list[int]:
    """What comes before a sequence's last answer; of a plain text, its first quarter."""
    start = sample.spans[-1][0] if sample.spans else 0  # it may be one that is learned whole
    return sample.ids[: start or max(1, len(sample.ids) // 4)]
