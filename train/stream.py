"""What a run reads: for every optimizer step the same global batch, however many processes there are, and a position to come back to.

A global batch is `train.batch_size` rows in a fixed order. Micro-batch m of it is rows m * micro .. (m + 1) * micro - 1; process p takes the micro-
batches of its slice of the rows. So the content of a step, and of every micro-batch, depends on the recipe's seed and the step alone.

    stream = make_stream(recipe, sequences, Share(batch_size=8, micro=2, process=0, processes=2))
    for batch in next(stream): ...                  # two micro-batches: rows 0-1 and 2-3; the other process has 4-5 and 6-7
    state = stream.state_dict()                     # (epoch, position): no word of processes
    stream.load_state_dict(state)                   # in a run with any number of processes: goes on with the step after

Other fixed data are another `EpochStream`; data that the drafter takes part in making (on-policy) another `Stream`.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from .. import UserError
from ..recipes.schema import DrafterRecipe
from .data import Sequences, collate_packed
from .objectives.common import Batch

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows of every global batch that this process takes, in micro-batches of `micro` rows. micro None: all in one.

    Raises UserError if the processes cannot share a batch evenly.
    """

    batch_size: int
    micro: int | None = None
    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        share = self.batch_size // self.processes
        micro = self.micro or share
        if self.batch_size % self.processes or share % micro:
            of = f"{self.processes} processes" + (f" x micro batch {micro}" if self.micro else "")
            raise UserError(f"train.batch_size: wanted a multiple of {of}, got {self.batch_size}; give another batch size, or start fewer processes")

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return self.micro or self.batch_size // self.processes

    @property
    def micro_batches(self) -> range:
        """The numbers of this process's micro-batches among those of the global batch."""
        each = self.batch_size // self.processes // self.rows
        return range(self.process * each, (self.process + 1) * each)

    def slices(self, batch: Sequence[Row]) -> list[Sequence[Row]]:
        """This process's micro-batches of a global batch."""
        return [batch[m * self.rows : (m + 1) * self.rows] for m in self.micro_batches]


class Stream(Protocol):
    """Endless steps. All processes call the same methods in the same order, so that a stream may let them talk to each other.

    Promises: the rows of step n, over all processes, depend on the recipe and n alone (and on the drafter, if `ahead` is False); so does the number
    of micro-batches of a process. After `load_state_dict(state_dict())` the stream gives what it would have given. A state is of plain values and
    tensors (`torch.load(weights_only=True)` reads it), the same in all processes, and holds everything that cannot be made again from the recipe:
    an on-policy stream's generated samples, say. It belongs to all processes together: any number of them can go on from it.
    """

    ahead: bool  # whether a step may be taken before the optimizer step that precedes it is made: it does not depend on the drafter

    def __next__(self) -> list[Batch]:
        """The next step's micro-batches of this process, `Share.rows` rows each, on the CPU or the device."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there. Raises UserError for a state that does not fit its data."""


class EpochStream(ABC, Generic[Row]):
    """A stream over a fixed set of data: every epoch's global batches are known from seed and epoch. A row is whatever `batch` makes one row of."""

    ahead: bool = True

    def __init__(self, share: Share) -> None:
        self.share, self.epoch, self.position = share, 0, 0  # position: global batches of this epoch that were given
        self._current: tuple[int, list[list[Row]]] | None = None

    @abstractmethod
    def epoch_batches(self, epoch: int) -> list[list[Row]]:
        """The global batches of an epoch, `share.batch_size` rows each; at least one. A function of the recipe and `epoch` alone."""

    @abstractmethod
    def batch(self, rows: Sequence[Row]) -> Batch:
        """A micro-batch."""

    def __next__(self) -> list[Batch]:
        batches = self._batches()
        if self.position == len(batches):
            self.epoch, self.position = self.epoch + 1, 0
            batches = self._batches()
        chosen = batches[self.position]
        self.position += 1
        return [self.batch(rows) for rows in self.share.slices(chosen)]

    def _batches(self) -> list[list[Row]]:
        if self._current is None or self._current[0] != self.epoch:
            self._current = self.epoch, self.epoch_batches(self.epoch)
        return self._current[1]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "batches": len(self._batches())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        if len(self._batches()) != state["batches"]:
            raise UserError(
                f"data: wanted those that the run began with, got others ({len(self._batches())} batches an epoch, not {state['batches']}); "
                "give another out=FOLDER"
            )


def strata(count: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Global batches of an epoch over items 0 .. count - 1: row r of a batch is an item of stratum r, those with index = r modulo batch_size.

    A stratum stays with its row, and so with its process, from epoch to epoch: what a process keeps of its items (`train/features.py`) is of use to
    it again. Strata are shuffled each by itself, so that batches are others in every epoch. What does not fill the last batch, fewer items than
    batch_size, is left out, others in every epoch. Fewer items than rows: items repeat.
    """
    size = max(count // batch_size, 1)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    columns = []
    for row in range(batch_size):
        items = list(range(row, count, batch_size)) or [row % count]
        columns.append([items[i] for i in torch.randperm(len(items), generator=generator).tolist()[:size]])
    return [[column[i] for column in columns] for i in range(size)]


def bucketed(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """`strata`, but of items of like lengths in a batch: row r has the items whose rank by length is r modulo batch_size.

    Items change places with those of the same row within a 16th of all lengths, at most 32 of them, so that batches are others in every epoch; their
    order is shuffled.
    """
    by_length = sorted(range(len(lengths)), key=lambda item: (lengths[item], item))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    size = max(len(lengths) // batch_size, 1)
    ranks = min(max(size // 16, 2), 32)
    columns = []
    for row in range(batch_size):
        items = [by_length[i] for i in range(row, len(lengths), batch_size)] or [by_length[row % len(lengths)]]
        if len(items) > size:
            del items[int(torch.randint(len(items), (1,), generator=generator))]
        for start in range(0, size, ranks):
            part = items[start : start + ranks]
            items[start : start + ranks] = [part[i] for i in torch.randperm(len(part), generator=generator).tolist()]
        columns.append(items)
    return [[column[i] for column in columns] for i in torch.randperm(size, generator=generator).tolist()]


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Items in rows of at most `size` tokens: the longest first, each where the least space is left. A longer item is a row by itself."""
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # rows by the tokens that they still have room for
    spaces: list[int] = []  # its keys, ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(spaces, lengths[item])
        if at == len(spaces):
            rows.append([item])
            row, space = len(rows) - 1, size - lengths[item]
        else:
            row, space = with_space[spaces[at]].pop(), spaces[at] - lengths[item]
            rows[row].append(item)
            if not with_space[spaces[at]]:
                del with_space[spaces[at]], spaces[at]
        if space > 0:
            if space not in with_space:
                bisect.insort(spaces, space)
            with_space.setdefault(space, []).append(row)
    return rows


class SequenceStream(EpochStream[int]):
    """Padded batches of sequences. A row is a sequence, or several that are packed, which know nothing of each other; it is known by its number.

    whole: learn to draft the prompts' tokens too, as the target would continue them, not those of the responses only.
    batching: "shuffled"; "bucketed", rows of like lengths in a batch; "packed", sequences in rows of `length` tokens, the same rows in every epoch.
    Raises UserError if there are no sequences.
    """

    def __init__(
        self,
        sequences: Sequences,
        share: Share,
        seed: int,
        *,
        whole: bool = False,
        batching: Literal["shuffled", "bucketed", "packed"] = "shuffled",
        length: int = 0,
    ) -> None:
        super().__init__(share)
        if not sequences:
            raise UserError("data: wanted one sequence or more to train on, got none")
        self.sequences, self.seed, self.whole, self.bucketed = sequences, seed, whole, batching == "bucketed"
        lengths = [len(sample.ids) for sample in sequences]
        self.rows = packed(lengths, length) if batching == "packed" else [[index] for index in range(len(sequences))]
        self.lengths = [sum(lengths[index] for index in row) for row in self.rows]

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        if self.bucketed:
            return bucketed(self.lengths, self.share.batch_size, self.seed, epoch)
        return strata(len(self.rows), self.share.batch_size, self.seed, epoch)

    def batch(self, rows: Sequence[int]) -> Batch:
        chosen = [[self.sequences[index] for index in self.rows[row]] for row in rows]
        batch = collate_packed([[sample.whole for sample in row] for row in chosen] if self.whole else chosen)
        batch.sequence_B = list(rows)
        return batch

    def padding(self) -> float:
        """The share of padding in the places of the first epoch's micro-batches, over all processes."""
        micro = [batch[at : at + self.share.rows] for batch in self.epoch_batches(0) for at in range(0, self.share.batch_size, self.share.rows)]
        places = sum(len(rows) * max(self.lengths[row] for row in rows) for rows in micro)
        return 1 - sum(self.lengths[row] for rows in micro for row in rows) / places


def make_stream(recipe: DrafterRecipe, sequences: Sequences, share: Share) -> SequenceStream:
    """The stream that the recipe asks for."""
    data = recipe.data
    return SequenceStream(sequences, share, recipe.train.seed, whole=data.train_on == "all", batching=data.batching, length=data.sequence_length)
