"""Processes: starting one a core on this machine, and noticing a launcher that started fewer than were asked for."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import yaml
from accelerate import Accelerator

from .. import UserError
from .engines import configured

# glibc else gives a step's memory back to the system and asks for it anew: up to 1.3 times the time of a small model's step (two-core Xeon).
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}

PATIENCE = 5.0  # seconds, of a process that failed with the main one


def run_processes(arguments: Sequence[str], processes: int) -> int:
    """`python -m draftsmith.train` with these arguments in so many CPU processes of this machine. Returns the exit code."""
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), **_KEEP_MEMORY}
    # One process each, as torchrun starts them, but without its agent: an exit code and its one line of error come through unchanged.
    command = [sys.executable, "-m", "draftsmith.train", *arguments]
    with contextlib.ExitStack() as stack:
        started: list[tuple[subprocess.Popen[bytes], IO[bytes] | None]] = []
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            errors = None if rank == 0 else stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(command, env={**os.environ, **environment, **place}, stderr=errors)
            stack.callback(_end, process)
            started.append((process, errors))
        return _watch(started, stack.enter_context(_passed_on([process for process, _ in started])))


@contextlib.contextmanager
def _passed_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """SIGTERM and SIGINT go to the processes, which save and end. Gives the list of those that came."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for process in processes:
            if number == signal.SIGTERM or not sys.stdin.isatty():  # a terminal sends SIGINT to them itself
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _watch(started: list[tuple[subprocess.Popen[bytes], IO[bytes] | None]], came: list[int]) -> int:
    """Wait for all processes. If one fails, the others would wait for it for ever: returns its exit code; what it said is printed.

    came: signals that were passed on, after which the main process, which writes what is left of the run, is waited for.
    """
    main = started[0][0]
    while main.poll() is None or any(process.poll() is None for process, _ in started):
        failed = [(process, errors) for process, errors in started[1:] if process.poll()]
        if failed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(600 if came else PATIENCE)  # most often it fails alike, and says why itself
        if main.poll():
            return _ended(0, main)
        if failed:
            process, errors = failed[0]
            assert errors is not None
            errors.seek(0)
            if said := errors.read().decode(errors="replace").strip():
                print(said, file=sys.stderr)
            return _ended([other for other, _ in started].index(process), process)
        time.sleep(0.1)
    return next((_ended(rank, process) for rank, (process, _) in enumerate(started) if process.returncode), 0)


def _ended(rank: int, process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that failed, as shells have it. One that a signal ended could not say so itself."""
    code = int(process.returncode)
    if code >= 0:
        return code
    with contextlib.suppress(ValueError):
        likely = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        print(f"error: process {rank} was ended by {signal.Signals(-code).name}{likely}; start the same command again to go on", file=sys.stderr)
    return 128 - code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_launch() -> None:
    """Stop if more processes were asked for than this run has: `accelerate launch --cpu --num_processes 2` drops them without a word."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, PermissionError):  # not Linux, or another user's process
        return
    if any(Path(word).name == "accelerate" or "accelerate.commands" in word for word in words):
        _check_world(asked_of_accelerate(words), int(os.environ.get("WORLD_SIZE", "1")))


def check_engaged(accelerator: Accelerator) -> None:
    """Stop if the processes that a launcher started do not know of each other, or a configured engine cannot be engaged."""
    _check_world(int(os.environ.get("WORLD_SIZE", "1")), accelerator.num_processes)
    configured()


def asked_of_accelerate(words: Sequence[str]) -> int:
    """The processes that a command line of `accelerate launch` asks for, by its flag or its configuration."""
    flags: dict[str, str] = {}
    for word, following in itertools.pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        flags.setdefault(flag.replace("-", "_"), value or following)
    if "__num_processes" in flags:
        return int(flags["__num_processes"])
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    path = Path(flags.get("__config_file", str(home / "accelerate" / "default_config.yaml")))
    if not path.is_file():
        return 1
    config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return int(config.get("num_processes", 1))


def _check_world(asked: int, got: int) -> None:
    if got < asked:
        raise UserError(
            f"processes: wanted {asked}, got {got}, as accelerate dropped the others; on a CPU launch with: "
            f"ACCELERATE_USE_CPU=true torchrun --nproc_per_node {asked} -m draftsmith.train RECIPE"
        )
