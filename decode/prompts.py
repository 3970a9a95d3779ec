"""Prompt rendering: the one function that training, evaluation and `generate` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .. import UserError


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks: by the chat template, or, without one, the plain text of a single user turn."""
    if tokenizer.chat_template is None:
        if len(messages) != 1:
            raise UserError(f"messages: wanted one, as the target's tokenizer has no chat template, got {len(messages)}")
        plain: list[int] = tokenizer(messages[0]["content"])["input_ids"]
        return plain
    text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes the special tokens itself
    return ids


def eos_ids(model: Any) -> list[int]:
    """The ids that end a generation, from the generation config, else the config."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return [] if found is None else [found] if isinstance(found, int) else list(found)
