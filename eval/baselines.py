"""The baselines of transformers: plain `generate`, and `generate(assistant_model=...)`; and how a model wants to be sampled by itself.

Every sampling setting is passed explicitly: what a model's generation_config holds would else be active in one of the two systems only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import UserError
from ..decode.sampling import SamplingParams
from ..decode.target import Target

# What of a generation_config our sampler does not know, and the value that switches it off.
UNKNOWN = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "num_beams": 1,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "min_length": 0, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "sequence_bias": None, "min_new_tokens": None, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """Tokens, and the seconds that they took."""

    tokens: int
    seconds: float


class _FirstToken:
    """A stopping criterion that never stops, and notes when the first token came: decoding is timed from there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at = time.perf_counter() if self.at is None else self.at
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def model_default(target: Target) -> SamplingParams | None:
    """How the model's generation_config samples. None if it says nothing of it: then its default is greedy.

    Raises UserError for settings that only transformers knows: rows of the two systems would not be of the same distribution.
    """
    config: Any = target.model.generation_config
    if not getattr(config, "do_sample", None):
        return None
    for name, off in UNKNOWN.items():
        value = getattr(config, name, None)
        if value is not None and value != off:
            raise UserError(f"default sampling: wanted settings that both sides know, got {name}={value} in the model's generation_config")

    def known(name: str, otherwise: float) -> float:
        value = getattr(config, name, None)
        return otherwise if value is None else float(value)

    return SamplingParams(
        temperature=known("temperature", 1.0),
        top_k=int(known("top_k", 50)),  # what transformers takes where the config says nothing
        top_p=known("top_p", 1.0),
        min_p=known("min_p", 0.0),
        repetition_penalty=known("repetition_penalty", 1.0),
    )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The same settings for `generate`, those of the model's own config replaced."""
    if params.presence_penalty or params.frequency_penalty or params.logit_bias:
        raise UserError("baseline: wanted sampling that transformers knows, got presence or frequency penalties or a logit bias")
    shared = {"repetition_penalty": params.repetition_penalty, **UNKNOWN}
    if not params.temperature:
        return {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, **shared}
    filters = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p or None}
    return {"do_sample": True, "temperature": params.temperature, **filters, **shared}


def eager(target: Target, prompts: Sequence[Sequence[int]], params: SamplingParams, limit: int, stops: Sequence[int]) -> Timed:
    """Tokens after the first, and seconds after the first, of transformers' own generate with its dynamic cache. Rows are padded on the left.

    A row's tokens are counted up to its end, not the padding that follows while others go on.
    """
    first = _FirstToken()
    torch.manual_seed(params.seed)
    longest, pad = max(len(p) for p in prompts), stops[0] if stops else 0
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    out = target.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=limit,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
        stopping_criteria=[first],
        **_sampling(params),
    )
    _synchronise(target)
    assert first.at is not None
    seconds = time.perf_counter() - first.at
    return Timed(sum(_length(row, stops) - 1 for row in out[:, longest:].tolist()), seconds)


def _length(row: Sequence[int], stops: Sequence[int]) -> int:
    """Tokens up to and with the first that ends the text."""
    return next((i for i, token in enumerate(row, 1) if token in stops), len(row))


def assisted(target: Target, assistant: Any, prompt: Sequence[int], params: SamplingParams, limit: int, stops: Sequence[int], depth: int) -> Timed:
    """All tokens and all seconds, prefill included, of transformers' assisted generation with `depth` draft tokens a round."""
    own = assistant.generation_config
    for name, value in (("num_assistant_tokens", depth), ("num_assistant_tokens_schedule", "constant"), ("assistant_confidence_threshold", 0.0)):
        setattr(own, name, value)  # transformers reads them from the assistant
    torch.manual_seed(params.seed)
    ids = torch.tensor([list(prompt)], device=target.device)
    _synchronise(target)
    began = time.perf_counter()
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,
        assistant_model=assistant,
        **_sampling(params),
    )
    _synchronise(target)
    return Timed(out.shape[1] - len(prompt), time.perf_counter() - began)


def _synchronise(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()
