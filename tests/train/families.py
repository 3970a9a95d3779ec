"""Chat templates of model families, written from their documented formats, with a tokenizer that has each family's special tokens."""

# ruff: noqa: RUF001  # DeepSeek's tokens have full-width bars

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.recipes.schema import TargetRef
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """special: its special tokens; stops: those that end a generation."""

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None

    def tokenizer(self) -> tuple[PreTrainedTokenizerFast, set[int]]:
        """The built-in target's tokenizer with this template, and the ids that end a generation."""
        tokenizer = AutoTokenizer.from_pretrained(TargetRef().location)
        tokenizer.add_tokens(list(self.special), special_tokens=True)
        tokenizer.bos_token, tokenizer.eos_token = self.bos, self.eos or self.stops[0]
        tokenizer.chat_template = self.template
        return tokenizer, set(tokenizer.convert_tokens_to_ids(list(self.stops)))


LLAMA3 = Family(
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
    ("<|eot_id|>", "<|end_of_text|>"),
    bos="<|begin_of_text|>",
)

_QWEN_TOOLS = (
    "{%- if tools %}{{- '\n\n# Tools\n\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools>' }}{%- endif %}"
)
_QWEN_CALLS = (
    "{%- for call in message.tool_calls %}{{- '\n' if content or not loop.first }}"
    '{{- \'<tool_call>\n{"name": "\' }}{{- call.function.name }}{{- \'", "arguments": \' }}{{- call.function.arguments | tojson }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}"
)
_QWEN_RESULTS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_QWEN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

QWEN25 = Family(
    "{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'You are Qwen.') }}"
    + _QWEN_TOOLS
    + "{{- '<|im_end|>\n' }}"
    + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}{{- '<|im_start|>assistant' + '\n' + content }}"
    + _QWEN_CALLS
    + "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}" + _QWEN_RESULTS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
    _QWEN_SPECIAL,
    ("<|im_end|>", "<|endoftext|>"),
)

# Thinking is kept in turns after the last question only, and the last turn always has a block for it.
QWEN3 = Family(
    "{%- if messages[0].role == 'system' or tools %}{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else '') }}"
    + _QWEN_TOOLS
    + "{{- '<|im_end|>\n' }}{%- endif %}"
    + "{%- set ns = namespace(last=messages | length - 1, seek=true) %}"
    "{%- for message in messages[::-1] %}{%- set index = messages | length - 1 - loop.index0 %}"
    "{%- if ns.seek and message.role == 'user' %}{%- set ns.seek = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set reasoning = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}" + _QWEN_CALLS + "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}" + _QWEN_RESULTS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}",
    _QWEN_SPECIAL,
    ("<|im_end|>", "<|endoftext|>"),
)

_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)

MISTRAL = Family(
    "{{ bos_token }}{% for message in messages %}"
    + _ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    ("</s>",),
    bos="<s>",
)

GEMMA = Family(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}" + _ALTERNATE + "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    ("<eos>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
)

PHI3 = Family(
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    eos="<|endoftext|>",
)

# Thinking is stripped from every turn, the last one too, though the generation prompt begins with it.
DEEPSEEK_R1 = Family(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    ("<｜end▁of▁sentence｜>",),
    bos="<｜begin▁of▁sentence｜>",
)
