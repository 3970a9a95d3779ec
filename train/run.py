"""Run a recipe, from data to report: `draftsmith train RECIPE` and `accelerate launch -m draftsmith.train RECIPE` both come here."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs
from rich.console import Console

from .. import UserError
from ..decode.light import LightTarget
from ..decode.prompts import render_prompt
from ..decode.target import Target
from ..eval.check import FILE as ACCEPTANCE
from ..eval.check import measure_acceptance, write_acceptance
from ..eval.evaluation import evaluate_drafter, settings_of
from ..eval.report import read_report, terminal_table, write_report
from ..eval.schema import Report
from ..eval.suites import load_suite
from ..eval.tune import tune_briefly
from ..heads.export.common import DRAFT_MODEL, PARD, TargetFacts
from ..heads.export.write import check_export, export, loader_of, read_tuning, source_of
from ..heads.registry import METHODS, Drafter, head_config, open_drafter
from ..heads.tuning import Tuning, write_tuning
from ..heads.tuning import read_tuning as read_tuned
from ..recipes.schema import Decode, DrafterRecipe, TargetRecipe, load_recipe
from . import tuning
from .acceptance import add_predictor
from .calibration import calibrate_drafter
from .data import prepare
from .features import load_target, load_whole
from .folder import keep_figures, kept_figures, open_run_folder
from .guard import STOPPED, Diverged, Interrupted
from .judging import NOT_MEASURED, measures
from .language_model import train_language_model
from .launch import check_engaged, check_launch, run_processes
from .loop import fit, progress_bar
from .objectives import OBJECTIVES
from .objectives.common import Objective
from .plan import check_plan
from .sharding import check_sharding, shard_target
from .starts import check_draft
from .tracking import check_trackers, log_report, start_trackers
from .trainee import check_decode

console = Console()
PATIENCE = datetime.timedelta(hours=6)  # of processes that wait for the main one to measure or to write


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
        if (folder / "model" / "training.json").is_file():
            console.print(f"target: {(folder / 'model').resolve()}, finished", soft_wrap=True, highlight=False)
            return 0
        train_language_model(recipe, folder, lambda entry: console.print(entry))
        return 0
    return train_drafter(recipe, folder)


def run_on_all_cores(recipe: DrafterRecipe) -> int:
    """`run`, with one process a core where there is no GPU: small models gain little from threads. All processes are of this machine."""
    batch = recipe.train.batch_size
    processes = 1 if torch.cuda.is_available() else max(n for n in range(1, min(os.cpu_count() or 1, batch) + 1) if batch % n == 0)
    if processes == 1 or _finished(recipe):
        return run(recipe)
    folder = open_run_folder(recipe)
    return run_processes([str(folder / "recipe.yaml")], processes)


def _finished(recipe: DrafterRecipe) -> bool:
    folder = recipe.run_folder
    wanted = ["eval/report.json", "drafter/config.json", f"drafter/{ACCEPTANCE}", *(f"export/{name}" for name in recipe.export.formats)]
    return all((folder / name).exists() for name in wanted)


def train_drafter(recipe: DrafterRecipe, folder: Path) -> int:
    """Data, training with measured decoding, evaluation, export. Returns the exit code."""
    objective = make_objective(recipe)
    tuning.check(recipe, objective)
    settings_of(recipe.eval)  # what is wrong with it must not be found out after hours of training
    check_decode(recipe)
    check_draft(recipe)
    check_trackers(recipe.train.trackers)
    for name in recipe.export.formats:
        try:
            loader_of(exported_as(recipe), name)
        except UserError as error:
            raise UserError(f"export.formats: {error}; export.formats=[] leaves the export out") from error
    accelerator = Accelerator(
        mixed_precision=recipe.train.mixed_precision,
        log_with=list(recipe.train.trackers) or None,
        project_dir=str(folder),
        kwargs_handlers=[AutocastKwargs(enabled=False), InitProcessGroupKwargs(timeout=PATIENCE)],  # `engines.Loss` says what is in half precision
    )
    check_engaged(accelerator)
    if recipe.target.device not in ("auto", accelerator.device.type):
        raise UserError(
            f"target.device: wanted auto or {accelerator.device.type}, where the drafter is trained, got {recipe.target.device}; "
            "ACCELERATE_USE_CPU=true trains both on the CPU"
        )
    main_process = accelerator.is_main_process
    if _finished(recipe):
        return _finish(read_report(folder / "eval" / "report.json"), folder) if main_process else 0
    check_sharding(recipe, accelerator.num_processes)
    check_plan(recipe, objective, accelerator.num_processes)
    target = load_target(recipe, str(accelerator.device))
    check_exports(recipe, folder, target)
    began = time.monotonic()
    with progress_bar(main_process) as bar:
        task = bar.add_task("target's own responses (this process)", total=None, note="")
        sequences = prepare(
            target,
            recipe,
            recipe.data_folder,
            lambda done, every, tokens: bar.update(task, completed=done, total=every, note=f"{tokens / (time.monotonic() - began):.0f} tokens/s"),
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.wait_for_everyone,
        )
    generated = time.monotonic() - began
    figures: dict[str, Any] = {"data_seconds": generated, "sequences": len(sequences), "response_tokens": sum(sample.learned for sample in sequences)}
    trained = kept_figures(folder)
    if trained is None:
        trained_on = target if recipe.adapter.rank is None else tuning.tunable(recipe, target)
        if recipe.target.shard:
            shard_target(target, accelerator)
        try:
            figures |= fit(recipe, objective, folder, accelerator, trained_on, sequences)
        except Interrupted as stop:
            if main_process:
                print(f"{stop}; start the same command again to go on", file=sys.stderr)
            return 128 + stop.number
        except Diverged as error:
            print(f"error: {error}", file=sys.stderr)
            return STOPPED
        if main_process:
            if recipe.drafter.predictor:
                figures["predictor"] = add_predictor(
                    folder / "drafter", target, sequences, whole=recipe.data.train_on == "all", seed=recipe.train.seed
                )
            keep_figures(folder, figures)
    accelerator.wait_for_everyone()
    try:
        return _conclude(recipe, folder, accelerator, target, trained or figures) if main_process else 0
    finally:
        accelerator.end_training()


def _conclude(recipe: DrafterRecipe, folder: Path, accelerator: Accelerator, target: Target, figures: dict[str, Any]) -> int:
    """What the main process does when all have trained."""
    if not measures(recipe):
        console.print(f"drafter: {(folder / 'drafter').resolve()}; {NOT_MEASURED}", soft_wrap=True, highlight=False)
        return 0
    # The one that was trained on is no plain target any more, or none at all.
    if recipe.adapter.rank is not None or isinstance(target, LightTarget) or recipe.target.shard:
        target = load_whole(recipe, str(accelerator.device))
    calibrate_drafter(recipe, folder / "drafter", target)
    decode, tuned = (recipe.decode, None) if not recipe.eval.tune else _tune(recipe, folder / "drafter", target)
    if (folder / "eval" / "report.json").is_file():  # the run was cut off after it
        report = read_report(folder / "eval" / "report.json")
        drafter, contract = open_drafter(folder / "drafter", target)
    else:
        report, drafter, contract = _measure(recipe, folder, target, figures, decode, tuned)
    _record_acceptance(recipe, folder / "drafter", target, drafter, decode)
    if recipe.export.formats:
        source = source_of(drafter, contract, target, tuning=read_tuning(folder / "drafter"))
        for name in recipe.export.formats:
            export(source, name, folder / "export" / name)
    start_trackers(accelerator, recipe, folder)
    log_report(accelerator, report, folder / "eval")
    return _finish(report, folder)


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


def _measure(
    recipe: DrafterRecipe, folder: Path, target: Target, figures: dict[str, Any], decode: Decode, tuned: Tuning | None
) -> tuple[Report, Drafter, dict[str, Any]]:
    """The evaluation that follows every training: (report, which is written, drafter, contract)."""
    with progress_bar(True) as bar:
        task = bar.add_task("evaluation", total=recipe.eval.num_prompts, note="")
        measured = evaluate_drafter(
            target,
            folder / "drafter",
            decode,
            recipe.eval,
            training=figures,
            tuned=tuned,
            progress=lambda label, done, every: bar.update(task, completed=done, total=every, note=label),
        )
    write_report(measured[0], folder / "eval")
    return measured


def check_exports(recipe: DrafterRecipe, folder: Path, target: Target) -> None:
    """Raise UserError, before anything is trained, if an engine of export.formats would not load or not compute this drafter."""
    if not recipe.export.formats:
        return
    facts = TargetFacts.of(target)
    config = head_config(recipe.drafter.method, target, recipe.drafter.settings)
    for name in recipe.export.formats:
        check_export(exported_as(recipe), config, facts, name, folder / "export" / name)


def exported_as(recipe: DrafterRecipe) -> str:
    """The method, as exporters know it: a draft model that drafts blocks has a name of its own."""
    part = recipe.drafter
    return PARD if part.method == DRAFT_MODEL and part.block_size is not None else part.method


def _tune(recipe: DrafterRecipe, folder: Path, target: Target) -> tuple[Decode, Tuning]:
    """The draft for this machine, chosen on development prompts; done once, as the drafter's folder keeps it."""
    tuned = read_tuned(folder)
    if tuned is None:
        with progress_bar(True) as bar:
            task = bar.add_task("draft for this machine", total=None, note="")
            tuned = tune_briefly(target, folder, recipe.eval, recipe.decode, lambda what: bar.update(task, note=what))
        write_tuning(folder, tuned)
    for line in tuned.measured["words"]:
        console.print(line, soft_wrap=True, highlight=False)
    return Decode(**tuned.decode), tuned


def _record_acceptance(recipe: DrafterRecipe, folder: Path, target: Target, drafter: Any, decode: Decode) -> None:
    """What `draftsmith check --measure` compares with later: the acceptance on the development prompts."""
    assert target.tokenizer is not None
    part = recipe.eval
    suite = load_suite(part.suite, part.dev_prompts, split="dev", prompt_chars=part.prompt_chars, seed=part.seed)
    prompts = [render_prompt(target.tokenizer, messages) for messages in suite.prompts]
    write_acceptance(folder, measure_acceptance(target, drafter, decode, prompts, part.temperatures, part.dev_tokens, part.seed))


def _finish(report: Report, folder: Path) -> int:
    console.print(terminal_table(report))
    console.print(f"report: {(folder / 'eval' / 'report.html').resolve()}", soft_wrap=True)
    return 1 if report.failed else 0
