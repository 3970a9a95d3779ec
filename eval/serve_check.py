"""Every method in every engine that is installed: the same drafts from random weights, the same acceptance of trained drafters.

    python -m draftsmith.eval.serve_check --out runs/serve-check --engine vllm=~/vllm/bin/python --engine transformers \\
        --drafter runs/quickstart/drafter --drafter early_exit:0-3

`make serve-check` builds the environments first. Three kinds of cases:
    random      a head of random weights, norms and biases: every round's draft has to be ours (40 rounds at least); nothing is easier to get wrong
    fault       the same with one thing broken, which has to be noticed: layers shifted by one, a norm dropped, absolute ids in d2t
    trained     a drafter of yours on prompts of the suite: accepted/drafted within 2 points of our chain decoding, the output unchanged
Prints a table and, as its last line, one JSON object; writes serve_check.json. Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
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
from ..heads.export.common import Source, Tuning
from ..heads.export.table import TABLE
from ..heads.export.write import export, read_tuning, source_of
from ..heads.head import Head
from ..heads.registry import new_head, open_drafter
from ..heads.standalone import early_exit
from ..recipes.schema import TargetRef
from .in_engine import RESULT, InEngine, engine_python, measure, run_engine
from .suites import load_suite

METHODS = {
    "vllm": ("draft_model", "medusa", "eagle1", "eagle3", "p_eagle", "dflash", "mtp"),
    "speculators": ("eagle3", "p_eagle", "dflash"),
    "transformers": ("draft_model", "dflash", "mtp"),
    "openvino": ("draft_model",),  # it does not show its drafts, so that random heads, of which nothing is accepted, prove nothing
}
PLACES = {"eagle1": "eg1", "eagle3": "eg3", "p_eagle": "peg", "dflash": "dfl"}  # folders' names must not hold the methods' (see vLLM's path rule)
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
    if method not in TABLE:
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
    if method == "dflash":
        same_key_norms(head)
    return replace(source_of(head, {}, target), tuning=Tuning(tokens))


def same_key_norms(head: Head) -> None:
    """All layers the same: vLLM's CPU kernel norms the context's keys of all layers by the first one's weights (0.32; not so on a GPU)."""
    state = head.state_dict()
    first = next(tensor for name, tensor in state.items() if name.endswith("k_norm.weight"))
    for name, tensor in state.items():
        if name.endswith("k_norm.weight"):
            tensor.copy_(first)


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


FAULTS = {"layers shifted by one": shifted_layers, "a norm dropped": dropped_norm, "absolute d2t": absolute_ids}


# Cases


class Checker:
    """Runs cases in one engine; what it generates without a drafter is measured once a set of prompts."""

    def __init__(self, engine: str, python: str, target: Target, out: Path) -> None:
        self.engine, self.python, self.target, self.out = engine, python, target, out
        self._plain: dict[str, dict[str, Any]] = {}

    def _measure(self, source: Source, folder: Path, prompts: Sequence[list[int]], tokens: int) -> InEngine:
        length = 16 * ((max(map(len, prompts)) + tokens) // 16 + 2)
        key = json.dumps([prompts, tokens])
        job = {"target": self.target.name, "prompts": list(prompts), "max_tokens": tokens, "max_model_len": length, "speculative": None}
        if key not in self._plain:
            self._plain[key] = run_engine(self.engine, self.python, job)
        return measure(source, self.engine, folder, self.python, prompts, tokens, self._plain[key])

    def random(self, method: str, fault: str | None = None) -> Case:
        """Drafts of random weights; one token a round, so that each draft follows a text that both sides have."""
        kind = "random" if fault is None else f"fault: {fault}"
        try:
            source = random_source(method, self.engine, self.target, 1)
            folder = self.out / f"{self.engine}-{PLACES.get(method, method)}{'' if fault is None else '-broken'}"
            export(source, self.engine, folder)
            if fault is not None:
                FAULTS[fault](folder)
            result = self._measure(source, folder, TEXTS, 48)
        except UserError as error:
            return Case(self.engine, method, kind, fault is not None, str(error)[-200:])
        same = result.passed and result.drafts_equal == result.drafts_compared >= ROUNDS
        found = f"{result.drafts_equal}/{result.drafts_compared} rounds, output {result.outputs_identical}/{result.prompts}"
        return Case(self.engine, method, kind, same == (fault is None), found, asdict(result))

    def trained(self, name: str, prompts: Sequence[list[int]], tokens: int) -> Case:
        """A drafter of the user's."""
        method = name
        try:
            drafter, contract = open_drafter(name, self.target)
            source = source_of(drafter, contract, self.target, tuning=read_tuning(Path(name)))
            source, method = replace(source, tuning=Tuning(min(3, source.tuning.tokens))), source.method
            folder = self.out / f"{self.engine}-{PLACES.get(method, method)}-trained"
            export(source, self.engine, folder)
            result = self._measure(source, folder, prompts, tokens)
        except UserError as error:
            return Case(self.engine, method, "trained", False, str(error)[-200:])
        (folder / RESULT).write_text(json.dumps({**asdict(result), "passed": result.passed}, indent=2) + "\n")
        found = (
            f"accepted/drafted {result.acceptance_engine:.3f}, ours {result.acceptance_ours:.3f}, "
            f"{result.drafts_equal}/{result.drafts_compared} rounds, output {result.outputs_identical}/{result.prompts}"
        )
        return Case(self.engine, method, "trained", result.passed, found, asdict(result))


def takes(engine: str, name: str, target: Target) -> bool:
    """Whether the engine is for such drafters at all: what it refuses is no failure."""
    source = source_of(*open_drafter(name, target), target)
    loader = ENGINES[engine].loaders.get(source.method)
    return loader is not None and loader.refuse(source.head.sizes if source.head else None, source.facts) is None


def table(cases: Sequence[Case]) -> Table:
    """Engine, method, case, result."""
    shown = Table("engine", "method", "case", "result", "found", box=None)
    for case in cases:
        shown.add_row(case.engine, case.method, case.kind, "pass" if case.passed else "FAIL", case.found)
    return shown


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.eval.serve_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of exports and of serve_check.json")
    parser.add_argument("--engine", action="append", default=[], help="NAME=PYTHON, of vllm, speculators, transformers or openvino")
    parser.add_argument("--drafter", action="append", default=[], help="a trained drafter's folder, or early_exit:LAYERS")
    parser.add_argument("--kinds", default="random,fault,trained")
    parser.add_argument("--methods", default="", help="only these, for random heads")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--target", default="builtin:quickstart")
    given = parser.parse_args(arguments)
    kinds, console = given.kinds.split(","), Console()
    target = Target.load(TargetRef(path=given.target).location, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    prompts = [render_prompt(target.tokenizer, prompt) for prompt in load_suite("stdlib", given.prompts, split="test").prompts]
    cases: list[Case] = []

    def done(case: Case) -> None:
        cases.append(case)
        print(f"{case.engine} {case.method} {case.kind}: {'pass' if case.passed else 'FAIL'} ({case.found})", flush=True)

    for entry in given.engine:
        engine, _, python = entry.partition("=")
        checker = Checker(engine, engine_python(engine, python or None), target, given.out.resolve())
        chosen = [name for name in METHODS.get(engine, ()) if not given.methods or name in given.methods.split(",")]
        for method in chosen if "random" in kinds and engine != "openvino" else []:
            done(checker.random(method))
        for fault in FAULTS if "fault" in kinds and engine == "vllm" else ():
            done(checker.random("eagle3", fault))
        for name in given.drafter if "trained" in kinds else []:
            if takes(engine, name, target):
                done(checker.trained(name, prompts, given.tokens))
    console.print(table(cases))
    result = {"schema": "draftsmith.serve_check/1", "passed": all(case.passed for case in cases), "cases": [asdict(case) for case in cases]}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "serve_check.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0 if result["passed"] and cases else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
