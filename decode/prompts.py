"""Prompt rendering: the one function that training, evaluation and `generate` share.

What a chat template is given beside the messages (`enable_thinking`, say) is kept with the tokenizer, so that it is the same wherever a prompt is
rendered: `set_template` once, when the target is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .. import UserError

Message = Mapping[str, Any]  # role, content; where the template knows them: tool_calls, reasoning_content, name

_VARIABLES = "_draftsmith_template_variables"


def set_template(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """Give these variables to the chat template in every rendering from now on. Raises UserError for one that the template does not use."""
    template = str(tokenizer.chat_template or "")
    for name in variables:
        if name not in template:
            raise UserError(f"target.template: wanted variables that the target's chat template uses, got {name}, which it does not; leave it out")
    setattr(tokenizer, _VARIABLES, dict(variables))


def template_variables(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What `set_template` was given."""
    return dict(getattr(tokenizer, _VARIABLES, {}))


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: bool = True
) -> str:
    """The chat template's text of a conversation; prompt: up to where the assistant speaks next."""
    text: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=None if tools is None else [dict(tool) for tool in tools],
        tokenize=False,
        add_generation_prompt=prompt,
        **template_variables(tokenizer),
    )
    return str(text)


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks: by the chat template, or, without one, the plain text of a single user turn."""
    if tokenizer.chat_template is None:
        if len(messages) != 1:
            raise UserError(f"messages: wanted one, as the target's tokenizer has no chat template, got {len(messages)}")
        plain: list[int] = tokenizer(messages[0]["content"], verbose=False)["input_ids"]
        return plain
    text = render_text(tokenizer, messages, tools)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # the template writes the special tokens itself
    return ids


def eos_ids(model: Any) -> list[int]:
    """The ids that end a generation, from the generation config, else the config."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return [] if found is None else [found] if isinstance(found, int) else list(found)
