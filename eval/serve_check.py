"""Every method in every engine that is installed: the same drafts from random weights, the same acceptance of trained drafters.

    python -m draftsmith.eval.serve_check --out runs/serve-check --engine vllm=~/vllm/bin/python --engine transformers \\
        --drafter runs/quickstart/drafter --drafter early_exit:0-3

`make serve-check` builds the environments first. Four kinds of cases:
    random      a head of random weights, norms and biases: every round's draft has to be ours (40 rounds at least); nothing is easier to get wrong
    contrast    where an engine does not show its drafts: a head that is accepted always if its layers and its draft vocabulary are right, else never
    fault       the same with one thing broken, which has to be noticed: layers shifted by one, a norm dropped, absolute ids in d2t
    trained     a drafter of yours on prompts of the suite: accepted/drafted within 2 points of our chain decoding, the output unchanged
Prints what was found, a table of engine x method and, as its last line, one JSON object; writes serve_check.json and serve_check.md. Exits with 1 if
a case fails. --resume takes over what passed before, by the serve_check.json there is.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from .. import UserError
from ..decode.prompts import render_prompt
from ..decode.target import Target
from ..heads.export import ENGINES
from ..heads.export.common import DRAFT_MODEL, PARD, Source, Tuning
from ..heads.export.table import TABLE
from ..heads.export.write import export, read_json, read_tuning, source_of
from ..heads.head import Head
from ..heads.pard import Pard
from ..heads.registry import new_head, open_drafter
from ..heads.standalone import early_exit
from ..recipes.schema import TargetRef
from .contrast import contrast_head
from .in_engine import RESULT, RUNNERS, InEngine, engine_python, measure, plain_job, run_engine
from .suites import load_suite

METHODS = {
    "vllm": ("draft_model", "pard", "medusa", "eagle1", "eagle3", "p_eagle", "dflash", "mtp"),
    "speculators": ("eagle3", "p_eagle", "dflash"),
    "transformers": ("draft_model", "dflash", "mtp"),
    "llamacpp": ("draft_model", "eagle3", "dflash", "dspark"),
}
CONTRAST: dict[str, dict[str, tuple[str | None, ...]]] = {
    "openvino": {"draft_model": (None,), "eagle3": (None, "layers not told", "layers before", "d2t shifted by one")}
}
PLACES = {"eagle1": "eg1", "eagle3": "eg3", "p_eagle": "peg", "dflash": "dfl", "dspark": "dsp"}
REPAIRED = ", the engine's norm of context keys repaired"
KINDS = ("random", "contrast", "fault", "trained")
ROUNDS = 40
TEXTS = [[20 + index * 7 % 1000 for index in range(30)], [5, 9, 33, 200, 71, 8, 900]]


@dataclass(frozen=True)
class Case:
    """One run. passed: what had to be is. found: what was measured, or what the engine said."""

    engine: str
    method: str
    kind: str
    passed: bool
    found: str
    figures: dict[str, Any] | None = None


def random_source(method: str, format_name: str, target: Target, tokens: int) -> Source:
    """A head of random weights in which every tensor matters: large values and outputs of attention, norms that are not one."""
    torch.manual_seed(0)
    if method == PARD:
        return replace(source_of(Pard(early_exit(target, [0, 1, 2, 3]).draft, 1, 4).bind(target), {}, target), tuning=Tuning(3))
    if method == DRAFT_MODEL:
        return replace(source_of(early_exit(target, [0, 1, 2, 3]), {}, target), tuning=Tuning(tokens))
    settings: dict[str, Any] = {"draft_vocab_size": target.vocab_size // 2}
    if method == "mtp" and format_name == "vllm":
        settings["raw_feature"] = True
    head = new_head(method, target, settings)
    head.set_draft_vocabulary(torch.randperm(target.vocab_size)[: target.vocab_size // 2], target)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "o_proj" in name or "v_proj" in name:
                parameter.mul_(4)
            elif name.startswith("fc"):
                parameter.mul_(0.5)
            elif method == "medusa":
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return replace(source_of(head, {}, target), tuning=Tuning(tokens))


# Faults


def _config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def _shift(values: dict[str, Any]) -> None:
    values["eagle_aux_hidden_state_layer_ids"] = [k + 1 for k in values["eagle_aux_hidden_state_layer_ids"]]


def shifted_layers(folder: Path) -> None:
    """The layers behind those that the head reads."""
    _config(folder, _shift)


def dropped_norm(folder: Path) -> None:
    """vLLM loads it, and leaves the norm at one."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def absolute_ids(folder: Path) -> None:
    """Target ids in place of offsets."""
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shifted_ids(folder: Path) -> None:
    """Offsets to the tokens behind the right ones."""
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FAULTS = {"layers shifted by one": shifted_layers, "a norm dropped": dropped_norm, "absolute d2t": absolute_ids}
FAULTY = ("vllm", "llamacpp")  # engines that they are tried in


# Cases


class Checker:
    """Runs cases in one engine; what it generates without a drafter is measured once a set of prompts."""

    def __init__(self, engine: str, python: str, target: Target, out: Path) -> None:
        self.engine, self.python, self.target, self.out = engine, python, target, out
        self._plain: dict[str, dict[str, Any]] = {}
        self._head: Head | None = None

    def folder(self, method: str, mark: str) -> Path:
        """Of an export; its name must not hold a method's (see vLLM's path rule)."""
        return self.out / f"{self.engine}-{PLACES.get(method, method)}{mark}"

    def _measure(
        self, source: Source, folder: Path, prompts: Sequence[list[int]], tokens: int, repair: bool = False, told: dict[str, Any] | None = None
    ) -> InEngine:
        key = json.dumps([prompts, tokens])
        if key not in self._plain:
            self._plain[key] = run_engine(self.engine, self.python, plain_job(self.target.name, prompts, tokens))
        return measure(source, self.engine, folder, self.python, prompts, tokens, self._plain[key], repair, told)

    def random(self, method: str, fault: str | None = None) -> Case:
        """Drafts of random weights; one token a round, so that each draft follows a text that both sides have (a block of PARD: three)."""
        kind = "random" if fault is None else f"fault: {fault}"
        try:
            source = random_source(method, self.engine, self.target, 1)
            folder = self.folder(method, "" if fault is None else "-broken")
            export(source, self.engine, folder, convert=False)
            if fault is not None:
                FAULTS[fault](folder)
            result = self._measure(source, folder, TEXTS, 48, repair=method == "dflash")
        except UserError as error:
            return Case(self.engine, method, kind, fault is not None, str(error)[-200:])
        same = result.passed and result.drafts_equal == result.drafts_compared >= ROUNDS
        found = f"{result.drafts_equal}/{result.drafts_compared} rounds, output {result.outputs_identical}/{result.prompts}"
        found += REPAIRED if result.repaired else ""
        return Case(self.engine, method, kind, same == (fault is None), found, asdict(result))

    def contrast(self, method: str, fault: str | None = None) -> Case:
        """Accepted always where all is right, next to never with one thing wrong."""
        kind = "contrast" if fault is None else f"fault: {fault}"
        try:
            source = self.copy() if method == DRAFT_MODEL else self.by_heart()
            folder = self.folder(method, "-contrast" if fault is None else "-broken")
            export(source, self.engine, folder, convert=False)
            told = None
            if fault == "d2t shifted by one":
                shifted_ids(folder)
            elif fault is not None:
                told = {"layers": None if fault == "layers not told" else [k - 2 for k in source.config.taps]}
            result = self._measure(source, folder, TEXTS, 48, told=told)
        except UserError as error:
            return Case(self.engine, method, kind, False, str(error)[-200:])
        good = result.acceptance_engine >= 0.95 if fault is None else result.acceptance_engine <= 0.1
        found = f"accepted/drafted {result.acceptance_engine:.3f}, output {result.outputs_identical}/{result.prompts}"
        return Case(self.engine, method, kind, good and result.outputs_identical == result.prompts, found, asdict(result))

    def copy(self) -> Source:
        """The target as its own draft model."""
        return replace(source_of(early_exit(self.target, range(self.target.num_layers)), {}, self.target), tuning=Tuning(3))

    def by_heart(self) -> Source:
        """A head for `TEXTS`."""
        if self._head is None:
            self._head = contrast_head(self.target, TEXTS, 48)
        return replace(source_of(self._head, {}, self.target), tuning=Tuning(1))

    def trained(self, name: str, prompts: Sequence[list[int]], tokens: int) -> Case:
        """A drafter of the user's."""
        method, kind = name, f"trained: {name}"
        try:
            drafter, contract = open_drafter(name, self.target)
            source = source_of(drafter, contract, self.target, tuning=read_tuning(Path(name)))
            source, method = replace(source, tuning=Tuning(min(3, source.tuning.tokens))), source.method
            folder = self.folder(method, "-trained")
            export(source, self.engine, folder, convert=False)
            result = self._measure(source, folder, prompts, tokens, repair=method == "dflash")
        except UserError as error:
            return Case(self.engine, method, kind, False, str(error)[-200:])
        (folder / RESULT).write_text(json.dumps({**asdict(result), "passed": result.passed}, indent=2) + "\n")
        seen = f"{result.drafts_equal}/{result.drafts_compared} rounds, " if result.drafts_compared else ""
        found = f"accepted/drafted {result.acceptance_engine:.3f}, ours {result.acceptance_ours:.3f}, {seen}"
        found += f"output {result.outputs_identical}/{result.prompts}{REPAIRED if result.repaired else ''}"
        return Case(self.engine, method, kind, result.passed, found, asdict(result))


def method_taken(engine: str, name: str, target: Target) -> str | None:
    """The drafter's method if the engine is for such drafters at all: what it refuses is no failure."""
    source = source_of(*open_drafter(name, target), target)
    loader = ENGINES[engine].loaders.get(source.method)
    return source.method if loader is not None and loader.refuse(source.head.sizes if source.head else None, source.facts) is None else None


def found_table(cases: Sequence[Case]) -> Table:
    """Engine, method, case, result."""
    shown = Table("engine", "method", "case", "result", "found", box=None)
    for case in cases:
        shown.add_row(case.engine, case.method, case.kind, "pass" if case.passed else "FAIL", case.found)
    return shown


def matrix(cases: Sequence[Case]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of method x engine: what was seen there; `rules` where only the rules of the format are checked, `-` where it has no loader."""
    methods = list(dict.fromkeys([DRAFT_MODEL, PARD, *TABLE]))
    return ["method", *ENGINES], [[method, *(cell(cases, engine, method) for engine in ENGINES)] for method in methods]


def cell(cases: Sequence[Case], engine: str, method: str) -> str:
    """Drafts of random weights equal to ours, acceptance of a contrast head, acceptance of a trained drafter there and here."""
    mine = [case for case in cases if (case.engine, case.method) == (engine, method)]
    if not mine:
        return "rules" if method in ENGINES[engine].loaders else "-"
    parts = [] if all(case.passed for case in mine) else ["FAIL"]
    for case in mine:
        figures = case.figures or {}
        if case.kind == "random":
            parts.append(f"{figures.get('drafts_equal', 0)}/{figures.get('drafts_compared', 0)}")
        elif case.kind == "contrast":
            parts.append(f"contrast {figures.get('acceptance_engine', 0):.2f}")
        elif case.kind.startswith("trained"):
            parts.append(f"{figures.get('acceptance_engine', 0):.3f} = {figures.get('acceptance_ours', 0):.3f}")
    return ", ".join(parts)


def markdown(cases: Sequence[Case]) -> str:
    """Both tables."""
    header, rows = matrix(cases)
    lines = [header, ["---"] * len(header), *rows, [], ["engine", "method", "case", "result", "found"], ["---"] * 5]
    lines += [[case.engine, case.method, case.kind, "pass" if case.passed else "FAIL", case.found.replace("|", " ")] for case in cases]
    return "\n".join("| " + " | ".join(line) + " |" if line else "" for line in lines) + "\n"


def write(cases: Sequence[Case], out: Path) -> dict[str, Any]:
    """serve_check.json and serve_check.md, after every case, so that one can resume."""
    result = {"schema": "draftsmith.serve_check/1", "passed": all(case.passed for case in cases), "cases": [asdict(case) for case in cases]}
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve_check.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "serve_check.md").write_text(markdown(cases))
    return result


def passed_before(out: Path) -> dict[tuple[str, str, str], Case]:
    """By engine, method and kind."""
    path = out / "serve_check.json"
    cases = [Case(**case) for case in read_json(path)["cases"]] if path.is_file() else []
    return {(case.engine, case.method, case.kind): case for case in cases if case.passed}


def arguments_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.eval.serve_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of exports, of serve_check.json and of serve_check.md")
    parser.add_argument("--engine", action="append", default=[], help="NAME=PYTHON, of vllm, speculators, transformers, openvino or llamacpp")
    parser.add_argument("--drafter", action="append", default=[], help="a trained drafter's folder, or early_exit:LAYERS")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of random, contrast, fault, trained")
    parser.add_argument("--methods", default="", help="only these")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--target", default="builtin:quickstart")
    parser.add_argument("--resume", action="store_true", help="do not run again what passed before")
    given = parser.parse_args(arguments)
    given.kinds, given.methods = given.kinds.split(","), given.methods.split(",") if given.methods else []
    if wrong := sorted({*given.kinds} - {*KINDS}):
        raise UserError(f"--kinds: wanted some of {', '.join(KINDS)}, got {', '.join(wrong)}")
    names = [entry.partition("=")[0] for entry in given.engine]
    if wrong := [name for name in names if name not in RUNNERS] or ([] if names else ["nothing"]):
        raise UserError(f"--engine: wanted NAME=PYTHON with a name of {', '.join(RUNNERS)}, got {', '.join(wrong)}")
    return given


def planned(checker: Checker, given: argparse.Namespace, prompts: Sequence[list[int]]) -> Iterator[tuple[str, str, Callable[[], Case]]]:
    """(method, kind, what runs it) of every case in one engine."""
    engine, run = checker.engine, functools.partial
    for method in METHODS.get(engine, ()) if "random" in given.kinds else ():
        yield method, "random", run(checker.random, method)
    for method, faults in CONTRAST.get(engine, {}).items():
        for fault in faults:
            if ("contrast" if fault is None else "fault") in given.kinds:
                yield method, "contrast" if fault is None else f"fault: {fault}", run(checker.contrast, method, fault)
    for fault in FAULTS if "fault" in given.kinds and engine in FAULTY else ():
        yield "eagle3", f"fault: {fault}", run(checker.random, "eagle3", fault)
    for name in given.drafter if "trained" in given.kinds else ():
        taken = method_taken(engine, name, checker.target)
        if taken is not None:
            yield taken, f"trained: {name}", run(checker.trained, name, prompts, given.tokens)


def main(arguments: Sequence[str]) -> int:
    """Run every case, engine by engine."""
    given = arguments_of(arguments)
    target = Target.load(TargetRef(path=given.target).location, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    prompts = [render_prompt(target.tokenizer, prompt) for prompt in load_suite("stdlib", given.prompts, split="test").prompts]
    found = passed_before(given.out) if given.resume else {}
    for entry in given.engine:
        engine, _, python = entry.partition("=")
        checker = Checker(engine, engine_python(engine, python or None), target, given.out.resolve())
        for method, kind, run in planned(checker, given, prompts):
            if given.methods and method not in given.methods:
                continue
            key = engine, method, kind
            found[key] = case = found.get(key) or run()
            write([*found.values()], given.out)
            print(f"{case.engine} {case.method} {case.kind}: {'pass' if case.passed else 'FAIL'} ({case.found})", flush=True)
    cases = [*found.values()]
    Console(width=200).print(found_table(cases))
    header, rows = matrix(cases)
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    Console(width=200).print(shown)
    result = write(cases, given.out)
    print(json.dumps(result))
    return 0 if result["passed"] and cases else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
