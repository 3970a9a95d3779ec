"""A tiny random target in float64 with a tokenizer of letters, suites for it, and drafters whose acceptance is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from draftsmith.decode.free.drafts import pack_chains
from draftsmith.decode.proposer import Accepted
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.target import Target
from draftsmith.decode.tree import DraftTree
from draftsmith.eval.suites import Suite
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ..decode.sizes import SIZES


class Letters:
    """One token a character, from 3 on."""

    chat_template: str | None = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    def decode(self, tokens: Sequence[int] | int, **options: Any) -> str:
        return "".join(chr(40 + token) for token in ([tokens] if isinstance(tokens, int) else tokens))

    def get_vocab(self) -> dict[str, int]:
        return {chr(40 + token): token for token in range(97)}


class Chatting(Letters):
    """With a template of the plainest kind."""

    chat_template = "yes"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages)


def tiny(seed: int = 0, *, chat: bool = False, end: bool = False) -> Target:
    """A target in float64, that never ends a text unless `end`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "max_position_embeddings": 512}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    model.generation_config.eos_token_id = 1 if end else []
    tokenizer: Any = Chatting() if chat else Letters()
    return Target(model.double(), tokenizer, "tiny")


def suite(count: int = 4, **more: Any) -> Suite:
    generator = random.Random(5)
    texts = ["".join(generator.choice("abcdefghij") for _ in range(6 + i)) for i in range(count)]
    return Suite("letters", [[{"role": "user", "content": text}] for text in texts], **more)


class Oracle:
    """Knows what will be said, and says it rightly with probability `share` a token, by a seeded coin: rounds of a chain of `depth`, one row."""

    taps: tuple[int, ...] = ()

    def __init__(self, texts: dict[tuple[int, ...], list[int]], depth: int, share: float, seed: int = 0) -> None:
        self.texts, self.max_depth, self.num_nodes, self.share = texts, depth, depth + 1, share
        self.coins = random.Random(seed)
        self._rest: list[int] = []

    def reset(self, batch: int, capacity: int) -> None:
        self._rest = []

    def observe(self, accepted: Accepted) -> None:
        count = int(accepted.count_B[0])
        if not self._rest and int(accepted.start_B[0]) == 0:
            self._rest = self.texts[tuple(accepted.tokens_BM[0, :count].tolist())][1:]
        else:
            self._rest = self._rest[count:]

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        right = [*self._rest, *[0] * self.max_depth][: self.max_depth]
        return pack_chains(root_B, [[token if self.coins.random() < self.share else (token + 1) % 97 for token in right]], self.max_depth)
