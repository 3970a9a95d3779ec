"""What stops a training in good order, launches that are not what was asked for, and the configurations for launching."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from draftsmith import UserError
from draftsmith.recipes.schema import launch_files, list_recipes, read_recipe_text
from draftsmith.train import launch, loop
from draftsmith.train.engines import FSDP2, Plain, ZeRO, configured, deepspeed_config
from draftsmith.train.guard import Diverged, Interrupts, leap
from draftsmith.train.objectives.eagle3 import Eagle3Objective

from . import small


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_before_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The run's last checkpoint is from before, and the batch can be looked at."""
    called, original = [0], Eagle3Objective.__call__

    def spoilt(self: Eagle3Objective, model: Any, drafter: Any, *rest: Any) -> Any:
        loss, metrics = original(self, model, drafter, *rest)
        called[0] += 1
        if called[0] == 4 * 4 + 2:  # of step 4, the second of four micro-batches
            zero = next(drafter.parameters()).sum() * 0
            loss = loss + (torch.log(zero) if what == "loss" else torch.sqrt(zero))
        return loss, metrics

    monkeypatch.setattr(Eagle3Objective, "__call__", spoilt)
    with pytest.raises(Diverged, match=r"step 4: the .*not finite.*stopped-step-00000004-process-0\.pt"):
        small.train(tmp_path)
    assert small.curve(tmp_path)[-1]["step"] == 3
    kept = torch.load(tmp_path / "stopped-step-00000004-process-0.pt", weights_only=True)
    finite = [value == value and abs(value) != float("inf") for value in kept["losses"]]
    assert finite == [True, what != "loss", True, True] and len(kept["micro_batches"]) == 4
    assert kept["micro_batches"][1]["ids_BT"].shape[0] == 1
    monkeypatch.setattr(Eagle3Objective, "__call__", original)
    assert len(small.train(tmp_path)) == small.STEPS + 3  # the same command goes on


def test_the_drafters_gradient_never_reaches_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small.target()
    monkeypatch.setattr(small, "target", lambda: target)
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    small.train(tmp_path, "train.steps=2")
    for name, p in target.model.named_parameters():
        assert p.grad is None and not p.requires_grad and torch.equal(p, before[name])


def test_gradients_that_leap_are_noticed() -> None:
    norms: list[float] = []
    assert [leap(norms, 1.0) for _ in range(20)] == [None] * 20
    assert leap(norms, 9.0) is None and leap(norms, 50.0) == 50
    for _ in range(100):
        leap(norms, 2.0)
    assert len(norms) == 64


@pytest.fixture
def other_precision() -> Iterator[None]:
    """accelerate keeps the precision of its first user for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("other_precision")
def test_float16s_scale_is_gone_on_with_and_a_step_that_it_left_out_is_a_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is halved by the steps that overflow: a run that began anew with it would leave out other steps than the undisturbed one."""

    def accelerator() -> Accelerator:
        made = Accelerator(mixed_precision="fp16")
        made.scaler, made.native_amp = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60), True  # as on a GPU
        return made

    monkeypatch.setattr(small, "Accelerator", accelerator)
    whole = small.train(tmp_path / "whole", "train.micro_batch_size=4")
    small.train(tmp_path / "stopped", "train.micro_batch_size=4", stop=0)
    assert small.train(tmp_path / "stopped", "train.micro_batch_size=4") == whole
    norms = [line["gradient_norm"] for line in whole if "gradient_norm" in line]
    assert norms[0] is None and norms[-1] is not None  # a loss of 4 at the first scale is beyond float32


def test_flops_utilisation_counts_the_steps_that_were_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come every third step, at the start, and behind a leap; every step takes a second of a device whose peak is known."""

    class Clock:
        steps = 0

        def __init__(self, device: Any) -> None: ...

        def __call__(self, part: str) -> Any:
            self.steps += part == "optimizer"
            return contextlib.nullcontext()

        def read(self) -> dict[str, float]:
            steps, self.steps = self.steps, 0
            return {"optimizer": float(steps)}

    monkeypatch.setattr(loop, "Clock", Clock)
    monkeypatch.setattr(loop, "peak_flops", lambda device: 1e9)
    monkeypatch.setattr(loop, "leap", lambda norms, norm: norms.append(norm) or (50.0 if len(norms) == 2 else None))
    small.train(tmp_path, "train.log_every=3", stop=4)
    small.train(tmp_path, "train.log_every=3")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    used = {line["step"]: line["mfu"] for line in lines if "loss" in line}
    assert list(used) == [0, 1, 3, 5, 6] and all(value == pytest.approx(used[0], rel=0.2) for value in used.values())


def test_processes_that_a_signal_ends_are_named(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a process when memory runs out, which then cannot say so."""
    started = subprocess.Popen
    die = [sys.executable, "-c", "import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); import time; time.sleep(9)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: started(die, **rest))
    monkeypatch.setattr(launch, "PATIENCE", 0.1)
    assert launch.run_processes([], 2) == 137
    assert "error: process 1 was ended by SIGKILL" in capfd.readouterr().err


def test_a_second_signal_acts_at_once_but_not_a_launchers_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored: shells do that to what they start in the background
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert interrupts.number == signal.SIGINT
            now[0] = 5.0
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_dropped_processes_are_found_whoever_asked_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("num_processes: 4\nuse_cpu: true\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    asked = launch.asked_of_accelerate
    assert asked(["accelerate", "launch", "--cpu", "--num_processes", "2", "x"]) == asked(["accelerate", "launch", "--num-processes=2"]) == 2
    assert asked(["accelerate", "launch", "--config_file", str(config)]) == 4
    assert asked(["accelerate", "launch", f"--config_file={config}", "--num_processes", "1"]) == 1
    assert asked(["accelerate", "launch", "-m", "draftsmith.train"]) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")

    class Alone:
        num_processes = 1

    with pytest.raises(UserError, match=r"processes: wanted 2, got 1.*ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2"):
        launch.check_engaged(Alone())


def test_an_engine_that_cannot_be_engaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured() is Plain
    for engine, says in (("fsdp2", "FSDP was configured"), ("zero2", "DeepSpeed was configured")):
        with small.engine(engine), pytest.raises(UserError, match=f"launch: {says}, but this is one process"):
            configured()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with small.engine("fsdp2"):
        assert configured() is FSDP2
        monkeypatch.setenv("FSDP_VERSION", "1")
        with pytest.raises(UserError, match="wanted fsdp_version: 2"):
            configured()
    with small.engine("zero3"):
        assert configured() is ZeRO


def test_launch_configurations_are_no_recipes_but_can_be_copied() -> None:
    files = launch_files()
    assert set(files) == {f"accelerate/{name}" for name in ("single", "ddp", "fsdp2", "zero2", "zero3", "multi_node")}
    assert not {info.name for info in list_recipes()} & set(files)
    for name in files:
        text = read_recipe_text(name)
        config = yaml.safe_load(text)
        assert config["use_cpu"] is False and config["mixed_precision"] == "no" and "-m draftsmith.train RECIPE" in text
    kinds = [yaml.safe_load(read_recipe_text(f"accelerate/{name}"))["distributed_type"] for name in ("ddp", "fsdp2", "zero2", "zero3")]
    assert kinds == ["MULTI_GPU", "FSDP", "DEEPSPEED", "DEEPSPEED"]


def test_deepspeeds_configuration_leaves_to_the_recipe_what_is_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed (the extra [deepspeed])")
    with small.engine("zero3"):
        assert deepspeed_config()["zero_optimization"]["stage"] == 3
        path = tmp_path / "ds.json"
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
        path.write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"}}')
        assert deepspeed_config()["zero_optimization"] == {"stage": 2}
        path.write_text('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}')
        with pytest.raises(UserError, match="wanted no optimizer"):
            deepspeed_config()
