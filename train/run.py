"""Run a recipe, from data to report: `draftsmith train RECIPE` and `accelerate launch -m draftsmith.train RECIPE` both come here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import UserError, __version__
from ..decode.engine import Engine
from ..decode.prompts import eos_ids, render_prompt
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..eval.drafting import make_proposer, plain
from ..eval.harness import Settings, build_report, choose_threads, evaluate
from ..eval.report import read_report, terminal_table, write_report
from ..eval.schema import Report
from ..eval.suites import load_suite
from ..heads.eagle3 import Eagle3
from ..heads.export import vllm
from ..heads.head import Head
from ..heads.registry import METHODS, load_drafter, new_head, open_drafter, save_drafter
from ..recipes.schema import DrafterRecipe, TargetRecipe, load_recipe, to_yaml
from .data import batches, frequent_tokens, regenerate
from .features import Features
from .language_model import schedule, train_language_model
from .objectives import OBJECTIVES
from .objectives.common import Objective
from .optimizers import muon_and_adamw

console = Console()
# glibc else gives a step's memory back to the system and asks for it anew: up to 1.3 times the time of a small model's step (two-core Xeon).
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}


def main(arguments: Sequence[str]) -> int:
    """The command line of both launchers; returns the exit code (0 done, 1 the gate failed, 2 bad input)."""
    try:
        if not arguments:
            raise UserError("recipe: wanted RECIPE [key=value ...], got nothing (all: draftsmith recipes list)")
        return run(load_recipe(arguments[0], arguments[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(recipe: DrafterRecipe | TargetRecipe) -> int:
    """Run all stages of a recipe in its run folder. What is finished there already, by the same recipe, is not done again."""
    check_launch()
    folder = open_run_folder(recipe)
    if isinstance(recipe, TargetRecipe):
        train_language_model(recipe, folder, lambda entry: console.print(entry))
        return 0
    return train_drafter(recipe, folder)


def run_on_all_cores(recipe: DrafterRecipe) -> int:
    """`run`, with one process a core where there is no GPU: small models gain little from threads. All processes are of this machine."""
    batch = recipe.train.batch_size
    processes = 1 if torch.cuda.is_available() else max(n for n in range(1, min(os.cpu_count() or 1, batch) + 1) if batch % n == 0)
    if processes == 1 or _finished(recipe.run_folder):
        return run(recipe)
    folder = open_run_folder(recipe)
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), **_KEEP_MEMORY}
    # One process each, as torchrun starts them, but without its agent: an exit code and its one line of error come through unchanged.
    command = [sys.executable, "-m", "draftsmith.train", str(folder / "recipe.yaml")]
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


def open_run_folder(recipe: DrafterRecipe | TargetRecipe) -> Path:
    """The run folder, with recipe.yaml in it. Raises UserError if it cannot be written, or holds a run of another recipe."""
    folder = recipe.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"out: wanted a folder that can be written, got {folder} ({error.strerror}); give another out=FOLDER") from error
    text, kept = to_yaml(recipe), folder / "recipe.yaml"
    if kept.is_file() and kept.read_text() != text:
        raise UserError(f"out: wanted a new folder, got {folder}, which holds a run of another recipe; give another out=FOLDER")
    kept.write_text(text)
    return folder


def _finished(folder: Path) -> bool:
    return (folder / "eval" / "report.json").is_file() and (folder / "drafter" / "config.json").is_file()


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


def train_drafter(recipe: DrafterRecipe, folder: Path) -> int:
    """Data, training with measured decoding, evaluation, export. Returns the exit code."""
    objective = make_objective(recipe)
    plain_eagle3 = recipe.drafter.method == "eagle3" and not recipe.drafter.norm_features and recipe.drafter.num_layers in (None, 1)
    known = ["vllm"] if plain_eagle3 else []
    unknown = [name for name in recipe.export.formats if name not in known]
    if unknown:
        raise UserError(f"export.formats: wanted [{', '.join(known)}] for this {recipe.drafter.method} drafter, got [{', '.join(unknown)}]")
    accelerator = Accelerator(mixed_precision=recipe.train.mixed_precision, log_with=list(recipe.train.trackers) or None, project_dir=str(folder))
    main_process = accelerator.is_main_process
    if _finished(folder):
        return _finish(read_report(folder / "eval" / "report.json"), folder) if main_process else 0
    ref = recipe.target
    target = Target.load(
        ref.location, dtype=ref.dtype, device=str(accelerator.device), attn_implementation=ref.attn_implementation, revision=ref.revision
    )
    began = time.monotonic()
    with _bar(main_process) as bar:
        task = bar.add_task("target's own responses (this process)", total=None, note="")
        sequences = regenerate(
            target,
            recipe.data,
            folder / "data" / "responses.jsonl",
            lambda done, every, tokens: bar.update(task, completed=done, total=every, note=f"{tokens / (time.monotonic() - began):.0f} tokens/s"),
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.wait_for_everyone,
        )
    generated = time.monotonic() - began
    figures: dict[str, Any] = {"data_seconds": generated, "sequences": len(sequences), "response_tokens": sum(len(i) - p for i, p in sequences)}
    if not (folder / "drafter" / "config.json").is_file():
        figures |= _fit(recipe, objective, folder, accelerator, target, sequences)
        if main_process:
            (folder / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if not main_process:
        return 0
    if (folder / "training.json").is_file():
        figures = json.loads((folder / "training.json").read_text())
    return _finish(_measure(recipe, folder, target, figures), folder)


def _fit(
    recipe: DrafterRecipe, objective: Objective, folder: Path, accelerator: Accelerator, target: Target, sequences: list[tuple[list[int], int]]
) -> dict[str, Any]:
    """The training loop: step / log / measure by real decoding / keep the best."""
    train, main_process = recipe.train, accelerator.is_main_process
    torch.manual_seed(train.seed)
    if train.keep_last != 1:
        raise UserError(f"train.keep_last: wanted 1, got {train.keep_last}; resuming is not supported yet, so only the best checkpoint is kept")
    if train.micro_batch_size is not None and train.micro_batch_size * accelerator.num_processes > train.batch_size:
        raise UserError(f"train.micro_batch_size: wanted at most batch_size / processes, got {train.micro_batch_size} on {accelerator.num_processes}")
    if recipe.drafter.init:
        drafter, _ = load_drafter(recipe.drafter.init, target, dtype=torch.float32)
        if drafter.method != recipe.drafter.method:
            raise UserError(f"drafter.init: wanted a drafter of method {recipe.drafter.method}, got {drafter.method}")
        drafter.train()
    else:
        drafter = new_head(recipe.drafter.method, target, recipe.drafter.settings)
        make_proposer(drafter, plain(recipe.decode), target, [0])  # a tree that it cannot draft is found out now, not at the first measurement
        drafter.set_draft_vocabulary(frequent_tokens(sequences, drafter.sizes.draft_vocab_size, drafter.sizes.target_vocab_size), target)
    betas = (train.betas[0], train.betas[1])
    optimizers: list[torch.optim.Optimizer]
    if train.optimizer == "muon":
        optimizers = muon_and_adamw(drafter, train.lr, betas, train.weight_decay)
    else:
        optimizers = [torch.optim.AdamW(drafter.parameters(), lr=train.lr, betas=betas, weight_decay=train.weight_decay)]
    model, *optimizers = accelerator.prepare(drafter, *optimizers)
    if train.trackers:
        accelerator.init_trackers("draftsmith", config={"recipe": to_yaml(recipe)})
    share = train.batch_size // accelerator.num_processes
    micro = train.micro_batch_size or share
    if share * accelerator.num_processes != train.batch_size or share % micro:
        raise UserError(f"train.batch_size: wanted a multiple of {accelerator.num_processes} processes x micro batch {micro}, got {train.batch_size}")
    stream = batches(sequences, micro, train.seed, accelerator.process_index, accelerator.num_processes, whole=recipe.data.train_on == "all")
    features = Features(target, int(train.keep_features_gib * 2**30))
    warmup = max(1, round(train.warmup_ratio * train.steps))
    contract = {
        "target": {"name": recipe.target.path, "fingerprint": target.fingerprint()},
        "taps": list(drafter.taps),
        "recipe": recipe.name,
        "versions": {"draftsmith": __version__, "torch": str(torch.__version__)},
    }
    best, began, tokens = {"tau": 0.0, "step": 0}, time.monotonic(), 0
    metrics_file = (folder / "metrics.jsonl").open("w", encoding="utf-8") if main_process else None
    with _bar(main_process) as bar:
        task = bar.add_task("training", total=train.steps, note="")
        for step in range(train.steps + 1):
            last_step = step == train.steps
            spent = 0.0 if train.max_hours is None else _agreed(accelerator, (time.monotonic() - began) / (3600 * train.max_hours))
            late = spent >= 1
            if main_process and ((step and step % recipe.eval.every == 0) or last_step or late):
                with torch.random.fork_rng():  # measuring never changes the training curve
                    drafter.eval()
                    tau = measured_tau(recipe, target, drafter)
                    drafter.train()
                    target.set_taps(drafter.taps)
                _log(metrics_file, accelerator, {"step": step, "measured_tau": tau})
                if tau > best["tau"]:
                    best = {"tau": tau, "step": step}
                    save_drafter(drafter, folder / "checkpoints" / "best", contract | {"step": step, "measured_tau": tau})
            if last_step or late:
                break
            target.set_taps(drafter.taps)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = train.lr * _lr_factor(train.lr_schedule, max(step, spent * train.steps), train.steps, warmup)
            total = 0.0
            entry: dict[str, float] = {}
            for _ in range(share // micro):
                batch = next(stream)
                tokens += batch.ids_BT.numel() * accelerator.num_processes
                loss, entry = objective(model, drafter, target, batch, features.of(batch))
                accelerator.backward(loss / (share // micro))
                total += loss.item() / (share // micro)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), train.clip_norm))
            if not math.isfinite(total) or not math.isfinite(norm):
                raise FloatingPointError(f"step {step}: loss {total}, gradient norm {norm}; stopped before the optimizer step")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            speed = tokens / (time.monotonic() - began)
            bar.update(task, completed=step + 1, note=f"loss {total:.3f}  {speed:.0f} tokens/s  tau {best['tau']:.2f}")
            if main_process and step % train.log_every == 0:
                _log(metrics_file, accelerator, {"step": step, "loss": total, "gradient_norm": norm, "tokens_per_s": speed, **entry})
    if main_process:
        assert metrics_file is not None
        metrics_file.close()
        (folder / "provenance.json").write_text(json.dumps({"argv": sys.argv, **contract}, indent=2) + "\n")
        if best["tau"] == 0.0:
            raise FloatingPointError("no checkpoint was measured")
        chosen, notes = load_drafter(folder / "checkpoints" / "best", target, dtype=torch.float32)
        save_drafter(chosen, folder / "drafter", notes)
    return {
        "processes": accelerator.num_processes,
        "train_seconds": time.monotonic() - began,
        "train_tokens": tokens,
        "best_step": best["step"],
        "best_dev_tau": best["tau"],
    }


def make_objective(recipe: DrafterRecipe) -> Objective:
    """The objective that the recipe names, or the method's own. Raises UserError for one that does not train the method, or lacks a setting."""
    name = recipe.objective.name or recipe.drafter.method
    method = recipe.drafter.method
    if method not in METHODS:
        raise UserError(f"drafter.method: wanted one of {', '.join(METHODS)}, got {method}")
    fitting = [known for known, objective in OBJECTIVES.items() if METHODS[method][0] in objective.trains]
    if name not in fitting:
        raise UserError(f"objective.name: wanted one of {', '.join(fitting)} for the method {method}, got {name}")
    return OBJECTIVES[name].of(recipe.objective.settings)


def _agreed(accelerator: Accelerator, value: float) -> float:
    """The main process's value, in all processes: clocks differ, and all must stop at the same step, with the same learning rate."""
    if accelerator.num_processes == 1:
        return value
    return float(broadcast(torch.tensor([value], dtype=torch.float32, device=accelerator.device)))


def _lr_factor(kind: str, step: float, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return schedule(step, steps, warmup, 1 - warmup / steps)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _log(handle: Any, accelerator: Accelerator, entry: dict[str, float]) -> None:
    handle.write(json.dumps(entry) + "\n")
    handle.flush()
    accelerator.log({k: v for k, v in entry.items() if k != "step"}, step=int(entry["step"]))


def measured_tau(recipe: DrafterRecipe, target: Target, drafter: Head) -> float:
    """tau on development prompts by the engine that users run: greedy and sampled rows in one batch."""
    assert target.tokenizer is not None
    suite = load_suite(recipe.eval.suite, recipe.eval.dev_prompts, split="dev", prompt_chars=recipe.eval.prompt_chars, seed=recipe.eval.seed)
    prompts = [render_prompt(target.tokenizer, m) for m in suite.prompts]
    params = [SamplingParams(temperature=recipe.eval.temperatures[i % len(recipe.eval.temperatures)], seed=i) for i in range(len(prompts))]
    # Checkpoints are compared by whole trees: what policies decide differs from one measurement to the next.
    proposer = make_proposer(drafter, plain(recipe.decode), target, prompts[0])
    out = Engine(target, proposer).generate(prompts, params, recipe.eval.dev_tokens, eos_ids=eos_ids(target.model))
    rounds = sum(len(r) for r in out.rounds)
    return sum(len(t) - 1 for t in out.tokens) / rounds if rounds else 0.0


def _measure(recipe: DrafterRecipe, folder: Path, target: Target, figures: dict[str, Any]) -> Report:
    """The evaluation that follows every training."""
    drafter, contract = load_drafter(folder / "drafter", target)
    part = recipe.eval
    unsupported = [size for size in part.batch if size != 1]
    if unsupported:
        raise UserError(f"eval.batch: wanted [1], got {part.batch}; timings of larger batches are not supported yet")
    suite = load_suite(part.suite, part.num_prompts, split="test", prompt_chars=part.prompt_chars, seed=part.seed)
    settings = Settings(
        temperatures=part.temperatures,
        max_new_tokens=part.max_new_tokens,
        eager=part.eager,
        timed_prompts=part.timed_prompts,
        gate_batch=part.gate_batch,
        threads=part.threads,
        bootstrap=part.bootstrap,
        seed=part.seed,
    )
    assert target.tokenizer is not None
    prompt = render_prompt(target.tokenizer, suite.prompts[0])
    threads = choose_threads(target, prompt, settings)
    with _bar(True) as bar:
        task = bar.add_task("evaluation", total=part.num_prompts, note="")
        measured = evaluate(
            target,
            make_proposer(drafter, recipe.decode, target, prompt),
            suite,
            settings,
            lambda label, done, every: bar.update(task, completed=done, total=every, note=label),
            {name: make_proposer(open_drafter(name, target)[0], plain(recipe.decode), target, prompt) for name in part.others},
        )
    description = {
        "method": drafter.method,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "tree": recipe.decode.tree,
        "depth": recipe.decode.depth,
        "nodes": recipe.decode.num_nodes,
        "contract": contract,
    }
    report = build_report(target, description, suite, settings, measured, figures, threads)
    write_report(report, folder / "eval")
    for name in recipe.export.formats:
        assert isinstance(drafter, Eagle3)  # checked before training
        vllm.export(drafter, contract, folder / "export" / name, recipe.decode.depth)
    return report


def _finish(report: Report, folder: Path) -> int:
    console.print(terminal_table(report))
    console.print(f"report: {(folder / 'eval' / 'report.html').resolve()}", soft_wrap=True)
    return 1 if report.failed else 0


def _bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        disable=not shown,
    )
