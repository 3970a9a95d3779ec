"""How far a target that was tuned with its drafter has moved from the original. Losslessness is judged against the tuned one, and hides that.

    original = original_outputs(target, suite, 128)      before the drafter, with its adapter, is loaded
    load_drafter(folder, target)                         merges the adapter
    drift = measure_drift(target, original)

Dims: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode.engine import Engine
from ..decode.prompts import eos_ids, render_prompt
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from .schema import Drift
from .suites import Suite

BATCH = 8
MOST_PROMPTS = 64


@dataclass(frozen=True)
class Original:
    """What the original says: token ids after each prompt, greedy and sampled at T=1; of the sampled ones its loss (nats), and its own choices."""

    prompts: list[list[int]]
    greedy: list[list[int]]
    sampled: list[list[int]]
    loss: float
    choices: list[Tensor]


def original_outputs(target: Target, suite: Suite, max_new_tokens: int) -> Original:
    """Let the original answer the suite's prompts (at most MOST_PROMPTS), and read its own answers."""
    assert target.tokenizer is not None
    prompts = [render_prompt(target.tokenizer, messages) for messages in suite.prompts[:MOST_PROMPTS]]
    greedy, sampled = (_answers(target, prompts, temperature, max_new_tokens) for temperature in (0.0, 1.0))
    return Original(prompts, greedy, sampled, *_read(target, prompts, sampled))


def measure_drift(target: Target, original: Original) -> Drift:
    """Compare the tuned target's outputs with the original's."""
    loss, choices = _read(target, original.prompts, original.sampled)
    longest = max(len(tokens) for tokens in original.greedy)
    greedy = _answers(target, original.prompts, 0.0, longest)
    tokens = sum(len(ids) for ids in original.sampled)
    same = sum(int((ours == theirs).sum()) for ours, theirs in zip(choices, original.choices, strict=True))
    return Drift(
        prompts=len(original.prompts),
        tokens=tokens,
        original_perplexity=math.exp(original.loss),
        tuned_perplexity=math.exp(loss),
        same_argmax=same / tokens,
        same_generations=sum(a == b for a, b in zip(greedy, original.greedy, strict=True)) / len(greedy),
    )


def _answers(target: Target, prompts: list[list[int]], temperature: float, new_tokens: int) -> list[list[int]]:
    engine, stops, answers = Engine(target), eos_ids(target.model), []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        params = [SamplingParams(temperature=temperature, seed=start + i) for i in range(len(part))]
        answers += engine.generate(part, params, new_tokens, eos_ids=stops).tokens
    return answers


@torch.no_grad()
def _read(target: Target, prompts: list[list[int]], answers: list[list[int]]) -> tuple[float, list[Tensor]]:
    """(mean loss of the answers' tokens, in nats; the target's likeliest token at each of their places, a tensor an answer)."""
    total, choices = 0.0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids_1T = torch.tensor([prompt + answer], device=target.device)
        position_1T = torch.arange(ids_1T.shape[1], device=target.device).unsqueeze(0)
        hidden_1TH = target.features(ids_1T, position_1T, torch.zeros_like(ids_1T)).hidden_BNH
        loss, best = 0.0, []
        for hidden_CH, token_C in _chunks(hidden_1TH[0, len(prompt) - 1 : -1], ids_1T[0, len(prompt) :]):
            log_p_CV = target.logits(hidden_CH).float().log_softmax(-1)
            loss -= float(log_p_CV.gather(1, token_C.unsqueeze(1)).sum())
            best.append(log_p_CV.argmax(-1).cpu())
        total += loss
        choices.append(torch.cat(best))
    return total / sum(len(answer) for answer in answers), choices


def _chunks(hidden_TH: Tensor, token_T: Tensor, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces whose logits are held at once."""
    yield from zip(torch.split(hidden_TH, size), torch.split(token_T, size), strict=True)
