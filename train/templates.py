"""Which tokens of a conversation the assistant says: its spans in the final rendering, by any chat template.

    encoded = encode(tokenizer, document, stops={tokenizer.eos_token_id})
    encoded.ids, encoded.spans                      # token ids; half-open intervals of what is learned

A template that marks its assistant's text by {% generation %} is taken at its word. For others, turns are found by rendering the conversation again:

    prompt      the conversation up to the turn, with the generation prompt: what the model is given when it has to answer
    final       the whole conversation
    probe       the whole conversation, with a probe in place of the turn's content: what follows the probe follows the content in `final`

The turn starts where the prompt ends, if `final` starts with it. Where it does not, as templates rewrite history (they drop the thinking of earlier
turns, say), it starts where what follows the message before stops being what follows it in the prompt. It ends with the token that ends a generation.
So only what is in the final rendering counts, and nothing that the template writes by itself in a prompt is learned.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .. import UserError
from ..decode.prompts import render_prompt, render_text, template_variables
from .sources import Document, Messages

Span = tuple[int, int]  # half-open

_PROBE = "\u2058probe\u2058"  # neither blanks to be trimmed, nor anything that templates look for
_MARKED = re.compile(r"\{%-?\s*generation\b")


class Sample(NamedTuple):
    """Token ids of a sequence, and the half-open intervals of those that are learned: ascending, none empty."""

    ids: list[int]
    spans: list[Span]

    @property
    def learned(self) -> int:
        """Tokens that are learned."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def whole(self) -> Sample:
        """All tokens to be learned."""
        return Sample(self.ids, [(0, len(self.ids))])

    def part(self, start: int, stop: int) -> Sample:
        """Tokens start .. stop - 1 by themselves."""
        cut = [(max(a, start) - start, min(b, stop) - start) for a, b in self.spans if a < stop and b > start]
        return Sample(self.ids[start:stop], cut)


@dataclass
class Encoded:
    """A document in tokens. text: its rendering. problems: what a lint would say about it, a line each."""

    ids: list[int]
    spans: list[Span]
    text: str
    problems: list[str] = field(default_factory=list)

    @property
    def sample(self) -> Sample:
        return Sample(self.ids, self.spans)


def encode(tokenizer: PreTrainedTokenizerBase, document: Document, stops: Collection[int] = ()) -> Encoded:
    """Tokens and spans of a document. stops: the ids that end a generation; without a chat template, the first of them ends an answer.

    A plain text is learned whole. A turn that calls tools is learned with its calls. Raises UserError, naming the document's file and line, if the
    template refuses the conversation, or the tokenizer cannot tell where its tokens lie in a text.
    """
    if document.text:
        ids: list[int] = tokenizer(document.text, verbose=False)["input_ids"]
        return Encoded(ids, [(0, len(ids))] if ids else [], document.text)
    if tokenizer.chat_template is None:
        return _plain(tokenizer, document, stops)
    try:
        return _chat(tokenizer, document, {int(stop) for stop in stops})
    except (TemplateError, TypeError, KeyError, ValueError) as error:  # templates refuse in many ways
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{document.where}: wanted a conversation that the target's chat template takes, got one that it refuses ({said})") from error


def _plain(tokenizer: PreTrainedTokenizerBase, document: Document, stops: Collection[int]) -> Encoded:
    if [message["role"] for message in document.messages] not in (["user"], ["user", "assistant"]):
        raise UserError(f"{document.where}: wanted one question and answer, as the target's tokenizer has no chat template, got another conversation")
    ids = render_prompt(tokenizer, document.messages[:1])
    answer: list[int] = []
    if len(document.messages) == 2:
        answer = tokenizer(document.messages[1]["content"], add_special_tokens=False, verbose=False)["input_ids"]
        answer += [] if document.cut else sorted(stops)[:1]
    text = str(tokenizer.decode(ids + answer))
    return Encoded(ids + answer, [(len(ids), len(ids) + len(answer))] if answer else [], text)


def _chat(tokenizer: PreTrainedTokenizerBase, document: Document, stops: set[int]) -> Encoded:
    final = render_text(tokenizer, document.messages, document.tools, prompt=False)
    if not tokenizer.is_fast:
        raise UserError(f"target: wanted a tokenizer that can tell where its tokens lie in a text, got {type(tokenizer).__name__}, which cannot")
    out = tokenizer(final, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    encoded = Encoded(list(out["input_ids"]), [], final)
    offsets = list(out["offset_mapping"])
    if _MARKED.search(str(tokenizer.chat_template)):
        encoded.spans = _marked(tokenizer, document, encoded.ids)
    else:
        encoded.spans = _in_tokens(_derived(tokenizer, document, final, stops, encoded.problems), final, offsets, encoded.problems)
    if document.cut and encoded.spans:  # nothing follows an answer that breaks off
        first, last = encoded.spans.pop()
        while last > first and encoded.ids[last - 1] in stops:
            last -= 1
        encoded.spans += [(first, last)] if last > first else []
        encoded.ids, encoded.text = encoded.ids[:last], final[: offsets[last - 1][1]]
    return encoded


def _marked(tokenizer: PreTrainedTokenizerBase, document: Document, ids: list[int]) -> list[Span]:
    """The spans by the template's own marks."""
    out: Any = tokenizer.apply_chat_template(
        document.messages,
        tools=document.tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},  # a text that is too long is cut later
        **template_variables(tokenizer),
    )
    assert out["input_ids"] == ids, "two renderings of one conversation differ"
    edges = [i for i, (a, b) in enumerate(itertools.pairwise([0, *out["assistant_masks"], 0])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _in_tokens(spans: list[Span], final: str, offsets: list[Span], problems: list[str]) -> list[Span]:
    """The tokens that lie in spans of the text. One that reaches across an edge is none that a generation would begin or end with."""
    found = []
    for start, stop in spans:
        first = next((i for i, (_, end) in enumerate(offsets) if end > start), len(offsets))
        last = next((i for i in range(first, len(offsets)) if offsets[i][0] >= stop), len(offsets))
        if first < last and offsets[first][0] < start:
            problems.append(f"spans that do not round-trip: a token holds the prompt's end and the answer's start ({final[start:][:20]!r})")
            first += 1
        if first < last and offsets[last - 1][1] > stop:
            problems.append(f"spans that do not round-trip: a token reaches past the answer's end ({final[:stop][-20:]!r})")
            last -= 1
        if first < last:
            found.append((first, last))
    return found


def _texts(tokenizer: PreTrainedTokenizerBase, stops: set[int]) -> list[str]:
    return [str(text) for text in tokenizer.convert_ids_to_tokens(sorted(stops)) if text]


def _derived(tokenizer: PreTrainedTokenizerBase, document: Document, final: str, stops: set[int], problems: list[str]) -> list[Span]:
    """The text's spans of the assistant's turns, by rendering turn by turn."""
    messages, tools = document.messages, document.tools
    places: dict[int, Span | None] = {}

    def place(index: int) -> Span | None:
        if index not in places:
            places[index] = _place(tokenizer, messages, tools, index, final)
        return places[index]

    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_text(tokenizer, messages[:index], tools, prompt=True) if index else ""
        content, before = place(index), place(index - 1) if index else None
        if content is None:
            problems.append(f"spans that do not round-trip: message {index + 1} was not found in the rendering, and is not learned")
            continue
        if index and final.startswith(prompt):
            start = len(prompt)
        elif before is not None:
            inside = _place(tokenizer, messages[:index], tools, index - 1, prompt, prompt=True)
            follows = "" if inside is None else prompt[inside[1] :]
            start = min(before[1] + _common(follows, final[before[1] :]), content[0])
        else:
            start = content[0]
        following = place(index + 1) if index + 1 < len(messages) else (len(final), len(final))
        limit = len(final) if following is None else following[0]
        ends = [at + len(text) for text in _texts(tokenizer, stops) if (at := final.find(text, content[1], limit)) >= 0]
        if start < (stop := min(ends, default=content[1])):
            spans.append((start, stop))
    return spans


def _place(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: list[dict[str, object]] | None, index: int, text: str, *, prompt: bool = False
) -> Span | None:
    """Where the content of a message lies in a rendering of the messages; its start, where it was rewritten, is where it begins to differ."""
    probe = {**messages[index], "content": _PROBE}
    for key in ("reasoning_content", "thinking"):
        probe.pop(key, None)
    try:
        probed = render_text(tokenizer, [*messages[:index], probe, *messages[index + 1 :]], tools, prompt=prompt)
    except (TemplateError, TypeError, KeyError, ValueError):
        return None
    at = probed.find(_PROBE)
    if at < 0:
        return None
    after = probed[at + len(_PROBE) :]
    start, stop = _common(probed[:at], text), len(text) - len(after)
    return (start, max(start, stop)) if text.endswith(after) else None  # nothing at all, as where tools are called, may begin after its end


def _common(one: str, other: str) -> int:
    """Characters that both begin with, by bisection: comparing slices is much faster than a loop."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
