"""A draft model's run, stopped in the middle of what the draft has written, goes on along the same curve: whole weights, and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftsmith.train import starts
from safetensors.torch import load_file

from . import small

DRAFT = ["drafter.method=draft_model", "objective.name=null", "objective.steps=null", "objective.step_decay=null", "drafter.init=target"]
DRAFT += ["drafter.taps=null", "drafter.draft_vocab_size=null", "drafter.num_layers=1", "data.response_tokens=6", "export.formats=[]"]
DRAFT += ["train.on_policy=0.5", "train.on_policy_refresh=6", "decode.tree=chain", "decode.nodes=null"]


@pytest.mark.parametrize("adapters", [[], ["drafter.lora_rank=3"]], ids=["whole", "lora"])
def test_a_run_stopped_between_refreshes_goes_on_with_the_same_curve(adapters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "load_drafter", lambda *_: None)  # the small target has no tokenizer, without which no folder is read
    one, other = tmp_path / "one", tmp_path / "other"
    small.train(one, *DRAFT, *adapters)
    small.train(other, *DRAFT, *adapters, stop=3)  # for step 5 the draft of step 1 has written
    small.train(other, *DRAFT, *adapters)
    curve = small.curve(one)
    assert small.curve(other) == curve and len({entry["loss"] for entry in curve if "loss" in entry}) == small.STEPS
    mine, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
