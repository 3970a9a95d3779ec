"""Checkpoints that a run goes on from: whole or not there, with the hash of every file, the newest few kept.

    checkpoints/step-00000150/model.safetensors       every parameter and buffer, by name
    checkpoints/step-00000150/optimizer.safetensors   parameter/moment, whole, whatever engine wrote it
    checkpoints/step-00000150/state.pt                step, stream, best so far, spent time, place in metrics.jsonl
    checkpoints/step-00000150/manifest.json           sha256 of each of the others
    checkpoints/best/                                 the drafter that measured best, as users load it: not counted, never deleted

What an objective draws at random depends on seed, step and micro-batch alone (`loop.draw_seed`), so there is no random state to keep.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .. import UserError
from .engines import OptimizerState

_NAME = re.compile(r"step-(\d{8})")


@dataclass
class Checkpoint:
    """What a run goes on from. state: plain values and tensors."""

    model: dict[str, Tensor]
    optimizer: OptimizerState
    state: dict[str, Any]


def write(folder: Path, step: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write the checkpoint of a step under `folder`, then delete all but the newest `keep`. Raises UserError if there is no room for it."""
    final = folder / f"step-{step:08d}"
    draft = final.with_name(final.name + ".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        flat = {f"{name}/{key}": tensor for name, moments in checkpoint.optimizer.items() for key, tensor in moments.items()}
        hashes = {
            "model.safetensors": _write(draft / "model.safetensors", save(checkpoint.model)),
            "optimizer.safetensors": _write(draft / "optimizer.safetensors", save(flat)),
            "state.pt": _write(draft / "state.pt", _packed(checkpoint.state)),
        }
        _write(draft / "manifest.json", (json.dumps({"step": step, "sha256": hashes}, indent=2) + "\n").encode())
        _sync(draft)
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise _full(f"checkpoint {final}", folder, error) from error
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)
    return final


@contextlib.contextmanager
def on_disk(path: Path, folder: Path) -> Iterator[None]:
    """Around what writes to `path`: a disk that is full is the user's affair (UserError), and so is what there is in `folder` to go on from."""
    try:
        yield
    except OSError as error:
        raise _full(str(path), folder, error) from error
    except SafetensorError as error:  # its writer tells of the system's errors in its text alone
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise _full(str(path), folder, OSError(int(number[1]), os.strerror(int(number[1])))) from error


def _full(what: str, folder: Path, error: OSError) -> UserError:
    last = next(iter(reversed(steps(folder))), None)
    good = f"the checkpoint of step {last} is intact" if last is not None else "there is no checkpoint from before"
    return UserError(f"{what}: cannot be written ({error.strerror or error}); {good}; make room, then start the same command again to go on")


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints there, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name)))


def read_newest(folder: Path, say: Any) -> Checkpoint | None:
    """The newest checkpoint that is as it was written. say: called with a line for each that is damaged.

    Raises UserError if there are only damaged ones.
    """
    found = steps(folder)
    for step in reversed(found):
        path = folder / f"step-{step:08d}"
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"checkpoint {path}: damaged ({error}); the one before it is used")
    if found:
        raise UserError(f"checkpoints {folder}: all {len(found)} are damaged; delete them to start from the beginning")
    return None


def _read(path: Path) -> Checkpoint:
    manifest = json.loads((path / "manifest.json").read_text())
    content = {}
    for name, wanted in manifest["sha256"].items():
        content[name] = (path / name).read_bytes()
        if (got := hashlib.sha256(content[name]).hexdigest()) != wanted:
            raise ValueError(f"{name} has the sha256 {got[:12]}.., not {wanted[:12]}..")
    optimizer: OptimizerState = {}
    for name, tensor in load(content["optimizer.safetensors"]).items():
        parameter, _, key = name.rpartition("/")
        optimizer.setdefault(parameter, {})[key] = tensor
    return Checkpoint(load(content["model.safetensors"]), optimizer, _unpacked(content["state.pt"]))


def recover_best(folder: Path) -> None:
    """Put back the best drafter if the process was killed while a better one took its place."""
    best, old = folder / "best", folder / "best.old"
    if old.is_dir():
        if best.is_dir():
            shutil.rmtree(old)
        else:
            old.rename(best)


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return state


def _write(path: Path, content: bytes) -> str:
    with path.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    return hashlib.sha256(content).hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
