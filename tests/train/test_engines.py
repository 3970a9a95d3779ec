"""Two processes under DDP, FSDP2, ZeRO-2 and ZeRO-3 compute what one process does, and go on from each other's checkpoints."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from . import small

RELATIVE = 1e-5  # of losses and gradient norms, float32: processes add up gradients in another order
ABSOLUTE = 2e-5  # of weights after the run: steps of AdamW are as large for small gradients as for others
MOMENTS = 1e-4  # of AdamW's moments, of the largest


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (the extra [deepspeed])")
    folder = tmp_path_factory.mktemp("engines")
    small.train(folder / "one-two", stop=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(Path(small.__file__)), str(folder)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    small.train(folder / "two-one")
    small.train(folder / "single")
    small.train(folder / "single-hard", *small.HARD)
    small.train(folder / "single-muon", "train.optimizer=muon", "train.lr=1e-2")
    return folder


def close(one: Path, other: Path) -> None:
    mine, theirs = small.curve(one), small.curve(other)
    assert [line["step"] for line in mine] == [line["step"] for line in theirs] and len(mine) == small.STEPS + 3
    for a, b in zip(mine, theirs, strict=True):
        assert a == pytest.approx(b, rel=RELATIVE)
    first, second = (load_file(folder / "checkpoints" / f"step-{small.STEPS:08d}" / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=ABSOLUTE, rtol=0)


@pytest.mark.parametrize("name", list(small.ENGINES))
def test_the_curve_is_that_of_one_process(runs: Path, name: str) -> None:
    close(runs / name, runs / "single")


def test_muon_under_fsdp2_is_that_of_one_process(runs: Path) -> None:
    close(runs / "fsdp2-muon", runs / "single-muon")


def test_a_draft_that_learns_from_texts_under_fsdp2_is_that_of_one_process(runs: Path) -> None:
    close(runs / "fsdp2-hard", runs / "single-hard")


@pytest.mark.parametrize("name", ["ddp-shards", "fsdp2-shards"])
def test_a_target_in_shards_gives_the_same_curve(runs: Path, name: str) -> None:
    close(runs / name, runs / "single")


@pytest.mark.parametrize("name", ["fsdp2-again", "zero3-again"])
def test_activations_are_computed_again_where_parameters_are_gathered(runs: Path, name: str) -> None:
    close(runs / name, runs / "single")


@pytest.mark.parametrize("name", ["one-two", "two-one", "relay"])
def test_another_number_of_processes_goes_on_with_the_same_data(runs: Path, name: str) -> None:
    """Begun by one process and ended by two, and the other way round: every micro-batch is seen once, and the curve is the undisturbed one."""
    assert small.seen(runs / name) == small.seen(runs / "single")
    assert [line[:2] for line in small.seen(runs / name)] == [[step, number] for step in range(small.STEPS) for number in range(4)]
    close(runs / name, runs / "single")


def test_one_engine_goes_on_from_the_checkpoint_of_another(runs: Path) -> None:
    close(runs / "relay", runs / "single")


def test_checkpoints_hold_the_whole_state_whatever_engine_wrote_them(runs: Path) -> None:
    """The optimizer's state is whole, wherever it comes from, and that of one process."""
    newest = f"checkpoints/step-{small.STEPS:08d}/optimizer.safetensors"
    wanted = load_file(runs / "single" / newest)
    for name in (*small.ENGINES, "relay"):
        found = load_file(runs / name / newest)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, atol=MOMENTS * float(value.abs().max()), rtol=0)
