"""A training from a store: the same curve as with the target in the loop, without the target's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.light import LightTarget, checkpoint_print
from draftsmith.decode.target import Target
from draftsmith.recipes.schema import DrafterRecipe, TargetRef, load_recipe
from draftsmith.train import run as runs
from draftsmith.train.plan import make_plan
from draftsmith.train.storing import make_store, verify_store
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..decode.sizes import SIZES

SMALL = [
    "data.num_prompts=6",
    "data.response_tokens=12",
    "data.generation_batch=8",
    "train.steps=4",
    "train.batch_size=2",
    "train.micro_batch_size=1",
    "train.log_every=1",
    "train.keep_features_gib=0",
    "eval.every=2",
    "eval.dev_prompts=1",
    "eval.tune=false",
    "eval.dev_tokens=4",
    "eval.num_prompts=1",
    "eval.max_new_tokens=4",
    "eval.timed_prompts=1",
    "eval.bootstrap=20",
    "eval.threads=1",
    "eval.eager=false",
    "export.formats=[]",
]


def recipe(folder: Path, *more: str) -> DrafterRecipe:
    loaded = load_recipe("quickstart/eagle3", [*SMALL, f"out={folder}", *more])
    assert isinstance(loaded, DrafterRecipe)
    return loaded


def losses(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def trained(settings: DrafterRecipe, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run without the evaluation at the end."""
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_conclude", lambda *arguments: 0)
        return runs.run(settings)


def test_online_and_stored_features_give_the_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, stored = Console(quiet=True), [f"features.folder={tmp_path / 'f'}", "features.source=store"]
    assert trained(recipe(tmp_path / "online"), monkeypatch) == 0
    store = make_store(recipe(tmp_path / "none", *stored), quiet)
    assert store.saved.layers == (4, 8, 11, 13) and store.saved.dtype == "float32" and not (tmp_path / "none").exists()
    assert verify_store(recipe(tmp_path / "none", *stored), quiet)

    def refuse(*arguments: Any, **settings: Any) -> Target:
        raise AssertionError("the whole target was loaded")

    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", refuse)
        assert runs.run(recipe(tmp_path / "stored", *stored, "features.measure=loss")) == 0
    online = losses(tmp_path / "online")
    assert len(online) == 4 and losses(tmp_path / "stored") == pytest.approx(online, abs=1e-4)
    entries = [json.loads(line) for line in (tmp_path / "stored" / "metrics.jsonl").read_text().splitlines()]
    judged = [entry["mean_loss"] for entry in entries if "mean_loss" in entry]
    assert judged == pytest.approx([sum(online[:2]) / 2, sum(online[2:]) / 2], abs=1e-4)
    contracts = [json.loads((tmp_path / name / "drafter" / "contract.json").read_text()) for name in ("online", "stored")]
    assert contracts[0]["target"] == contracts[1]["target"] and "mean_loss" in contracts[1]

    # With measured decoding the target is loaded for it, and the report is made.
    assert runs.run(recipe(tmp_path / "measured", *stored)) == 0
    assert losses(tmp_path / "measured") == losses(tmp_path / "stored")
    assert (tmp_path / "measured" / "eval" / "report.json").is_file()

    # A ring that holds a step or two.
    assert trained(recipe(tmp_path / "ring", "features.source=ring", "features.ring_gib=0.0005", "features.ring_on=disk"), monkeypatch) == 0
    assert losses(tmp_path / "ring") == online
    assert not list((tmp_path / "ring").rglob("ring-*.safetensors"))

    plan = make_plan(recipe(tmp_path / "plan", *stored), runs.make_objective(recipe(tmp_path / "plan", *stored)), activations=False)
    assert plan.disk["features (store)"] == 0  # it is whole, though its texts were shorter than they may be

    with pytest.raises(UserError, match=r"data .*responses.jsonl: made for another target or other data settings"):
        runs.run(recipe(tmp_path / "other", *stored, "data.seed=1"))
    with pytest.raises(UserError, match=r"drafter.taps: wanted layers that the store \S+ holds \(4, 8, 11, 13\), got 3; give"):
        runs.run(recipe(tmp_path / "taps", *stored, "drafter.taps=[3, 8, 11]"))
    (tmp_path / "f" / "data" / "responses.jsonl").unlink()
    with pytest.raises(UserError, match=r"features.folder: wanted \S+responses.jsonl, the answers that the features were made of, got none"):
        runs.run(recipe(tmp_path / "gone", *stored, "features.measure=loss"))
    # Those of a run that has the same are as good.
    made = tmp_path / "gone" / "data" / "responses.jsonl"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_bytes((tmp_path / "online" / "data" / "responses.jsonl").read_bytes())
    assert trained(recipe(tmp_path / "gone", *stored, "features.measure=loss"), monkeypatch) == 0
    assert losses(tmp_path / "gone") == losses(tmp_path / "stored")


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "gemma3_text": {},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "granite": {"logits_scaling": 3.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_without_layers_is_the_same_in_all_that_training_reads(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind])).save_pretrained(tmp_path / "t")
    AutoTokenizer.from_pretrained(TargetRef().location).save_pretrained(tmp_path / "t")
    whole, light = Target.load(str(tmp_path / "t")), LightTarget.load(str(tmp_path / "t"))
    assert light.recognise(whole.fingerprint(), checkpoint_print(whole)) == [] and light.fingerprint() == whole.fingerprint()
    assert (light.num_layers, light.vocab_size, light.hidden_size, light.max_positions) == (4, 97, 32, whole.max_positions)
    count = sum(p.numel() for p in light.model.parameters())
    assert count < 0.6 * sum(p.numel() for p in whole.model.parameters())
    hidden = torch.randn(5, 32)
    assert torch.equal(light.logits(hidden), whole.logits(hidden))
    ids = torch.arange(9)
    assert torch.equal(light.embeddings(ids), whole.embeddings(ids))
    light = LightTarget.load(str(tmp_path / "t"))
    differing = light.recognise(whole.fingerprint() | {"config": "x"}, "y")
    assert [text.split(" ")[0] for text in differing] == ["checkpoint", "config"]
