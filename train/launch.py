"""Processes: starting one a core on this machine, and noticing a launcher that started fewer than were asked for."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .. import UserError

# glibc else gives a step's memory back to the system and asks for it anew: up to 1.3 times the time of a small model's step (two-core Xeon).
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}


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
        return _watch(started)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _watch(started: list[tuple[subprocess.Popen[bytes], IO[bytes] | None]]) -> int:
    """Wait for all processes. If one fails, the others would wait for it for ever: returns its exit code; what it said is printed."""
    main = started[0][0]
    while main.poll() is None or any(process.poll() is None for process, _ in started):
        failed = [(process, errors) for process, errors in started[1:] if process.poll()]
        if failed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(5)  # most often it fails alike, and says why itself
        if main.poll():
            return int(main.returncode)
        if failed:
            process, errors = failed[0]
            assert errors is not None
            errors.seek(0)
            print(errors.read().decode(errors="replace").strip(), file=sys.stderr)
            return int(process.returncode)
        time.sleep(0.1)
    return max(int(process.returncode) for process, _ in started)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_launch() -> None:
    """Stop if more processes were asked for than this run has: `accelerate launch --cpu --num_processes 2` drops them without a word."""
    asked = 1
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, PermissionError):  # not Linux, or another user's process
        words = []
    if any(Path(word).name == "accelerate" or "accelerate.commands" in word for word in words):
        for index, word in enumerate(words):
            flag, _, value = word.partition("=")
            if flag in ("--num_processes", "--num-processes"):
                asked = int(value or words[index + 1])
    if asked > 1 and int(os.environ.get("WORLD_SIZE", "1")) < asked:
        raise UserError(
            f"processes: wanted {asked}, got 1, as accelerate dropped the others; on a CPU launch with: "
            f"ACCELERATE_USE_CPU=true torchrun --nproc_per_node {asked} -m draftsmith.train RECIPE"
        )
