"""llama.cpp: greedy generation in float32 by llama-server on a CPU, one prompt after the other, with the drafts of every round from its debug log.

    DRAFTSMITH_LLAMACPP=llama.cpp python llamacpp_runner.py job.json result.json

DRAFTSMITH_LLAMACPP is llama.cpp's folder: convert_hf_to_gguf.py lies in it, and llama-server in build/bin; the python has torch and transformers.
job: target, speculative (method, model, num_speculative_tokens; or null), prompts, max_tokens, max_model_len. result: outputs, drafts (a list a
prompt, a list a round), metrics, versions. What is converted is kept beside the temporary files, by path and time of the last change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

TYPES = {"draft_model": "draft-simple", "eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark"}
CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")  # the best one of a place
START = re.compile(r"launch_slot_: .*processing task")
WAIT = 120.0  # seconds that a server may take to load


def home() -> Path:
    """llama.cpp's folder."""
    place = os.environ.get("DRAFTSMITH_LLAMACPP", "")
    if not (Path(place) / "convert_hf_to_gguf.py").is_file() or not server(Path(place)).is_file():
        sys.exit(f"DRAFTSMITH_LLAMACPP: wanted llama.cpp's folder, with convert_hf_to_gguf.py and build/bin/llama-server, got {place or 'nothing'}")
    return Path(place).resolve()


def server(place: Path) -> Path:
    """The program."""
    return place / "build" / "bin" / "llama-server"


def convert(place: str, *arguments: str) -> None:
    """llama.cpp's converter, in this process. It knows pre-tokenizers by a table; prompts are token ids here, so an unknown one does no harm."""
    sys.path[:0] = [place, str(Path(place) / "gguf-py")]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    find = TextModel.get_vocab_base_pre

    def found(self: Any, tokenizer: Any) -> str:
        try:
            return str(find(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = found
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(Path(place) / "convert_hf_to_gguf.py"), run_name="__main__")


def converted(place: Path, model: str, target: str | None = None) -> str:
    """The GGUF of a model. target: of a head, whose sizes and tokenizer the converter reads."""
    stamp = max(path.stat().st_mtime for path in Path(model).iterdir())
    name = hashlib.sha256(f"{place} {model} {stamp} {target}".encode()).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"draftsmith-llamacpp-{name}.gguf"
    if not file.is_file():
        partial = file.with_suffix(".partial")
        more = ["--target-model-dir", target] if target else []
        command = [sys.executable, __file__, "--convert", str(place), model, "--outtype", "f32", "--outfile", str(partial), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit("\n".join(done.stderr.strip().splitlines()[-3:]))
        partial.rename(file)
    return str(file)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(address: str, body: dict[str, Any] | None = None) -> Any:
    """A request, and its JSON answer."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address, data, {"Content-Type": "application/json"}), timeout=600) as answer:
        return json.load(answer)


def wait_for(running: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Until the server answers."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end and running.poll() is None:
        try:
            ask(f"{address}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    sys.exit(f"llama-server did not start: {last_lines(log)}")


def last_lines(log: Path) -> str:
    """What it said last, errors first."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join([line for line in lines if " E " in line or "GGML_ASSERT" in line][-2:] or lines[-3:])


def drafts_of(log: str) -> list[list[list[int]]]:
    """[prompt][round][token] from a debug log: the best candidate of every place; the places of a round ascend."""
    drafts: list[list[list[int]]] = []
    last = -1
    for line in log.splitlines():
        if START.search(line):
            drafts.append([])
            last = -1
        elif (found := CANDIDATE.search(line)) and drafts:
            place, token = int(found[1]), int(found[2])
            if place <= last or not drafts[-1]:
                drafts[-1].append([])
            drafts[-1][-1].append(token)
            last = place
    return drafts


def start(place: Path, job: dict[str, Any], address: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """The server, with float32 caches and one thread."""
    speculative: dict[str, Any] = job["speculative"] or {}
    port = address.rpartition(":")[2]
    command = [str(server(place)), "-m", converted(place, job["target"]), "--host", "127.0.0.1", "--port", port, "--no-ui", "--no-warmup"]
    command += ["-np", "1", "-c", str(job["max_model_len"]), "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-fit", "off", "-cram", "0", "-lv", "5"]
    command += ["-t", "1", "-tb", "1"]
    if speculative:
        method = speculative["method"]
        draft = converted(place, speculative["model"], None if method == "draft_model" else job["target"])
        command += ["-md", draft, "--spec-type", TYPES[method], "--spec-draft-n-max", str(speculative["num_speculative_tokens"])]
        command += ["-ctkd", "f32", "-ctvd", "f32", "-td", "1", "-tbd", "1"]
    return subprocess.Popen(command, stdout=log, stderr=log)


def main(job_file: str, result_file: str) -> None:
    """Run the job."""
    place, job = home(), json.loads(Path(job_file).read_text())
    address = f"http://127.0.0.1:{free_port()}"
    log = Path(result_file).with_suffix(".log")
    body = {"n_predict": job["max_tokens"], "temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True, "seed": 0}
    outputs, accepted, drafted = [], 0, 0
    with log.open("wb") as handle:
        running = start(place, job, address, handle)
        try:
            wait_for(running, address, log)
            build = ask(f"{address}/props").get("build_info", "unknown")
            for prompt in job["prompts"]:
                answer = ask(f"{address}/completion", body | {"prompt": prompt})
                outputs.append(answer["tokens"])
                accepted += answer["timings"].get("draft_n_accepted", 0)
                drafted += answer["timings"].get("draft_n", 0)
        except (urllib.error.URLError, ConnectionError) as error:
            sys.exit(f"llama-server failed ({error}): {last_lines(log)}")
        finally:
            running.terminate()
            running.wait()
    result: dict[str, Any] = {"outputs": outputs, "metrics": {"num_accepted_tokens": accepted, "num_draft_tokens": drafted}}
    if job["speculative"]:
        result["drafts"] = drafts_of(log.read_text(errors="replace"))
    Path(result_file).write_text(json.dumps(result | {"versions": {"llama.cpp": build}}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--convert"]:
        convert(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
