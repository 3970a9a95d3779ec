"""Answers from an OpenAI-compatible server of the target (vLLM, SGLang, `transformers serve`, ...), many requests at once.

    draftsmith data regenerate RECIPE data.server=http://localhost:8000/v1

A server gives text: it is tokenised again by the target's own template (see `templates.py`), and an answer that was cut off at data.response_tokens
has no end of turn there. A request that fails in passing (no connection, a time-out, too many requests, the server's own errors) is made again by the
client, later and later; one that the server refuses for good leaves that conversation without its next answer. The key is that of OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .. import UserError
from .regenerate import REFUSED, Talk, temperature_of
from .sources import tool_call

if TYPE_CHECKING:
    from ..recipes.schema import Data

_MANY = 8  # refusals before the first answer that are taken for a mistake in the settings


class ByServer:
    """Conversations one by one, data.server_concurrency of them at once, each turn after turn.

    name: the target's name for the server, if data.server_model is null. template: variables of the chat template, for servers that take them.
    Raises UserError without the openai library, if the server cannot be reached or fails for too long, and if it refuses everything.
    """

    batch = 1

    def __init__(self, data: Data, name: str, template: Mapping[str, Any], share: int = 1) -> None:
        self.data, self.template = data, dict(template)
        self.model = data.server_model or name
        self.concurrency = max(1, data.server_concurrency // share)
        self.refused: list[str] = []  # what the server said

    def answer(self, batches: list[list[Talk]], *, begun: bool = False) -> Iterator[tuple[list[Talk], int]]:
        """See `Answering`. The requests run in a thread of their own, so that what is done is written while others are on their way.

        Refusals are held back until something was answered: settings that the server does not take leave nothing behind.
        """
        done: queue.Queue[tuple[Talk, int] | BaseException | None] = queue.Queue()
        stop = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._all([talk for batch in batches for talk in batch], done, stop))
                done.put(None)
            except BaseException as error:
                while isinstance(error, BaseExceptionGroup):  # of the group of workers: the first to fail ended all
                    error = error.exceptions[0]
                done.put(error)

        thread = threading.Thread(target=work, daemon=True)  # an interrupted run does not wait for what is under way
        thread.start()
        held: list[Talk] = []
        try:
            while (item := done.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                talk, tokens = item
                begun |= any(why != REFUSED for why in talk.finish)
                held.append(talk)
                if not begun and len(held) >= min(_MANY, len(batches)):
                    raise UserError(f"data.server {self.data.server}: wanted answers, got refusals only ({self.refused[0]}); correct the settings")
                if begun:
                    yield held, tokens
                    held = []
        finally:
            stop.set()

    async def _all(self, talks: list[Talk], done: queue.Queue[Any], stop: threading.Event) -> None:
        """Workers that take one conversation after the other: never more requests at once than there are of them."""
        try:
            import openai
        except ImportError as error:
            raise UserError("data.server: wanted the library openai, got none installed; pip install 'draftsmith[server]'") from error
        left = iter(talks)
        client = openai.AsyncOpenAI(
            base_url=self.data.server,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=self.data.server_retries,
            timeout=self.data.server_timeout,
        )

        async def worker() -> None:
            for talk in left:
                if stop.is_set():
                    return
                done.put((talk, await self._talk(client, talk)))

        async with client, asyncio.TaskGroup() as group:  # the first error ends all
            for _ in range(min(self.concurrency, len(talks))):
                group.create_task(worker())

    async def _talk(self, client: Any, talk: Talk) -> int:
        """Bring a conversation to its end. Returns the tokens that the server counted."""
        import openai

        tokens, turn = 0, 0
        while talk.ask():
            request: dict[str, Any] = {
                "model": self.model,
                "messages": talk.messages,
                "max_tokens": self.data.response_tokens,
                "temperature": temperature_of(self.data, talk.index),
                "seed": self.data.seed + talk.index + turn * 1_000_003,
            }
            if talk.tools:
                request["tools"] = talk.tools
            if self.template:
                request["extra_body"] = {"chat_template_kwargs": self.template}
            try:
                reply = await client.chat.completions.create(**request)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:  # of this request: too long, say
                self.refused.append(_said(error))
                talk.refuse()
                break
            except openai.OpenAIError as error:
                raise UserError(
                    f"data.server {self.data.server}: wanted answers of {self.model}, got {_said(error)} (data.server_retries is "
                    f"{self.data.server_retries}); what was answered is kept: mend it, and run this again"
                ) from error
            if not reply.choices:
                raise UserError(f"data.server {self.data.server}: wanted an answer, got a reply without one")
            choice = reply.choices[0]
            talk.answer(_message(choice.message), "length" if choice.finish_reason == "length" else "stop")
            tokens += reply.usage.completion_tokens if reply.usage else 0
            turn += 1
        return tokens


def _message(reply: Any) -> dict[str, Any]:
    """What a template needs of an answer. Servers that part the thinking from the answer give it under one of two names."""
    message: dict[str, Any] = {"content": reply.content or ""}
    extra = reply.model_extra or {}
    if thinking := extra.get("reasoning_content") or extra.get("reasoning"):
        message["reasoning_content"] = thinking
    if reply.tool_calls:
        message["tool_calls"] = [_called(call.model_dump(exclude_none=True)) for call in reply.tool_calls]
    return message


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call in the form of those that are given; one whose arguments are no JSON stays as the model wrote it."""
    try:
        return tool_call(call, "answer")
    except UserError:
        return call


def _said(error: BaseException) -> str:
    """An error in a few words, with what caused it: "Connection error." alone says little."""
    cause = f" ({error.__cause__})" if error.__cause__ and str(error.__cause__) else ""
    return " ".join(f"{error}{cause}".split())[:200]
