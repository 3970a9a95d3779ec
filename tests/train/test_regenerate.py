"""Regeneration: turn by turn the target's own answers, whatever interrupts them, by our engine and by servers.

A long run of kills: DRAFTSMITH_KILLS=20 pytest tests/train/test_regenerate.py -k kill
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.prompts import eos_ids, render_prompt
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.recipes.schema import Data, DrafterRecipe, Eval, TargetRef
from draftsmith.train.data import prepare
from draftsmith.train.preparing import open_tokenizer, run_regenerate
from draftsmith.train.regenerate import Part, Store, samples_of
from rich.console import Console

KILLS = int(os.environ.get("DRAFTSMITH_KILLS", "3"))
TALKS = [[f"x{i} = {i}\n", f"y = {i}\n", "z"][: 1 + i % 3] for i in range(9)]  # what users say, one to three times


@pytest.fixture(scope="module")
def target() -> Target:
    return Ending.load(TargetRef().location)


class Ending(Target):
    """Likes to end, so that conversations go on."""

    def logits(self, hidden: torch.Tensor, ids_V: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().logits(hidden, ids_V)
        logits[..., 0] += 6.0
        return logits

    def _check_logits(self) -> None:
        """They are not the model's."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    talks = [[m for text in talk for m in ({"role": "user", "content": text}, {"role": "assistant", "content": "?"})] for talk in TALKS]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def recipe(source: Path, **data: Any) -> DrafterRecipe:
    settings = {"num_prompts": 9, "response_tokens": 6, "generation_batch": 2, "sequence_length": 128, "temperatures": [0.0, 1.0], **data}
    suite = source.with_name("suite.jsonl")
    suite.write_text('{"prompt": "something else"}\n')
    return DrafterRecipe(name="r", data=Data(source=str(source), **settings), eval=Eval(suite=str(suite), num_prompts=1, dev_prompts=1))


def in_a_child(work: Callable[[], object], seconds: float | None = None) -> bool:
    """Do it in a process of its own, which is killed after so long. Returns whether it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of this process, which wait for work; the child has none of them
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert seconds is not None or status == 0, status
    return status == 0


def kill_again_and_again(work: Callable[[], object], store: Path, took: float) -> None:
    """Kill `work` at random moments of the time that it takes, starting anew where it came to its end; then let it end."""
    generator, kills, held = random.Random(5), 0, 0
    while kills < KILLS:
        if in_a_child(work, generator.uniform(0, took)) or store.exists():
            store.unlink()
            held = 0
            continue
        kills += 1
        lines = sum(part.read_bytes().count(b"\n") for part in store.parent.glob("*.part"))
        assert lines >= held  # nothing that was there is lost
        held = lines
    in_a_child(work)


def test_every_turn_is_answered_in_order_with_the_target_s_own_history(target: Target, source: Path, tmp_path: Path) -> None:
    """The oracle asks turn by turn, one conversation at a time."""
    assert target.tokenizer is not None
    settings = recipe(source, generation_batch=4)
    samples = prepare(target, settings, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "data" / "responses.jsonl").read_text().splitlines()[1:]]
    stops, learned = eos_ids(target.model), 0
    assert len(lines) == 9 and {len(line["finish"]) for line in lines} > {1}
    for line in lines:
        messages: list[dict[str, str]] = []
        for turn, why in enumerate(line["finish"]):
            messages.append(line["messages"][2 * turn])
            seed = line["index"] + 1_000_003 * turn
            params = SamplingParams(temperature=[0.0, 1.0][line["index"] % 2], seed=seed)
            out = Engine(target).generate([render_prompt(target.tokenizer, messages)], params, 6, eos_ids=stops)
            new = out.tokens[0]
            assert why == ("stop" if new[-1] in stops else "length") and (why == "stop" or turn == len(line["finish"]) - 1)
            messages.append({"role": "assistant", "content": target.tokenizer.decode([t for t in new if t not in stops])})
            learned += len(new)
        assert messages == line["messages"]
    assert sum(sample.learned for sample in samples) == learned
    whole = [line for line in lines if len(line["finish"]) == 1]
    assert len(samples) >= 9 and len(whole) < 9


def test_kills_lose_and_double_nothing(target: Target, source: Path, tmp_path: Path) -> None:
    settings = recipe(source, generation_batch=1, response_tokens=12)
    began = time.monotonic()
    in_a_child(lambda: prepare(target, settings, tmp_path / "undisturbed"))
    took = time.monotonic() - began
    store = tmp_path / "killed" / "data" / "responses.jsonl"
    kill_again_and_again(lambda: prepare(target, settings, tmp_path / "killed"), store, took)
    assert store.read_bytes() == (tmp_path / "undisturbed" / "data" / "responses.jsonl").read_bytes()
    assert [path.name for path in store.parent.iterdir()] == ["responses.jsonl"]


def test_wherever_a_part_was_torn_the_store_is_the_same(target: Target, source: Path, tmp_path: Path) -> None:
    """A part of a run that ended is cut at several places: within the first line, at a line's end, within the last."""
    settings = recipe(source, response_tokens=4)
    prepare(target, settings, tmp_path)
    store = tmp_path / "data" / "responses.jsonl"
    whole = store.read_bytes()
    for cut in (3, whole.index(b"\n") + 1, len(whole) // 2, len(whole) - 1):
        store.unlink()
        store.with_name("responses.jsonl.0.part").write_bytes(whole[:cut])
        prepare(target, settings, tmp_path)
        assert store.read_bytes() == whole
    store.unlink()
    damaged = whole.split(b"\n")
    damaged[2] = damaged[2][:9]
    store.with_name("responses.jsonl.0.part").write_bytes(b"\n".join(damaged))
    with pytest.raises(UserError, match=r"responses\.jsonl\.0\.part:3: wanted a line of JSON, got a damaged one"):
        prepare(target, settings, tmp_path)


def test_answers_that_were_cut_off_are_dropped_if_asked_for(target: Target, source: Path, tmp_path: Path) -> None:
    kept, dropped = (prepare(target, recipe(source, truncated=how), tmp_path) for how in ("keep", "drop"))
    stops = set(eos_ids(target.model))
    assert sum(sample.learned for sample in dropped) < sum(sample.learned for sample in kept)
    assert all(sample.ids[stop - 1] in stops and sample.ids[stop:] == [] for sample in dropped for _, stop in sample.spans[-1:])


class Fake(BaseHTTPRequestHandler):
    """Answers with a hash of what it was asked; its server's attributes say how it misbehaves, and count what came."""

    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state, key = self.server, json.dumps(body["messages"])
        with state.lock:
            state.now += 1
            state.most = max(state.most, state.now)
            state.requests.append(body)
            failing = state.failures.get(key, state.fail_first)
            state.failures[key] = failing - 1
        time.sleep(state.delay)
        with state.lock:
            state.now -= 1
        if failing > 0:
            self.reply([429, 503, 500][failing % 3], {"error": {"message": "busy"}})
        elif state.refuse(body):
            self.reply(400, {"error": {"message": "too long for me"}})
        else:
            number = sum(map(ord, key + str(body["seed"]))) % 1000
            message: dict[str, Any] = {"role": "assistant", "content": f"v = {number}\n"}
            choice = {"index": 0, "message": message, "finish_reason": "length" if number % 4 == 0 else "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}
            self.reply(200, {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Fake)
        self.lock, self.now, self.most, self.delay, self.fail_first = threading.Lock(), 0, 0, 0.0, 0
        self.requests: list[dict[str, Any]] = []
        self.failures: dict[str, int] = {}
        self.refuse: Callable[[dict[str, Any]], bool] = lambda body: False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None:
        """Clients that were killed are none."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    pytest.importorskip("openai")
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()
    thread.join()


def made(settings: DrafterRecipe, folder: Path) -> list[dict[str, Any]]:
    import dataclasses

    run_regenerate(dataclasses.replace(settings, out=str(folder)), Console(quiet=True))
    return [json.loads(line) for line in (folder / "data" / "responses.jsonl").read_text().splitlines()[1:]]


def test_a_server_is_asked_turn_by_turn_never_too_often_at_once_and_again_after_failures(source: Path, tmp_path: Path, server: FakeServer) -> None:
    settings = recipe(source, server=server.url, server_model="m", server_concurrency=3, server_retries=2)
    server.delay, server.fail_first = 0.02, 1
    lines = made(settings, tmp_path)
    assert server.most == 3
    answers = sum(len(line["finish"]) for line in lines)
    assert len(server.requests) == 2 * answers > 18  # each failed once
    for line in lines:
        assert [m["role"] for m in line["messages"]] == ["user", "assistant"] * len(line["finish"])
        assert len(line["finish"]) == len(TALKS[0]) or "length" not in line["finish"][:-1]
    first = {body["messages"][0]["content"]: body for body in server.requests if len(body["messages"]) == 1}
    for line in lines:
        body = first[line["messages"][0]["content"]]
        assert (body["seed"], body["temperature"], body["max_tokens"], body["model"]) == (line["index"], [0.0, 1.0][line["index"] % 2], 6, "m")
    histories = [body["messages"] for body in server.requests if len(body["messages"]) > 1]
    assert histories and all("?" not in message["content"] for history in histories for message in history)  # the target's own, not the source's
    tokenizer, stops, _ = open_tokenizer(TargetRef())
    for line in lines:
        (sample,) = samples_of([line], tokenizer, stops, settings.data)
        said = [m["content"] + "<|end|>" * (why == "stop") for m, why in zip(line["messages"][1::2], line["finish"], strict=True)]
        assert [tokenizer.decode(sample.ids[a:b]) for a, b in sample.spans] == said
    before = len(server.requests)
    assert made(settings, tmp_path) == lines and len(server.requests) == before  # what is finished is read


def test_kills_lose_and_double_nothing_of_a_server_s_answers(source: Path, tmp_path: Path, server: FakeServer) -> None:
    settings = recipe(source, server=server.url, server_model="m", server_concurrency=2)
    server.delay = 0.05
    made(settings, tmp_path / "undisturbed")
    store = tmp_path / "killed" / "data" / "responses.jsonl"
    kill_again_and_again(lambda: made(settings, tmp_path / "killed"), store, 1.0)
    assert store.read_bytes() == (tmp_path / "undisturbed" / "data" / "responses.jsonl").read_bytes()


def test_what_a_server_refuses_or_fails_at_is_one_clear_line(source: Path, tmp_path: Path, server: FakeServer) -> None:
    settings = recipe(source, server=server.url, server_model="m", server_retries=1)
    server.refuse = lambda body: "x4" in body["messages"][0]["content"]
    lines = made(settings, tmp_path / "some")
    assert sum(line["finish"] == ["refused"] for line in lines) == 1 and len(lines) == 9
    server.refuse = lambda body: True
    with pytest.raises(UserError, match=r"^data\.server .*: wanted answers, got refusals only \(.*too long for me"):
        made(settings, tmp_path / "none")
    server.failures.clear()
    server.fail_first = 9
    with pytest.raises(
        UserError, match=r"^data\.server .*: wanted answers of m, got .*busy.* \(data\.server_retries is 1\); what was answered is kept"
    ):
        made(settings, tmp_path / "failing")
    with pytest.raises(UserError, match=r"^data\.server http://127\.0\.0\.1:9/v1: wanted answers of m, got Connection error"):
        made(recipe(source, server="http://127.0.0.1:9/v1", server_model="m", server_retries=0), tmp_path / "absent")


def test_settings_that_a_server_does_not_take_leave_nothing_behind(source: Path, tmp_path: Path, server: FakeServer) -> None:
    """The same folder with the right settings goes on as if nothing had been tried."""
    with pytest.raises(UserError, match=r"got Connection error"):
        made(recipe(source, server="http://127.0.0.1:9/v1", server_model="m", server_retries=0), tmp_path)
    server.refuse = lambda body: bool(body["model"] == "wrong")
    with pytest.raises(UserError, match=r"got refusals only"):
        made(recipe(source, server=server.url, server_model="wrong"), tmp_path)
    lines = made(recipe(source, server=server.url, server_model="right"), tmp_path)
    assert [line["index"] for line in lines] == list(range(9)) and not any("refused" in line["finish"] for line in lines)


def test_conversations_that_are_refused_after_an_interruption_are_no_mistake_in_the_settings(
    source: Path, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(source, server=server.url, server_model="m", server_concurrency=1)
    with monkeypatch.context() as patch:
        patch.setattr(Part, "write", write_until(5))
        with pytest.raises(KeyboardInterrupt):
            made(settings, tmp_path)
    server.refuse = lambda body: True
    assert [line["finish"] == ["refused"] for line in made(settings, tmp_path)] == [False] * 4 + [True] * 5


def write_until(lines: int) -> Callable[[Part, list[Any]], None]:
    """Part.write, interrupted in front of the line of this number; the key is a line."""
    count, write = 0, Part.write

    def limited(part: Part, entries: list[Any]) -> None:
        nonlocal count
        count += len(entries)
        if count > lines:
            raise KeyboardInterrupt
        write(part, entries)

    return limited


def test_an_answer_s_tool_calls_are_as_templates_want_them() -> None:
    """Servers give arguments as a JSON string; templates iterate over a mapping. What is no JSON stays what the model wrote."""
    pytest.importorskip("openai")
    from draftsmith.train.server import _message
    from openai.types.chat import ChatCompletionMessage

    for given, wanted in (('{"a": 2}', {"a": 2}), ('{"a": ', '{"a": ')):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
        message = _message(ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"}))
        assert message["content"] == "" and message["reasoning_content"] == "why"
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": wanted}


def test_a_finished_store_of_the_same_is_taken_over_another_is_not(target: Target, source: Path, tmp_path: Path) -> None:
    settings = recipe(source)
    prepare(target, settings, tmp_path / "a")
    path = tmp_path / "a" / "data" / "responses.jsonl"
    key = json.loads(path.read_text().splitlines()[0])
    for other, taken in ((key, True), (key | {"schema": 0}, False)):
        store = Store(tmp_path / f"{taken}" / "data" / "responses.jsonl", other)
        store.adopt(path)
        assert store.finished == taken and (not taken or store.path.read_bytes() == path.read_bytes())
        store.adopt(tmp_path / "nowhere")


def test_transformers_serve_answers_as_our_engine_does(target: Target, source: Path, tmp_path: Path) -> None:
    """Greedily, token by token, where texts tokenise as they were generated. It needs `pip install transformers[serving]`."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("transformers serve needs fastapi, uvicorn and others: pip install transformers[serving]")
    pytest.importorskip("openai")
    command = [
        str(Path(sys.executable).with_name("transformers")),
        "serve",
        TargetRef().location,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--port",
        "8799",
    ]
    log = tmp_path / "serve.log"
    with log.open("wb") as handle, subprocess.Popen(command, stdout=handle, stderr=handle) as process:
        try:
            _wait_for("http://127.0.0.1:8799/health", process, log)
            settings = recipe(source, temperatures=[0.0], server="http://127.0.0.1:8799/v1", server_model=TargetRef().location, server_concurrency=2)
            served = made(settings, tmp_path / "served")
        finally:
            process.terminate()
    ours = made(recipe(source, temperatures=[0.0]), tmp_path / "ours")
    assert target.tokenizer is not None
    stops = eos_ids(target.model)
    for got, want in zip(served, ours, strict=True):
        assert got["messages"] == want["messages"] and got["finish"] == want["finish"]
        (sample,) = samples_of([got], target.tokenizer, stops, settings.data)
        assert sum(sample.learned for sample in samples_of([want], target.tokenizer, stops, settings.data)) >= sample.learned - 1


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no answer of {url}: {log.read_text()}")
