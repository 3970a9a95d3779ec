"""A ring of features, for a target that does not fit beside what is trained: the two take turns on the device.

    draftsmith train RECIPE features.source=ring features.ring_gib=16                      in the host's memory
    draftsmith train RECIPE features.source=ring features.ring_on=disk features.folder=/scratch/ring

Filling: the target's layers come to the device and compute the features of the next steps, until the ring holds features.ring_gib. Emptying: they go
back to the host's memory, and training takes the steps in their order; what it has taken is freed. Batches, and so the training curve, are those of
a training with the target in the loop.

    steps:   taken | 7  8  9  10  11 | 12 ...                 of the stream
                     in the ring       not computed yet

A full ring is never empty: it holds one step, even if that alone is larger. On a disk, files belong to one process, which holds the folder's lock;
those of a killed run are removed by the next.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import UserError
from ..decode.target import Step, Target
from .objectives.common import Batch
from .store import writing
from .stream import Stream

HOST = torch.device("cpu")


@dataclass
class _Entry:
    """A step of the stream: its micro-batches, each one's features or where they are, their bytes, and where the stream stands behind it."""

    batches: list[Batch]
    features: list[dict[str, Tensor] | Path]
    size: int
    state: dict[str, Any]


class Ring:
    """A `Stream` whose batches' features are computed ahead, and their `FeatureSource`.

    room: bytes. folder: of files; None: in the host's memory. Raises UserError for a stream that hangs on what is trained, and for a folder that
    cannot be written, or that another process writes to.
    """

    ahead = True

    def __init__(self, stream: Stream, target: Target, room: int, folder: Path | None = None) -> None:
        if not stream.ahead:
            raise UserError("features.source: wanted online, as the drafter takes part in making the data, got ring")
        self.stream, self.target, self.room, self.folder = stream, target, room, folder
        self.bytes = 0
        self._entries: deque[_Entry] = deque()
        self._given: deque[tuple[Batch, dict[str, Tensor] | Path]] = deque()
        self._state = stream.state_dict()
        self._waiting: tuple[list[Batch], dict[str, Any]] | None = None  # the step that did not fit any more
        self._written = 0
        self._lock = contextlib.ExitStack()
        if folder is not None:
            self._lock.enter_context(writing(folder))
            for old in folder.glob("ring-*.safetensors"):
                old.unlink()

    def __next__(self) -> list[Batch]:
        for _, place in self._given:  # what was asked for is gone; what was not is freed now
            self._free(place)
        if not self._entries:
            self._fill()
        entry = self._entries.popleft()
        self.bytes -= entry.size
        self._state = entry.state
        self._given = deque(zip(entry.batches, entry.features, strict=True))
        return entry.batches

    def of(self, batch: Batch) -> Step:
        """The features of the micro-batches that `next` gave last, each once, in their order."""
        given, place = self._given.popleft()
        assert given.ids_BT.shape == batch.ids_BT.shape, "features are asked for in the order of the batches"
        parts = load_file(place) if isinstance(place, Path) else place
        self._free(place)
        device = self.target.device
        taps = parts.get("taps")
        return Step(parts["hidden"].to(device), None if taps is None else taps.to(device))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands behind the step that was given last, whatever was computed ahead."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there; what the ring holds is freed."""
        for place in [*(place for _, place in self._given), *(place for entry in self._entries for place in entry.features)]:
            self._free(place)
        self._given.clear()
        self._entries.clear()
        self.bytes, self._waiting = 0, None
        self.stream.load_state_dict(state)
        self._state = self.stream.state_dict()

    def close(self) -> None:
        """Free everything, let go of the folder, and bring the target back to its device."""
        self.load_state_dict(self._state)
        self._lock.close()
        self.target.move_layers(self.target.device)

    def _fill(self) -> None:
        each = self.target.hidden_size * (1 + len(self.target.taps)) * self.target.dtype.itemsize
        with on_device(self.target):
            while True:
                batches, state = self._waiting or (next(self.stream), self.stream.state_dict())
                size = each * sum(batch.ids_BT.numel() for batch in batches)
                if self._entries and self.bytes + size > self.room:
                    self._waiting = batches, state
                    return
                self._waiting = None
                self._entries.append(_Entry(batches, self._computed(batches), size, state))
                self.bytes += size

    def _computed(self, batches: list[Batch]) -> list[dict[str, Tensor] | Path]:
        features: list[dict[str, Tensor] | Path] = []
        for batch in batches:
            step = self.target.features(*(part.to(self.target.device) for part in (batch.ids_BT, batch.position_BT, batch.document_BT)))
            parts = {"hidden": step.hidden_BNH} | ({} if step.taps_BNF is None else {"taps": step.taps_BNF})
            parts = {name: part.cpu() for name, part in parts.items()}
            features.append(parts if self.folder is None else self._file(parts))
        return features

    def _file(self, parts: dict[str, Tensor]) -> Path:
        assert self.folder is not None
        path = self.folder / f"ring-{self._written:08d}.safetensors"
        self._written += 1
        try:
            save_file({name: part.contiguous() for name, part in parts.items()}, path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"features.folder: {path} cannot be written ({error}); make room, or lower features.ring_gib") from error
        return path

    @staticmethod
    def _free(place: dict[str, Tensor] | Path) -> None:
        if isinstance(place, Path):
            place.unlink(missing_ok=True)


@contextlib.contextmanager
def on_device(target: Target) -> Iterator[None]:
    """The target's layers are on its device inside, and in the host's memory behind."""
    target.move_layers(target.device)
    try:
        yield
    finally:
        target.move_layers(HOST)
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
