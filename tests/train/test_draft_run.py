"""A draft model by the command line: what a new user does, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.heads.acceptance import FILE
from draftsmith.recipes.schema import DrafterRecipe, load_recipe
from draftsmith.train import run as stages
from draftsmith.train.run import run
from draftsmith.train.starts import check_draft, start_draft
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ..heads.tiny import tiny_target

SMALL = [
    "data.num_prompts=12",
    "data.response_tokens=12",
    "data.prompt_chars=80",
    "data.generation_batch=12",
    "eval.dev_prompts=2",
    "eval.dev_tokens=6",
]
SMALL += ["eval.num_prompts=2", "eval.max_new_tokens=8", "eval.timed_prompts=1", "eval.eager=false", "eval.threads=1", "eval.others=[]"]


def recipe(*settings: str, name: str = "quickstart/draft") -> DrafterRecipe:
    loaded = load_recipe(name, [*SMALL, *settings])
    assert isinstance(loaded, DrafterRecipe)
    return loaded


def test_a_run_ends_with_a_draft_that_transformers_loads(tmp_path: Path) -> None:
    """On-policy text, adapters and a predictor at once; then the draft is where another run starts from."""
    settings = ["train.steps=4", "train.on_policy=0.5", "train.on_policy_refresh=2", "drafter.lora_rank=4", "drafter.predictor=true"]
    assert run(recipe(*settings, f"out={tmp_path / 'one'}")) == 0
    folder = tmp_path / "one" / "drafter"
    report = json.loads((tmp_path / "one" / "eval" / "report.json").read_text())
    assert report["drafter"]["method"] == "draft_model" and all(row["lossless"]["status"] == "pass" for row in report["results"])
    assert 0 <= report["training"]["predictor"]["ece"] <= 1 and (folder / FILE).is_file()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 1 and not any("lora" in name for name, _ in model.named_parameters())
    again = ["drafter.init=" + str(folder), "drafter.num_layers=null", "drafter.intermediate_size=null", "train.steps=1"]
    assert run(recipe(*again, "data.responses=given", "objective.labels=hard", "objective.loss=ce", f"out={tmp_path / 'two'}")) == 0
    assert json.loads((tmp_path / "two" / "training.json").read_text())["best_step"] == 1


def test_another_tokenizer_is_found_before_any_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)  # no weights beside it: they would not be missed

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(stages, "load_target", fail)
    cut = ["drafter.num_layers=null", "drafter.intermediate_size=null"]
    with pytest.raises(UserError, match=r"wanted the tokenizer of target .* got one in which .* tokens differ"):
        run(recipe(f"drafter.init={tmp_path}", *cut, f"out={tmp_path / 'run'}"))
    with pytest.raises(UserError, match=r"drafter\.init nowhere/at_all: its tokenizer cannot be loaded"):
        check_draft(recipe("drafter.init=nowhere/at_all"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["drafter.num_layers=null", "drafter.intermediate_size=null"], r"drafter\.num_layers: wanted a smaller size than the target's"),
        (["drafter.num_layers=9"], r"drafter\.num_layers: wanted at most the 4 of the model to start from, got 9"),
        (["drafter.init=null", "drafter.lora_rank=4"], r"drafter\.lora_rank: wanted null, as drafter\.init is null"),
        (["drafter.lora_alpha=4"], r"drafter\.lora_alpha: wanted null, as drafter\.lora_rank is null"),
        (["drafter.init=some/model", "drafter.num_layers=null", "drafter.intermediate_size=null", "drafter.prune_by=loss"], "no size is given"),
        (["drafter.block_size=4", "drafter.predictor=true"], r"drafter\.predictor: wanted false, as drafter\.block_size is given"),
        (["drafter.taps=[1]"], r"drafter\.taps: wanted null, as the method draft_model has no such setting"),
    ],
)
def test_starts_that_cannot_be_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        start_draft(recipe(*settings).drafter, tiny_target(), [])


def test_a_random_start_is_of_the_sizes_that_were_given() -> None:
    sizes = ["drafter.init=null", "drafter.hidden_size=16", "drafter.num_heads=2", "drafter.num_kv_heads=1", "drafter.intermediate_size=20"]
    target = tiny_target()
    draft = start_draft(recipe(*sizes).drafter, target, [])
    config = draft.causal_lm.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads) == (1, 16, 20, 2)
    assert (
        config.head_dim == target.config.head_dim
        and sum(p.numel() for p in draft.parameters()) == 2 * 97 * 16 + 2 * (16 + 8) * 16 + 3 * 16 * 20 + 3 * 16
    )


def test_heads_write_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.on_policy: wanted 0 for the method medusa, which writes no text, got 0\.5"):
        run(recipe("train.on_policy=0.5", "drafter.draft_vocab_size=64", f"out={tmp_path}", name="quickstart/medusa"))
    with pytest.raises(UserError, match=r"drafter\.predictor: wanted null, as the method medusa has no such setting"):
        run(recipe("drafter.predictor=true", f"out={tmp_path / 'b'}", name="quickstart/medusa"))
