"""Every method learns eight short texts by heart: what it then drafts is accepted nearly whole. All by one harness, at one depth.

Texts are sampled (greedy ones of a random model soon repeat themselves, so that a head which is off by one would do as well), and decoded again
with the same seeds. A round of a chain of 4 gives 5 tokens at most, and the texts are whole rounds long. The target is sure of most of its
tokens: were its distributions flat, the noise that it shares with the drafter would make both choose the same without any learning.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.adapter import TunableTarget
from draftsmith.heads.registry import METHODS, new_head
from draftsmith.train.data import collate
from draftsmith.train.objectives import OBJECTIVES
from draftsmith.train.optimizers import muon_and_adamw
from draftsmith.train.templates import Sample
from transformers import AutoModelForCausalLM, LlamaConfig

from ..decode.sizes import SIZES
from .tiny import random_ids

DEPTH, ROUNDS = 4, 3
MOST = DEPTH + 1
NEARLY = 0.8 * MOST
PARAMS = [SamplingParams(temperature=1.0, seed=n) for n in range(8)]
BLOCK = {"block_size": 5, "num_layers": 2}
EVENLY = {"step_decay": 1.0}
# By objective: the method, its settings, the objective's, and training steps.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "dflash": ("dflash", BLOCK, {"anchors": 16, **EVENLY}, 150),
    "dspark": ("dspark", {**BLOCK, "markov_rank": 8, "block_size": 4}, {"anchors": 16, **EVENLY}, 150),
    "eagle1": ("eagle1", {}, {"feature_noise": 0.0, "feature_weight": 10.0}, 220),
    "eagle3": ("eagle3", {}, EVENLY, 120),
    "hass": ("eagle1", {}, {"feature_noise": 0.0, "steps": 4}, 120),
    "hydra": ("hydra", {"prefix_attention": True}, {"labels": "hard"}, 50),
    "medusa": ("medusa", {}, {"labels": "hard"}, 60),
    "medusa2": ("medusa", {}, {"labels": "hard"}, 60),
    "mlp_speculator": ("mlp_speculator", {}, {"labels": "hard"}, 50),
    "mtp": ("mtp", {}, {"steps": 4, **EVENLY}, 100),
    "p_eagle": ("p_eagle", {**BLOCK, "block_size": 4}, {"anchors": 16, **EVENLY}, 130),
}


def sure_target() -> Target:
    """Larger than other tests', so that there is room for eight texts."""
    torch.manual_seed(0)
    wider = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | wider))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
        model.lm_head.weight.mul_(12)
    return Target(model, None, "sure")


def texts(target: Target) -> list[list[int]]:
    """What the target says after each prompt."""
    return Engine(target).generate(prompts(), PARAMS, 1 + ROUNDS * MOST).tokens


def prompts() -> list[list[int]]:
    return [row.tolist() for row in random_ids(8, 4, seed=7)]


@pytest.mark.parametrize("name", CASES)
def test_eight_texts_are_learnt_by_heart(name: str) -> None:
    method, settings, weights, steps = CASES[name]
    target = sure_target()
    said = texts(target)
    batch = collate([Sample([*prompt, *text], [(0, len(prompt) + len(text))]) for prompt, text in zip(prompts(), said, strict=True)])
    torch.manual_seed(0)
    if OBJECTIVES[name].tunes_target:
        target = TunableTarget(target, rank=2)
    head = new_head(method, target, settings)
    head.set_draft_vocabulary(torch.arange(target.vocab_size), target)
    objective = OBJECTIVES[name].of(weights)
    optimizers = muon_and_adamw(head, 1e-2, (0.9, 0.95), 0.0)
    head.train()
    target.set_taps(head.taps)
    features = None if objective.tunes_target else target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    for step in range(steps):
        loss, _ = objective(head, head, target, batch, features)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 2e-2 * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
    out = Engine(target, head.eval().proposer(depth=DEPTH)).generate(prompts(), PARAMS, 1 + ROUNDS * MOST)
    assert out.tokens == said
    tau = sum(len(text) - 1 for text in said) / sum(map(len, out.rounds))
    assert NEARLY <= tau <= MOST


def test_no_method_is_left_out() -> None:
    assert {method for method, *_ in CASES.values()} | {"draft_model"} == set(METHODS)
    assert set(CASES) <= set(OBJECTIVES)
