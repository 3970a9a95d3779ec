"""The training loop of a drafter: step / log / measure by real decoding / keep the best. Read from top to bottom."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import UserError, __version__
from ..decode.engine import Engine
from ..decode.prompts import eos_ids, render_prompt
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..eval.drafting import make_proposer, plain
from ..eval.suites import load_suite
from ..heads.head import Head
from ..recipes.schema import DrafterRecipe, to_yaml
from .data import Sequences
from .features import make_features
from .judging import measures, whole
from .language_model import schedule
from .objectives.common import Objective
from .optimizers import make_optimizers
from .stream import SequenceStream, Share, make_stream
from .trainee import make_trainee


def fit(recipe: DrafterRecipe, objective: Objective, folder: Path, accelerator: Accelerator, target: Target, sequences: Sequences) -> dict[str, Any]:
    """The training loop: step / log / measure by real decoding / keep the best."""
    train, main_process = recipe.train, accelerator.is_main_process
    torch.manual_seed(train.seed)
    if train.keep_last != 1:
        raise UserError(f"train.keep_last: wanted 1, got {train.keep_last}; resuming is not supported yet, so only the best checkpoint is kept")
    share = Share(batch_size=train.batch_size, micro=train.micro_batch_size, process=accelerator.process_index, processes=accelerator.num_processes)
    trainee = make_trainee(recipe, target, sequences)
    optimizers = make_optimizers(trainee.parts(), train)
    model, *optimizers = accelerator.prepare(trainee.module, *optimizers)
    drafter, micro_batches = trainee.drafter, len(share.micro_batches)
    if train.trackers:
        accelerator.init_trackers("draftsmith", config={"recipe": to_yaml(recipe)})
    base = trainee.stream(make_stream(recipe, sequences, share), recipe, sequences, share)
    stream, features = make_features(recipe, objective, target, trainee.taps, sequences, base, accelerator.process_index)
    warmup = max(1, round(train.warmup_ratio * train.steps))
    contract = {
        "target": {"name": recipe.target.path, "fingerprint": target.fingerprint()},
        "taps": list(trainee.taps),
        "template": recipe.target.template,
        "recipe": recipe.name,
        "versions": {"draftsmith": __version__, "torch": str(torch.__version__)},
    }
    # Without measured decoding: the mean loss since the last time stands in for tau, negative, as the largest is the best.
    judge, best, since = "measured_tau" if measures(recipe) else "mean_loss", {"score": -math.inf, "step": 0}, list[float]()
    began, tokens = time.monotonic(), 0
    metrics_file = (folder / "metrics.jsonl").open("w", encoding="utf-8") if main_process else None
    with progress_bar(main_process) as bar:
        if main_process and isinstance(base, SequenceStream):
            bar.console.print(f"padding: {base.padding():.1%} of a batch's tokens (data.batching {recipe.data.batching})", highlight=False)
        task = bar.add_task("training", total=train.steps, note="")
        for step in range(train.steps + 1):
            last_step = step == train.steps
            spent = 0.0 if train.max_hours is None else _agreed(accelerator, (time.monotonic() - began) / (3600 * train.max_hours))
            late = spent >= 1
            if main_process and ((step and step % recipe.eval.every == 0) or last_step or late):
                with torch.random.fork_rng():  # measuring never changes the training curve
                    trainee.mode(training=False)
                    if judge == "measured_tau":
                        with whole(recipe, target, drafter) as decoder:
                            score = measured_tau(recipe, decoder, drafter)
                    else:
                        score, since = -sum(since) / max(len(since), 1), []
                    trainee.mode(training=True)
                    target.set_taps(trainee.taps)
                judged = {judge: abs(score)}
                _log(metrics_file, accelerator, {"step": step, **judged})
                if score > best["score"]:
                    best = {"score": score, "step": step}
                    trainee.save(folder / "checkpoints" / "best", contract | {"step": step, **judged})
            if last_step or late:
                break
            target.set_taps(trainee.taps)
            lr = train.lr * lr_factor(train.lr_schedule, max(step, spent * train.steps), train.steps, warmup)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr * group["lr_scale"]
            total = 0.0
            entry: dict[str, float] = {}
            for number, batch in zip(share.micro_batches, next(stream), strict=True):
                tokens += batch.ids_BT.numel() * accelerator.num_processes
                torch.manual_seed(draw_seed(train.seed, step, number))
                loss, entry = objective(model, drafter, target, batch, features.of(batch) if trainee.target_is_fixed else None)
                accelerator.backward(loss / micro_batches)
                total += loss.item() / micro_batches
            norm = float(accelerator.clip_grad_norm_(model.parameters(), train.clip_norm))
            if not math.isfinite(total) or not math.isfinite(norm):
                raise FloatingPointError(f"step {step}: loss {total}, gradient norm {norm}; stopped before the optimizer step")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            speed = tokens / (time.monotonic() - began)
            since.append(total)
            tau = f"  tau {best['score']:.2f}" if judge == "measured_tau" and best["step"] else ""
            bar.update(task, completed=step + 1, note=f"loss {total:.3f}  {speed:.0f} tokens/s{tau}")
            if main_process and step % train.log_every == 0:
                _log(metrics_file, accelerator, {"step": step, "loss": total, "gradient_norm": norm, "tokens_per_s": speed, **entry})
    features.close()
    if main_process:
        assert metrics_file is not None
        metrics_file.close()
        (folder / "provenance.json").write_text(json.dumps({"argv": sys.argv, **contract}, indent=2) + "\n")
        if best["score"] == (0.0 if judge == "measured_tau" else -math.inf):
            raise FloatingPointError("no checkpoint was measured")
        trainee.publish(folder / "checkpoints" / "best", folder / "drafter")
    return {
        "processes": accelerator.num_processes,
        "train_seconds": time.monotonic() - began,
        "train_tokens": tokens,
        "best_step": best["step"],
        "best_dev_tau" if judge == "measured_tau" else "best_mean_loss": abs(best["score"]),
    }


def draw_seed(seed: int, step: int, micro_batch: int) -> int:
    """Of what an objective draws for micro-batch `micro_batch` of the global batch of a step: it hangs on nothing that was drawn before.

    So nothing has to be stored to go on from a checkpoint, and it is no matter which process takes the micro-batch.
    """
    return ((seed + 1) * 1_000_003 + step) * 65_537 + micro_batch


def _agreed(accelerator: Accelerator, value: float) -> float:
    """The main process's value, in all processes: clocks differ, and all must stop at the same step, with the same learning rate."""
    if accelerator.num_processes == 1:
        return value
    return float(broadcast(torch.tensor([value], dtype=torch.float32, device=accelerator.device)))


def lr_factor(kind: str, step: float, steps: int, warmup: int) -> float:
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


def progress_bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        disable=not shown,
    )
