"""A training small enough to be run many times: a tiny random target, random sequences, and a stand-in for measured decoding.

Run by a launcher, it trains under every engine in turn (see `main`): torchrun --nproc_per_node 2 tests/train/small.py FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from draftsmith.decode.target import Target
from draftsmith.recipes.schema import DrafterRecipe, load_recipe
from draftsmith.train import engines, judging, loop, starts
from draftsmith.train.guard import Interrupted
from draftsmith.train.run import make_objective
from draftsmith.train.sharding import shard_target
from draftsmith.train.templates import Sample
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS = 8
ENGINES = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}

HARD = ["drafter.method=draft_model", "objective.name=null", "objective.steps=null", "objective.step_decay=null", "drafter.draft_vocab_size=null"]
HARD += ["drafter.taps=null", "drafter.num_layers=1", "drafter.hidden_size=16", "objective.labels=hard", "objective.loss=ce", "data.train_on=all"]


def recipe(*settings: str) -> DrafterRecipe:
    base = ["drafter.taps=[1, 2, 3]", "drafter.draft_vocab_size=60", "train.optimizer=adamw", "train.lr=3e-3", "data.train_on=responses"]
    base += [f"train.steps={STEPS}", "train.batch_size=4", "train.micro_batch_size=1", "train.log_every=1", "eval.every=3", "train.save_every=2"]
    made = load_recipe("quickstart/eagle3", [*base, *settings])
    assert isinstance(made, DrafterRecipe)
    return made


def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    return Target(AutoModelForCausalLM.from_config(config), None, "small")


def sequences(count: int = 14) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(12, 20, (count,), generator=generator).tolist()
    return [Sample(torch.randint(3, 97, (length,), generator=generator).tolist(), [(4, length)]) for length in lengths]


def fake_tau(recipe: DrafterRecipe, target: Target, drafter: Any) -> float:
    """Reads all weights, and draws, as measuring does. Here it rises, as weights shrink."""
    assert not drafter.training
    torch.rand(7)
    return 2000 - sum(float(p.detach().abs().sum()) for p in drafter.parameters())


@contextmanager
def watched(folder: Path, stop: int | None) -> Iterator[None]:
    """SIGTERM comes while the loss of step `stop` is formed. Every micro-batch's rows are written down: see `seen`."""
    draw, forward = loop.draw_seed, engines.Loss.forward
    at = (0, 0)

    def draw_seed(seed: int, step: int, micro_batch: int) -> int:
        nonlocal at
        if step == stop and at[0] != step:
            os.kill(os.getpid(), signal.SIGTERM)
        at = step, micro_batch
        return draw(seed, step, micro_batch)

    def noting(self: Any, target: Target, batch: Any, read: Any) -> Any:
        with (folder / f"seen-{os.environ.get('RANK', '0')}.jsonl").open("a") as handle:
            handle.write(json.dumps([*at, batch.sequence_B]) + "\n")
        return forward(self, target, batch, read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_seed", draw_seed)
        patch.setattr(engines.Loss, "forward", noting)
        yield


def seen(folder: Path) -> list[Any]:
    """[step, micro-batch, its rows] of all that was trained on, by all processes, in order."""
    return sorted(json.loads(line) for path in folder.glob("seen-*.jsonl") for line in path.read_text().splitlines())


def train(folder: Path, *settings: str, stop: int | None = None) -> list[dict[str, Any]]:
    """Train, or go on; stop in good order after a step. Returns the curve."""
    made = recipe(*settings)
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, watched(folder, stop):
        patch.setattr(loop, "measured_tau", fake_tau)
        patch.setattr(judging, "load_whole", lambda *_: target())
        patch.setattr(starts, "load_drafter", lambda *_: None)  # no folder of a draft model is read without a tokenizer
        try:
            accelerator, frozen = Accelerator(), target()
            if made.target.shard:
                shard_target(frozen, accelerator)
            loop.fit(made, make_objective(made), folder, accelerator, frozen, sequences())
            if made.target.shard:  # it was cut up, and each layer was put back in its shards
                assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in frozen.layers.parameters())
        except Interrupted:
            assert stop is not None
    return curve(folder)


def curve(folder: Path) -> list[dict[str, Any]]:
    """What of metrics.jsonl does not hang on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "gradient_norm", "measured_tau") if key in line} for line in lines]


def main(folder: Path) -> None:
    """A run under each engine, one under FSDP2 with Muon, and one in which each engine goes on from the checkpoint of the one before."""
    for name in ENGINES:
        with engine(name):
            train(folder / name)
    with engine("fsdp2"):
        train(folder / "fsdp2-muon", "train.optimizer=muon", "train.lr=1e-2")
    with engine("fsdp2"):  # a draft model that learns from texts needs no features of the target
        train(folder / "fsdp2-hard", *HARD)
    for name in ("ddp", "fsdp2"):
        with engine(name):
            train(folder / f"{name}-shards", "target.shard=true", "train.keep_features_gib=0")
    for name in ("fsdp2", "zero3"):
        with engine(name):
            train(folder / f"{name}-again", "train.activation_checkpointing=true")
    with engine("ddp"):
        train(folder / "one-two")  # begun by one process
        train(folder / "two-one", stop=3)  # ended by one
    for name, stop in (("zero3", 0), ("ddp", 1), ("fsdp2", 3), ("zero2", 4), ("zero3", 6), ("fsdp2", None)):
        with engine(name):
            train(folder / "relay", stop=stop)


@contextmanager
def engine(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in ENGINES[name].items():
            patch.setenv(key, value)
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]))
