"""The training loop of a drafter: measure by real decoding / keep the best / save / stop? / step / log. Read from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .. import UserError, __version__
from ..decode.engine import Engine
from ..decode.prompts import eos_ids, render_prompt
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..eval.drafting import make_proposer, plain
from ..eval.suites import load_suite
from ..heads.head import Head
from ..recipes.schema import DrafterRecipe
from . import checkpoint
from .checkpoint import on_disk
from .clock import Clock, memory, peak_flops
from .data import Sequences
from .engines import Plain, make_engine
from .features import make_features
from .guard import Diverged, Interrupted, Interrupts, keep_batch, leap
from .judging import measures, whole
from .language_model import schedule
from .objectives.common import Batch, Objective
from .stream import SequenceStream, Share, make_stream
from .tracking import start_trackers
from .trainee import Trainee, make_trainee


@dataclass
class Progress:
    """Where a run stands, the drafter, its optimizers and the data apart. judged: the last step whose drafter was measured.

    since: losses since then. norms: of the last gradients. metrics: length of metrics.jsonl. seconds: of training, before this process began.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_score: float = -math.inf
    best_step: int = 0
    judged: int = -1
    metrics: int = 0
    since: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def fit(recipe: DrafterRecipe, objective: Objective, folder: Path, accelerator: Accelerator, target: Target, sequences: Sequences) -> dict[str, Any]:
    """The training loop: measure by real decoding / keep the best / save / stop? / step / log. Goes on from the newest checkpoint in the folder.

    Raises Interrupted after a signal, when everything is saved, and Diverged before an optimizer step whose numbers are not finite.
    """
    train, main_process, device = recipe.train, accelerator.is_main_process, accelerator.device
    share = Share(batch_size=train.batch_size, micro=train.micro_batch_size, process=accelerator.process_index, processes=accelerator.num_processes)

    def build() -> Trainee:
        torch.manual_seed(train.seed)
        return make_trainee(recipe, target, sequences)

    trainee = build()
    base = trainee.stream(make_stream(recipe, sequences, share), recipe, sequences, share)
    stream, features = make_features(recipe, objective, target, trainee.taps, sequences, base, share.process)
    at, store = Progress(), folder / "checkpoints"
    if main_process:
        checkpoint.recover_best(store)
    found = checkpoint.read_newest(store, lambda line: print(line, file=sys.stderr) if main_process else None)
    if found is not None:
        at = Progress(**found.state["progress"])
        trainee.module.load_state_dict(found.model)
        stream.load_state_dict(found.state["stream"])
    engine = make_engine(trainee, objective, train, share, accelerator)
    if not stream.ahead and not isinstance(engine, Plain):
        raise UserError(f"train.on_policy: wanted 0 under {engine.name}, as the draft is not whole in any process, got {train.on_policy}")
    if found is not None:
        engine.load_optimizer(found.optimizer)
        engine.load_scaler(found.state.get("scaler", {}))
        target.set_taps(trainee.taps)
        refill(features, make_stream(recipe, sequences, share), found.state["stream"], device)
    start_trackers(accelerator, recipe, folder)
    warmup = max(1, round(train.warmup_ratio * train.steps))
    contract = {
        "target": {"name": recipe.target.path, "fingerprint": target.fingerprint()},
        "taps": list(trainee.taps),
        "template": recipe.target.template,
        "recipe": recipe.name,
        "versions": {"draftsmith": __version__, "torch": str(torch.__version__)},
    }
    # Without measured decoding: the mean loss since the last time stands in for tau, negative, as the largest is the best.
    judge = "measured_tau" if measures(recipe) else "mean_loss"
    began, before, clock = time.monotonic(), at.seconds, Clock(device)
    log = Log(folder, at.metrics, accelerator) if main_process else None
    spent = 0.0 if train.max_hours is None else at.seconds / (3600 * train.max_hours)
    stop, start, flops, timed = 0, at.step, 0.0, 0  # timed: steps since the clock was read
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(features))
        if log is not None:
            stack.enter_context(contextlib.closing(log))
        interrupts, bar = stack.enter_context(Interrupts()), stack.enter_context(progress_bar(main_process))
        if main_process and isinstance(base, SequenceStream):
            bar.console.print(f"padding: {base.padding():.1%} of a batch's tokens (data.batching {recipe.data.batching})", highlight=False)
        task = bar.add_task("training", total=train.steps, completed=start, note="" if found is None else f"from step {start}")
        for step in range(start, train.steps + 1):
            last_step, late, at.step = step == train.steps, spent >= 1, step
            if ((step and step % recipe.eval.every == 0) or last_step or late) and at.judged != step and not stop:
                with engine.whole(main_process, build) as seen, clock("evaluation"):
                    if log is not None:
                        with torch.random.fork_rng():  # measuring never changes the training curve
                            score = judged_score(recipe, target, seen) if judge == "measured_tau" else -mean(at.since)
                        judged = {judge: abs(score)}
                        log.write({"step": step, **judged})
                        if score > at.best_score:
                            at.best_score, at.best_step = score, step
                            with on_disk(store / "best", store):
                                seen.save(store / "best", contract | {"step": step, **judged})
                at.judged, at.since = step, []
            if step > start and (step % (train.save_every or recipe.eval.every) == 0 or last_step or late or stop):
                with clock("checkpoint"):
                    at.seconds, at.metrics = before + time.monotonic() - began, log.length() if log is not None else 0
                    state = {"progress": dataclasses.asdict(at), "stream": stream.state_dict(), "scaler": engine.scaler_state()}
                    kept = checkpoint.Checkpoint(engine.model_state(), engine.optimizer_state(), state)
                    _by_main(accelerator, functools.partial(checkpoint.write, store, step, kept, train.keep_last))
            if stop:
                raise Interrupted(stop)
            if last_step or late:
                break
            target.set_taps(trainee.taps)
            lr = train.lr * lr_factor(train.lr_schedule, max(step, spent * train.steps), train.steps, warmup)
            engine.set_lr(lr)
            with clock("data"):
                batches = [on_device(batch, device) for batch in next(stream)]
            losses: list[Tensor] = []
            entry: dict[str, float] = {}
            with count_flops(step == start and peak_flops(device) is not None) as counter:
                for number, batch in zip(share.micro_batches, batches, strict=True):
                    at.tokens += batch.ids_BT.numel() * share.processes
                    with engine.micro_batch(last=number == share.micro_batches[-1]):
                        with clock("target"):
                            read = features.of(batch) if trainee.target_is_fixed else None
                        torch.manual_seed(draw_seed(train.seed, step, number))
                        with clock("forward"):
                            loss, entry = engine.model(target, batch, read)
                        with clock("backward"):
                            engine.backward(loss)
                    losses.append(loss.detach().float())
            flops = flops or counter()
            own = torch.stack(losses)
            total, stop, spent = agreed(accelerator, float(own.mean()), interrupts.number, before + time.monotonic() - began, train.max_hours)
            if not math.isfinite(total):
                raise _diverged(folder, step, share, batches, own, None)
            with clock("optimizer"):
                norm = engine.clip()
                if not math.isfinite(norm) and engine.scaler is None:  # a scaler finds its scale by such steps, and leaves them out
                    raise _diverged(folder, step, share, batches, own, norm)
                engine.step()
            at.since.append(total)
            spike = leap(at.norms, norm) if math.isfinite(norm) else None
            timed += 1
            speed = at.tokens / (before + time.monotonic() - began)
            tau = f"  tau {at.best_score:.2f}" if judge == "measured_tau" and at.best_step else ""
            bar.update(task, completed=step + 1, note=f"loss {total:.3f}  {speed:.0f} tokens/s{tau}")
            if log is not None and (step % train.log_every == 0 or step == start or spike is not None):
                seen_norm = norm if math.isfinite(norm) else None  # of a step that a gradient scaler left out
                figures = {"step": step, "loss": total, "gradient_norm": seen_norm, "lr": lr, "tokens_per_s": speed, **entry}
                if spike is not None:
                    figures["gradient_leap"] = spike
                parts = clock.read()
                figures |= {f"{part}_seconds": round(seconds, 4) for part, seconds in parts.items()}
                if flops and (busy := sum(parts.get(part, 0.0) for part in ("target", "forward", "backward", "optimizer"))):
                    figures["mfu"] = flops * timed / busy / (peak_flops(device) or math.inf)
                timed = 0
                if step == start:
                    figures |= memory(target.model, trainee.module, engine.optimizers, getattr(features, "bytes", 0), device)
                log.write(figures)
    at.seconds = before + time.monotonic() - began
    if main_process:
        if at.best_score == (0.0 if judge == "measured_tau" else -math.inf):
            raise Diverged("no checkpoint was measured")
        with on_disk(folder / "drafter", store):
            (folder / "provenance.json").write_text(json.dumps({"argv": sys.argv, "engine": engine.name, **contract}, indent=2) + "\n")
            trainee.publish(store / "best", folder / "drafter")
    return {
        "processes": accelerator.num_processes,
        "engine": engine.name,
        "train_seconds": at.seconds,
        "train_tokens": at.tokens,
        "best_step": at.best_step,
        "best_dev_tau" if judge == "measured_tau" else "best_mean_loss": abs(at.best_score),
    }


def judged_score(recipe: DrafterRecipe, target: Target, trainee: Trainee) -> float:
    """tau of what is trained, which is left in training mode, as is the target."""
    trainee.mode(training=False)
    with whole(recipe, target, trainee.drafter) as decoder:
        score = measured_tau(recipe, decoder, trainee.drafter)
    trainee.mode(training=True)
    target.set_taps(trainee.taps)
    return score


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device."""
    parts: dict[str, Any] = {part.name: value for part in dataclasses.fields(batch) if isinstance(value := getattr(batch, part.name), Tensor)}
    return dataclasses.replace(batch, **{name: value.to(device, non_blocking=True) for name, value in parts.items()})


def refill(features: Any, stream: Any, state: dict[str, Any], device: torch.device) -> None:
    """Compute again what features were kept before a checkpoint, in the same batches, so that they are the same to the last bit."""
    state = state.get("base", state)
    if not getattr(features, "limit", 0) or "position" not in state:
        return
    had = -1
    for taken in range(state["epoch"] * state["batches"] + state["position"]):
        if taken % state["batches"] == 0:
            if features.bytes == had:
                return  # a whole epoch brought nothing that is new
            had = features.bytes
        for batch in next(stream):
            features.of(on_device(batch, device))


@contextlib.contextmanager
def count_flops(active: bool) -> Iterator[Callable[[], float]]:
    """Gives the floating-point operations of what was inside, when it is over; 0 if not active."""
    if not active:
        yield lambda: 0.0
        return
    with FlopCounterMode(display=False) as counter:
        yield lambda: float(counter.get_total_flops())


def agreed(accelerator: Accelerator, loss: float, stop: int, seconds: float, max_hours: float | None) -> tuple[float, int, float]:
    """(mean loss, a signal that any process got, share of the time that the first one has spent): the same in all processes.

    Clocks differ, but all must stop at the same step, with the same learning rate.
    """
    spent = 0.0 if max_hours is None else seconds / (3600 * max_hours)
    if accelerator.num_processes == 1:
        return loss, stop, spent
    values_P3 = accelerator.gather(torch.tensor([[loss, stop, spent]], dtype=torch.float64, device=accelerator.device)).cpu()
    return float(values_P3[:, 0].mean()), int(values_P3[:, 1].max()), float(values_P3[0, 2])


def _by_main(accelerator: Accelerator, write: Callable[[], object]) -> None:
    """Let the main process write. If it cannot, all end."""
    error: UserError | None = None
    if accelerator.is_main_process:
        try:
            write()
        except UserError as found:
            error = found
    if accelerator.num_processes > 1:
        failed = accelerator.gather(torch.tensor([int(error is not None)], device=accelerator.device))
        if error is None and int(failed.max()):
            raise SystemExit(2)
    if error is not None:
        raise error


def _diverged(folder: Path, step: int, share: Share, batches: list[Batch], own: Tensor, norm: float | None) -> Diverged:
    path = keep_batch(folder, step, share.process, batches, own.tolist(), norm)
    what = "the loss" if norm is None else f"the gradient's norm ({norm})"
    return Diverged(f"step {step}: {what} is not finite, so the optimizer step was not made; its batch is in {path}")


class Log:
    """metrics.jsonl from `length` bytes on, what lies behind them being of a run that was cut off; and the trackers."""

    def __init__(self, folder: Path, length: int, accelerator: Accelerator) -> None:
        path = folder / "metrics.jsonl"
        self.accelerator, self.folder = accelerator, folder
        path.touch()
        os.truncate(path, min(length, path.stat().st_size))
        self._handle = path.open("a", encoding="utf-8")

    def write(self, entry: dict[str, Any]) -> None:
        """A line."""
        with on_disk(self.folder / "metrics.jsonl", self.folder / "checkpoints"):
            self._handle.write(json.dumps(entry) + "\n")
            self._handle.flush()
        self.accelerator.log({k: v for k, v in entry.items() if k != "step" and v is not None}, step=int(entry["step"]))

    def length(self) -> int:
        """Bytes, all of which are on the disk."""
        os.fsync(self._handle.fileno())
        return self._handle.tell()

    def close(self) -> None:
        """No more lines."""
        with contextlib.suppress(OSError):  # what a full disk did not take was said when it was written
            self._handle.close()


def draw_seed(seed: int, step: int, micro_batch: int) -> int:
    """Of what an objective draws for micro-batch `micro_batch` of the global batch of a step: it hangs on nothing that was drawn before.

    So nothing has to be stored to go on from a checkpoint, and it is no matter which process takes the micro-batch.
    """
    return ((seed + 1) * 1_000_003 + step) * 65_537 + micro_batch


def lr_factor(kind: str, step: float, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return schedule(step, steps, warmup, 1 - warmup / steps)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


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


def progress_bar(shown: bool) -> ProgressBar:
    return ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        disable=not shown,
    )
