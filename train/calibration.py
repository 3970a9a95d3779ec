"""Calibration of DSpark's confidence by measured decoding: greedy and shared-noise drafts are accepted more often than what it is trained to tell.

    notes = calibrate(head, target, prompts, new_tokens)       {"calibration": {"greedy": [scale, shift], "sampled": ..., "error": ...}}

Chains of full length are drafted on development prompts. Each judged token gives a pair: the confidence's logit, and whether it was accepted. Judged
are the accepted tokens and the first rejected one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..decode.engine import Engine
from ..decode.prompts import eos_ids, render_prompt
from ..decode.sampling import Sampler, SamplingParams
from ..decode.target import Target
from ..decode.tree import DraftTree
from ..eval.suites import load_suite
from ..heads.dspark import Calibration, DSpark, DSparkProposer
from ..heads.registry import load_drafter, save_drafter
from ..recipes.schema import DrafterRecipe

BINS = 10  # of the calibration error
PRIOR = 1.0  # weight, in pairs, of the prior that (scale, shift) is (1, 0): for few pairs, or pairs of one kind


class _Recorder(DSparkProposer):
    """Keeps the confidence's logits of every round's chain."""

    def __init__(self, head: DSpark) -> None:
        super().__init__(head, depth=head.longest, topk=1, nodes=head.longest)
        self.logits: list[Tensor] = []

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        tree = super().propose(root_B, sampler, noise_BDV)
        self.logits.append(self.confidence_logits().cpu())
        return tree


@torch.no_grad()
def measured_pairs(head: DSpark, target: Target, prompts: Sequence[Sequence[int]], temperature: float, new_tokens: int) -> tuple[Tensor, Tensor]:
    """(logits of the confidence, 1 for accepted and 0 for rejected), both float64 [pairs], of real decoding, one prompt after another."""
    logits, accepted = [], []
    for index, prompt in enumerate(prompts):
        recorder = _Recorder(head)
        params = SamplingParams(temperature=temperature, seed=index)
        rounds = Engine(target, recorder, overlap=False).generate([prompt], params, new_tokens, eos_ids=eos_ids(target.model)).rounds[0]
        for entry, logit_1D in zip(rounds, recorder.logits, strict=False):
            if entry.emitted > entry.accepted:  # else the text ended within the draft
                judged = min(entry.accepted + 1, entry.proposed)
                logits.append(logit_1D[0, :judged].double())
                accepted.append((torch.arange(judged) < entry.accepted).double())
    return (torch.cat(logits), torch.cat(accepted)) if logits else (torch.zeros(0).double(), torch.zeros(0).double())


def fit(logit_N: Tensor, accepted_N: Tensor, steps: int = 50) -> tuple[float, float]:
    """(scale, shift) of the likeliest sigmoid(scale logit + shift), by Newton's method, with a weak prior at (1, 0)."""
    x_N2 = torch.stack([logit_N, torch.ones_like(logit_N)], dim=1)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    at = prior.clone()
    for _ in range(steps):
        p_N = (x_N2 @ at).sigmoid()
        gradient = x_N2.t() @ (p_N - accepted_N) + PRIOR * (at - prior)
        curvature = x_N2.t() @ (x_N2 * (p_N * (1 - p_N)).unsqueeze(1)) + PRIOR * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curvature, gradient)
        at = at - step / max(1.0, float(step.norm()))  # short ones: far from the best place a full step may lead away
    return float(at[0]), float(at[1])


def calibration_error(p_N: Tensor, accepted_N: Tensor) -> float:
    """Expected calibration error: |mean p - share accepted|, averaged over bins of p by their pairs."""
    bin_N = (p_N * BINS).long().clamp(max=BINS - 1)
    sums = [torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_N, value) for value in (p_N, accepted_N)]
    return float((sums[0] - sums[1]).abs().sum() / max(1, len(p_N)))


def calibrate(head: DSpark, target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Set the head's calibration from measured decoding; what the contract keeps: (scale, shift), pairs, and the error before and after.

    The errors are those of prompts that the calibration behind them was not fitted to: each half is judged by the other's.
    """
    fitted: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        halves = [measured_pairs(head, target, prompts[half::2], temperature, new_tokens) for half in (0, 1)]
        logit_N, accepted_N = (torch.cat(parts) for parts in zip(*halves, strict=True))
        fitted[name] = fit(logit_N, accepted_N)
        judged = []
        for own, other in (halves, halves[::-1]):
            scale, shift = fit(*other)
            judged.append((scale * own[0] + shift).sigmoid())
        after = calibration_error(torch.cat(judged), accepted_N)
        errors[name] = {"pairs": len(logit_N), "before": calibration_error(logit_N.sigmoid(), accepted_N), "after": after}
    head.calibration = Calibration(**fitted)
    return {**{name: list(pair) for name, pair in fitted.items()}, "error": errors}


def calibrate_drafter(recipe: DrafterRecipe, folder: Path, target: Target) -> None:
    """Calibrate a trained drafter's confidence on the development prompts, if it has one, and keep that in its contract. Done once."""
    if recipe.drafter.method != DSpark.method or "calibration" in json.loads((folder / "contract.json").read_text(encoding="utf-8")):
        return
    head, contract = load_drafter(folder, target, dtype=torch.float32)
    assert isinstance(head, DSpark) and target.tokenizer is not None
    part = recipe.eval
    suite = load_suite(part.suite, part.dev_prompts, split="dev", prompt_chars=part.prompt_chars, seed=part.seed)
    prompts = [render_prompt(target.tokenizer, messages) for messages in suite.prompts]
    found = calibrate(head, target, prompts, part.dev_tokens)
    save_drafter(head, folder, {**contract, "calibration": found})
