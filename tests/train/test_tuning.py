"""Medusa-2 by the command line, from recipe to report, and what a recipe for it must say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.prompts import render_prompt
from draftsmith.decode.target import Target
from draftsmith.eval.compare import read_entry
from draftsmith.eval.drift import measure_drift, original_outputs
from draftsmith.eval.markdown import render_markdown
from draftsmith.eval.page import render_html
from draftsmith.eval.report import read_report
from draftsmith.eval.suites import load_suite
from draftsmith.eval.wording import drift_sentence
from draftsmith.heads.registry import load_drafter
from draftsmith.recipes.schema import DrafterRecipe, TargetRef, load_recipe
from draftsmith.train import tuning
from draftsmith.train.run import main, make_objective

SMALL = ["data.num_prompts=4", "data.response_tokens=8", "train.steps=2", "train.batch_size=4", "eval.dev_prompts=2", "eval.dev_tokens=8"]
SMALL += ["eval.num_prompts=2", "eval.max_new_tokens=10", "eval.eager=false", "eval.threads=1", "eval.others=[]", "eval.bootstrap=10"]


AS_MEDUSA_1 = ["objective.name=medusa", "objective.heads_weight=null", "objective.text_weight=null", "objective.original_weight=null"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["adapter.rank=null"], "adapter.rank: wanted a rank, as the objective medusa2 trains an adapter of the target, got null"),
        (AS_MEDUSA_1, "adapter.rank: wanted null, as the objective medusa leaves the target as it is, got 8"),
        (["train.keep_features_gib=1"], "train.keep_features_gib: wanted 0"),
        ([*AS_MEDUSA_1, "adapter.rank=null", "adapter.quantise=nf4"], "adapter.quantise: wanted no"),
        ([*AS_MEDUSA_1, "adapter.rank=null", "adapter.modules=[q_proj]"], "adapter.modules: wanted null"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(settings: list[str], says: str) -> None:
    recipe = load_recipe("quickstart/medusa2", settings)
    assert isinstance(recipe, DrafterRecipe)
    with pytest.raises(UserError) as error:
        tuning.check(recipe, make_objective(recipe))
    assert str(error.value).startswith(says)


def test_from_recipe_to_a_report_that_says_how_far_the_target_moved(tmp_path: Path) -> None:
    """The figures against transformers' own forward passes of the original and the tuned model."""
    out = tmp_path / "run"
    assert main(["quickstart/medusa2", f"out={out}", *SMALL]) == 0
    report = read_report(out / "eval")
    assert all(row.passed for row in report.results) and report.drift is not None
    assert report.target["fingerprint"]["adapter"] == json.loads((out / "drafter" / "contract.json").read_text())["target"]["fingerprint"]["adapter"]
    for text in (drift_sentence(report), render_markdown(report), render_html(report)):
        assert "Not the original target: this drafter tunes it" in text and f"{report.drift.tuned_perplexity:.3f}" in text
    assert read_entry(out)[0].name.endswith(", tunes its target")

    target = Target.load(TargetRef().location)
    suite = load_suite("stdlib", 2, split="test", prompt_chars=240, seed=0)
    original = original_outputs(target, suite, 10)
    unmoved = measure_drift(target, original)
    assert unmoved.same_argmax == unmoved.same_generations == 1 and unmoved.original_perplexity == unmoved.tuned_perplexity
    assert target.tokenizer is not None and original.prompts == [render_prompt(target.tokenizer, messages) for messages in suite.prompts]
    before = _losses(target, original.prompts, original.sampled)
    load_drafter(out / "drafter", target)
    after = _losses(target, original.prompts, original.sampled)
    drift = report.drift
    assert (drift.prompts, drift.tokens) == (2, sum(map(len, original.sampled)))
    assert drift.original_perplexity == pytest.approx(math.exp(sum(nats for nats, _ in before) / drift.tokens), rel=1e-4)
    assert drift.tuned_perplexity == pytest.approx(math.exp(sum(nats for nats, _ in after) / drift.tokens), rel=1e-4)
    same = sum(int((a == b).sum()) for (_, a), (_, b) in zip(before, after, strict=True))
    assert drift.same_argmax == pytest.approx(same / drift.tokens)
    greedy = [_greedy(target, prompt, len(answer)) for prompt, answer in zip(original.prompts, original.greedy, strict=True)]
    assert drift.same_generations == sum(a == b for a, b in zip(greedy, original.greedy, strict=True)) / 2


@torch.no_grad()
def _losses(target: Target, prompts: list[list[int]], answers: list[list[int]]) -> list[tuple[float, torch.Tensor]]:
    """(sum of losses, likeliest tokens) of each answer, by transformers."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        log_p = target.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append((-float(log_p.gather(1, torch.tensor(answer)[:, None]).sum()), log_p.argmax(-1)))
    return found


@torch.no_grad()
def _greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
