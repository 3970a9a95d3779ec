"""A run goes on from its checkpoints as if nothing had happened, and what is wrong with them is found and said."""

from __future__ import annotations

import io
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from draftsmith import UserError
from draftsmith.train import checkpoint, loop
from safetensors.torch import load_file

from . import small


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    small.train(folder, "train.keep_last=9")
    return folder


def same(one: Path, other: Path) -> None:
    """To the last bit: the curve, the drafter that is the best."""
    assert small.curve(one) == small.curve(other)
    mine, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_stopped_runs_go_on_with_the_same_curve(undisturbed: Path, tmp_path: Path) -> None:
    """By a signal, three times, twice where a drafter is due to be measured: that waits for the next start, as who sends a signal does not wait."""
    for step in (1, 2, 5):
        before = small.train(tmp_path, stop=step)
        assert before[-1]["step"] == step and checkpoint.steps(tmp_path / "checkpoints") == [step + 1]
    small.train(tmp_path)
    same(tmp_path, undisturbed)
    assert len(small.curve(tmp_path)) == small.STEPS + 3


@pytest.mark.parametrize("at", ["written", "renamed"])
def test_killed_runs_go_on_with_the_same_curve(undisturbed: Path, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends while a checkpoint is written, or where the best drafter is replaced; lines after the checkpoint are not there twice."""

    class Killed(BaseException):
        """As kill -9: nothing is tidied up."""

    rename = Path.rename

    def killed(self: Path, to: Path) -> Path:
        if at == "written" and self.name == "step-00000006.partial":
            raise Killed
        moved = rename(self, to)
        if at == "renamed" and Path(to).name == "best.old" and len(small.curve(tmp_path)) > 7:
            raise Killed
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            small.train(tmp_path)
    if at == "renamed":
        assert not (tmp_path / "checkpoints" / "best").exists()
    assert len(small.curve(tmp_path)) > 6
    small.train(tmp_path)
    same(tmp_path, undisturbed)
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "checkpoints" / "best.old").exists()


def test_measuring_and_saving_do_not_change_the_curve(undisturbed: Path, tmp_path: Path) -> None:
    """dflash draws its anchors: measuring, which draws too, must not shift them."""
    curves = []
    for settings in (["eval.every=1", "train.save_every=1"], ["eval.every=99", "train.save_every=99"]):
        small.train(
            tmp_path / settings[0], "drafter.method=dflash", "objective.name=dflash", "objective.steps=null", "drafter.block_size=6", *settings
        )
        curves.append([line for line in small.curve(tmp_path / settings[0]) if "loss" in line])
    assert curves[0] == curves[1] and len(curves[0]) == small.STEPS


def test_the_newest_are_kept_and_a_damaged_one_is_passed_over(undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "checkpoints"
    small.train(tmp_path, "train.keep_last=2", stop=5)
    assert checkpoint.steps(store) == [4, 6]
    damaged = store / "step-00000006" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    small.train(tmp_path, "train.keep_last=2")
    said = capsys.readouterr().err
    assert "step-00000006: damaged (optimizer.safetensors has the sha256" in said and said.count("\n") == 1
    same(tmp_path, undisturbed)
    for step in checkpoint.steps(store):
        (store / f"step-{step:08d}" / "state.pt").unlink()
    with pytest.raises(UserError, match="all 2 are damaged"):
        small.train(tmp_path, "train.keep_last=2")


def test_a_full_disk_is_said_and_the_last_good_checkpoint_stays(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.train(tmp_path, stop=1)
    write: Any = checkpoint._write

    def full(path: Path, content: bytes) -> str:
        if path.name == "optimizer.safetensors":
            path.write_bytes(content[:100])
            raise OSError(28, os.strerror(28))
        return str(write(path, content))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", full)
        with pytest.raises(UserError, match=r"step-00000004: cannot be written \(No space left on device\); the checkpoint of step 2 is intact"):
            small.train(tmp_path)
    assert checkpoint.steps(tmp_path / "checkpoints") == [2] and not list(tmp_path.rglob("*.partial"))
    small.train(tmp_path)
    same(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (100_000, r"step-00000004: cannot be written \(File too large\); the checkpoint of step 2 is intact"),  # between model and optimizer
        (60_000, r"best: cannot be written \(File too large\); the checkpoint of step 2 is intact"),
    ],
)
def test_a_disk_that_takes_no_more_is_said_and_nothing_is_lost(undisturbed: Path, tmp_path: Path, room: int, says: str) -> None:
    """The system itself refuses, wherever a file would grow beyond `room` bytes: a checkpoint, the best drafter."""
    small.train(tmp_path, stop=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(UserError, match=says):
            small.train(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.steps(tmp_path / "checkpoints") == [2] and not list((tmp_path / "checkpoints").glob("step-*.partial"))
    small.train(tmp_path)
    same(tmp_path, undisturbed)


def test_a_log_that_takes_no_more_is_said(tmp_path: Path) -> None:
    """What it could not write stands in the way of its end as well, which must not hide the line."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, os.strerror(28))

        close = flush

    log = loop.Log(tmp_path, 0, Accelerator())
    log.close()
    log._handle = Full()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(No space left on device\); there is no checkpoint from before"):
        log.write({"step": 1, "loss": 2.0})
    log.close()


def test_manifests_hold_the_hashes_of_all_files(undisturbed: Path) -> None:
    for step in checkpoint.steps(undisturbed / "checkpoints"):
        folder = undisturbed / "checkpoints" / f"step-{step:08d}"
        assert set(json.loads((folder / "manifest.json").read_text())["sha256"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
