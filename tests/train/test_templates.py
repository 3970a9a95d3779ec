"""Loss masks of the families' templates against spans marked by hand: what stands between ⟦ and ⟧ is learned, and nothing else."""

# ruff: noqa: RUF001  # DeepSeek's tokens have full-width bars

from __future__ import annotations

import random
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.decode.prompts import render_prompt, set_template
from draftsmith.train.sources import Document
from draftsmith.train.templates import Encoded, encode

from .families import DEEPSEEK_R1, GEMMA, LLAMA3, MISTRAL, PHI3, QWEN3, QWEN25, Family

TALK = [("user", "Hi"), ("assistant", "Hello!"), ("user", "2+2?"), ("assistant", "It is 4.")]
ASKED = [("system", "Be brief."), *TALK[:2]]
THOUGHT = [("user", "a"), ("assistant", "<think>\nwhy\n</think>\n\nb"), ("user", "c"), ("assistant", "<think>\nso\n</think>\n\n<d>")]
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
TOOLS_TEXT = '\n\n# Tools\n\n<tools>\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n</tools><|im_end|>\n'
CALLED = (
    '<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>⟧\n'
    "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
)


def document(messages: list[tuple[str, str]] | list[dict[str, Any]], **more: Any) -> Document:
    return Document(where="here:1", messages=[m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages], **more)


def marked(encoded: Encoded, tokenizer: Any) -> str:
    """Its text with the learned tokens marked."""
    pieces, at = [], 0
    for start, stop in encoded.spans:
        pieces += [tokenizer.decode(encoded.ids[at:start]), "⟦", tokenizer.decode(encoded.ids[start:stop]), "⟧"]
        at = stop
    return "".join([*pieces, tokenizer.decode(encoded.ids[at:])])


CASES: list[tuple[str, Family, Any, dict[str, Any], str]] = [
    (
        "llama3",
        LLAMA3,
        TALK,
        {},
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦It is 4.<|eot_id|>⟧",
    ),
    (
        "llama3 trims",
        LLAMA3,
        [("system", " Be brief. "), ("user", "Hi\n"), ("assistant", " Hello!\n")],
        {},
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧",
    ),
    (
        "qwen2.5",
        QWEN25,
        TALK,
        {},
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n",
    ),
    (
        "qwen2.5 tools",
        QWEN25,
        TOOL_TALK,
        {},
        "<|im_start|>system\nYou are Qwen." + TOOLS_TEXT + CALLED + "<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n",
    ),
    (
        "qwen3 thinking",
        QWEN3,
        THOUGHT,
        {},
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦<think>\nso\n</think>\n\n<d><|im_end|>⟧\n",
    ),
    (
        "qwen3 reasoning apart",
        QWEN3,
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "why"}],
        {"enable_thinking": True},
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦<think>\nwhy\n</think>\n\nb<|im_end|>⟧\n",
    ),
    (
        "qwen3 without thinking",
        QWEN3,
        TALK,
        {"enable_thinking": False},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦It is 4.<|im_end|>⟧\n",
    ),
    (
        "qwen3 without thinking, answers like the block",
        QWEN3,
        [("user", "Hi"), ("assistant", "<thing>"), ("user", "Hi"), ("assistant", "<thing>")],
        {"enable_thinking": False},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<thing><|im_end|>⟧\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦<thing><|im_end|>⟧\n",
    ),
    (
        "qwen3 tools, thinking on both sides of a call",
        QWEN3,
        [TOOL_TALK[0], {**TOOL_TALK[1], "content": "<think>\ncall\n</think>\n\n"}, TOOL_TALK[2], {**TOOL_TALK[3], "reasoning_content": "good"}],
        {},
        "<|im_start|>system\n"
        + TOOLS_TEXT
        + CALLED.replace("⟦", "⟦<think>\ncall\n</think>\n\n")
        + "<|im_start|>assistant\n⟦<think>\ngood\n</think>\n\nIt is 4.<|im_end|>⟧\n",
    ),
    ("mistral", MISTRAL, TALK, {}, "<s>[INST] Hi [/INST]⟦ Hello!</s>⟧[INST] 2+2? [/INST]⟦ It is 4.</s>⟧"),
    (
        "gemma",
        GEMMA,
        TALK,
        {},
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦It is 4.<end_of_turn>⟧\n",
    ),
    (
        "phi3",
        PHI3,
        [ASKED[0], *TALK],
        {},
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>⟧\n"
        "<|user|>\n2+2?<|end|>\n<|assistant|>\n⟦It is 4.<|end|>⟧\n<|endoftext|>",
    ),
    (
        "deepseek-r1",
        DEEPSEEK_R1,
        [ASKED[0], *THOUGHT],
        {},
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>a<｜Assistant｜>⟦\n\nb<｜end▁of▁sentence｜>⟧"
        "<｜User｜>c<｜Assistant｜>⟦\n\n<d><｜end▁of▁sentence｜>⟧",
    ),
    (
        "deepseek-r1, answers like the prompt's end",
        DEEPSEEK_R1,
        [("user", "a"), ("assistant", "<thing>")],
        {},
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>⟦<thing><｜end▁of▁sentence｜>⟧",
    ),
]


@pytest.mark.parametrize(("family", "messages", "variables", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_spans_are_those_marked_by_hand(family: Family, messages: Any, variables: dict[str, Any], wanted: str) -> None:
    tokenizer, stops = family.tokenizer()
    set_template(tokenizer, variables)
    tools = [TOOL] if "tool" in str(messages) else None
    encoded = encode(tokenizer, document(messages, tools=tools), stops)
    assert marked(encoded, tokenizer) == wanted
    assert not encoded.problems and encoded.text == wanted.replace("⟦", "").replace("⟧", "")


@pytest.mark.parametrize("family", [LLAMA3, QWEN25, QWEN3, MISTRAL, GEMMA, PHI3])
def test_an_answer_that_breaks_off_has_no_end(family: Family) -> None:
    tokenizer, stops = family.tokenizer()
    set_template(tokenizer, {"enable_thinking": False} if family is QWEN3 else {})
    encoded = encode(tokenizer, document(TALK, cut=True), stops)
    prompt = render_prompt(tokenizer, document(TALK[:3]).messages)
    assert encoded.ids[: len(prompt)] == prompt and encoded.spans[-1] == (len(prompt), len(encoded.ids))
    assert tokenizer.decode(encoded.ids[len(prompt) :]).strip() == "It is 4."


@pytest.mark.parametrize("family", [LLAMA3, QWEN25, GEMMA, PHI3])
def test_derived_spans_are_those_of_a_template_s_own_marks(family: Family) -> None:
    """The oracle is transformers' reading of {% generation %}, on random conversations with whatever characters in them."""
    tokenizer, stops = family.tokenizer()
    generator = random.Random(0)
    words = ["a", "\n", " ", "<think>", "assistant", "x = 1\n", "é", "{{", "🙂", "<|", "user\n"]
    for turns in range(1, 6):
        said = ["w" + "".join(generator.choices(words, k=generator.randrange(8))) + "." for _ in range(2 * turns)]
        talk = document([("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(said)])
        tokenizer.chat_template = family.template
        derived = encode(tokenizer, talk, stops)
        tokenizer.chat_template = with_marks(family)
        assert encode(tokenizer, talk, stops) == derived and len(derived.spans) == turns


def with_marks(family: Family) -> str:
    """The same rendering, by a template that marks the assistant's words and the token that ends them."""
    if family is QWEN25:
        return family.template.replace("'\n' + content }}", "'\n' }}{% generation %}{{ content }}").replace(
            "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool'", "{{- '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{%- elif message.role == 'tool'"
        )
    header, first, end = {
        id(LLAMA3): ("'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'", "bos_token if loop.first else ''", "'<|eot_id|>', ''"),
        id(GEMMA): (
            "'<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n'",
            "bos_token if loop.first else ''",
            "'<end_of_turn>', '\n'",
        ),
        id(PHI3): ("'<|' + message['role'] + '|>\n'", "''", "'<|end|>', '\n'"),
    }[id(family)]
    tail = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}" if family is PHI3 else ""
    return (
        "{% for message in messages %}{{ " + first + " }}{{ " + header + " }}{% set end = [" + end + "] %}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] | trim + end[0] }}{% endgeneration %}{{ end[1] }}"
        "{% else %}{{ message['content'] | trim + end | join('') }}{% endif %}{% endfor %}" + tail
    )


def test_refusals_name_the_line() -> None:
    tokenizer, stops = GEMMA.tokenizer()
    with pytest.raises(UserError, match=r"^here:1: wanted a conversation that the target's chat template takes, .*System role not supported"):
        encode(tokenizer, document(ASKED), stops)
    with pytest.raises(UserError, match=r"^target\.template: wanted variables that the target's chat template uses, got enable_thinking"):
        set_template(tokenizer, {"enable_thinking": False})
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"^here:1: wanted one question and answer"):
        encode(tokenizer, document(TALK), stops)
    plain = encode(tokenizer, document(TALK[:2]), stops)
    assert marked(plain, tokenizer) == f"Hi⟦Hello!{tokenizer.convert_ids_to_tokens(min(stops))}⟧"


def test_a_turn_that_the_template_rewrites_beyond_recognition_is_reported_and_not_learned() -> None:
    tokenizer, stops = PHI3.tokenizer()
    tokenizer.chat_template = PHI3.template.replace("message['content']", "message['content'] | upper")
    encoded = encode(tokenizer, document(TALK), stops)
    assert encoded.spans == [] and len(encoded.problems) == 2 and "was not found in the rendering" in encoded.problems[0]
