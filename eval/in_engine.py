"""A drafter in the engine that it was exported for: the same drafts, the same output, the same acceptance?

    draftsmith export DRAFTER --format vllm --out exported --verify --engine-python ~/vllm/bin/python

The engine runs in its own environment (`runners/`), greedily and in float32. Its output has to be that of the same engine without the drafter; its
drafts are compared round by round with those of our chain decoding, and so is the share of drafted tokens that is accepted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import UserError
from ..decode.engine import Engine
from ..decode.prompts import render_prompt
from ..decode.sampling import SamplingParams
from ..heads.export.common import PARD, Source, widened
from ..heads.export.write import read_json
from ..heads.head import Head
from ..heads.pard import Pard
from ..heads.standalone import Standalone
from .report import read_report, write_report
from .suites import load_suite

TOLERANCE = 0.02  # of accepted / drafted: near-ties and the last round of a text differ between engines
RESULT = "in_engine.json"
RUNNERS = {"vllm": "vllm", "speculators": "vllm", "transformers": "transformers", "openvino": "openvino", "llamacpp": "llamacpp"}
VLLM_METHODS = {"eagle1": "eagle", "p_eagle": "eagle3", PARD: "draft_model"}
WIDE = {"vllm": ("eagle1", "mtp"), "transformers": ("dflash", "mtp"), "llamacpp": ("dflash",)}  # drafted from the whole vocabulary there
Drafts = list[list[list[int]]]  # of every prompt, of every round


@dataclass(frozen=True)
class InEngine:
    """What was found. drafts_equal: of drafts_compared rounds, those with the same draft (none where an engine does not show its drafts).

    acceptance: accepted / drafted tokens, in the engine and in ours, over the same prompts.
    """

    engine: str
    versions: dict[str, str]
    method: str
    tokens: int
    prompts: int
    outputs_identical: int
    drafts_compared: int
    drafts_equal: int
    acceptance_engine: float
    acceptance_ours: float
    repaired: bool = False  # a fault of the engine's own was put right for the run

    @property
    def passed(self) -> bool:
        """No output changed, and acceptance as ours within the tolerance."""
        return self.outputs_identical == self.prompts and abs(self.acceptance_engine - self.acceptance_ours) <= TOLERANCE

    @property
    def line(self) -> str:
        """For people."""
        seen = f", drafts equal in {self.drafts_equal} of {self.drafts_compared} rounds" if self.drafts_compared else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{'pass' if self.passed else 'FAIL'}: {self.method} in {self.engine} ({versions}): output identical for {self.outputs_identical} of "
            f"{self.prompts} prompts{seen}, accepted/drafted {self.acceptance_engine:.3f} there, {self.acceptance_ours:.3f} here"
        )


def engine_python(format_name: str, given: str | None) -> str:
    """The interpreter of the engine's environment. Raises UserError if it is none, or if nothing runs this engine."""
    if format_name not in RUNNERS:
        raise UserError(f"--verify: wanted one of {', '.join(RUNNERS)}, got {format_name}, which is checked by its rules only")
    variable = f"DRAFTSMITH_{format_name.upper().replace('-', '_')}_PYTHON"
    path = os.path.abspath(os.path.expanduser(given or os.environ.get(variable) or sys.executable))  # not resolved: a venv's python is a link
    if not os.access(path, os.X_OK) or not Path(path).is_file():
        raise UserError(f"--engine-python: wanted the python of the environment of {format_name}, got {path}; give it, or set {variable}")
    return path


def run_engine(format_name: str, python: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in the engine. Raises UserError with the last lines that it said if it fails."""
    script = Path(__file__).parent / "runners" / f"{RUNNERS[format_name]}_runner.py"
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("job.json", "result.json")]
        files[0].write_text(json.dumps(job))
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([python, str(script), *map(str, files)], capture_output=True, text=True, check=False, env=clean, cwd=place)
        if done.returncode or not files[1].is_file():
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise UserError(f"--verify: {format_name} failed in {python}: {' | '.join(said[-4:])[-600:]}")
        return read_json(files[1])


def verify_export(source: Source, format_name: str, folder: Path, python: str | None = None, *, prompts: int = 8, tokens: int = 64) -> InEngine:
    """Run the export in its engine on prompts of the suite, and write in_engine.json beside it. Raises UserError if the engine cannot be run."""
    interpreter = engine_python(format_name, python)
    if source.target.tokenizer is None:
        raise UserError("--verify: wanted a target with a tokenizer, got one without; the engine needs it")
    suite = load_suite("stdlib", prompts, split="test")
    ids = [render_prompt(source.target.tokenizer, prompt) for prompt in suite.prompts]
    result = measure(source, format_name, folder, interpreter, ids, tokens)
    (folder / RESULT).write_text(json.dumps({**asdict(result), "passed": result.passed}, indent=2) + "\n")
    return result


def add_to_report(result: InEngine, folder: Path) -> None:
    """A row "in the engine" in the report of an evaluation, in place of an older one of the same engine. Nothing where there is no report."""
    if (folder / "report.json").is_file():
        report = read_report(folder / "report.json")
        kept = [row for row in report.in_engine if row["engine"] != result.engine]
        write_report(replace(report, in_engine=[*kept, {**asdict(result), "passed": result.passed}]), folder)


def measure(
    source: Source,
    format_name: str,
    folder: Path,
    python: str,
    prompts: Sequence[list[int]],
    max_tokens: int,
    baseline: dict[str, Any] | None = None,
    repair: bool = False,
    told: dict[str, Any] | None = None,
) -> InEngine:
    """Compare the engine with the drafter, the engine without, and our own chain decoding. baseline: the engine's result without, if it is known.

    repair: put right what is known to be wrong in the engine itself (see its runner), to see that nothing else is. told: what to
    tell it about the drafter instead, to see that a fault shows.
    """
    depth = int(read_json(folder / "contract.json")["export"]["tokens"])
    own = folder / "target"  # one that was trained along
    job = plain_job(str(own.resolve()) if own.is_dir() else source.target.name, prompts, max_tokens) | {"repair": repair}
    plain = baseline or run_engine(format_name, python, job)
    about = drafting(source, format_name, folder, depth)
    about["speculative"] |= told or {}
    found = run_engine(format_name, python, job | about)
    outputs, ours = chain_drafts(source, format_name, prompts, depth, max_tokens)
    identical = sum(a == b for a, b in zip(plain["outputs"], found["outputs"], strict=True))
    drafts: Drafts = found.get("drafts", [])
    there, here = placed(found["outputs"], drafts, found.get("first", 1)), placed(outputs, ours)
    same = [agreed(a, b) for a, b in zip(found["outputs"], outputs, strict=True)]  # where texts part, drafts follow different ones
    pairs = [(there[index, at], here[index, at]) for index, at in there.keys() & here.keys() if at <= same[index]]
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in pairs if a and b]  # some engines draft fewer tokens near the end
    theirs = acceptance(found["outputs"], drafts, found.get("first", 1)) if drafts else accepted_share(found)
    return InEngine(
        engine=format_name,
        versions=found["versions"],
        method=source.method,
        tokens=depth,
        prompts=len(prompts),
        outputs_identical=identical,
        drafts_compared=len(pairs),
        drafts_equal=sum(a == b for a, b in pairs),
        acceptance_engine=theirs,
        acceptance_ours=acceptance(outputs, ours),
        repaired=bool(found.get("repaired")),
    )


def plain_job(target: str, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    """What the engine is to do without a drafter."""
    length = 16 * ((max(map(len, prompts)) + max_tokens) // 16 + 2)
    return {"target": target, "prompts": list(prompts), "max_tokens": max_tokens, "max_model_len": length, "speculative": None}


def accepted_share(found: dict[str, Any]) -> float:
    """By the engine's own counts."""
    metrics = found["metrics"]
    return float(metrics["num_accepted_tokens"]) / max(1, int(metrics["num_draft_tokens"]))


def drafting(source: Source, format_name: str, folder: Path, depth: int) -> dict[str, Any]:
    """The part of a job that tells the engine about the drafter."""
    method, place = source.method, str(folder.resolve())
    if not source.shares_tokenizer:
        raise UserError("--verify: wanted a draft model with the target's tokenizer, got another; engines translate tokens each in a way of its own")
    if format_name == "speculators":
        return {"target": place, "speculative": {}}  # the folder tells its target and how many tokens
    if format_name != "vllm":
        taps = [] if source.head is None else list(source.head.taps)
        return {"speculative": {"method": method, "model": place, "num_speculative_tokens": depth, "layers": [k - 1 for k in taps]}}
    config: dict[str, Any] = {"method": VLLM_METHODS.get(method, method), "num_speculative_tokens": depth}
    if method in ("p_eagle", PARD):
        config["parallel_drafting"] = True
    if method == "mtp":
        return {"speculative": config, "target": place}
    return {"speculative": config | {"model": place}}


def chain_drafts(source: Source, format_name: str, prompts: Sequence[list[int]], depth: int, max_tokens: int) -> tuple[list[list[int]], Drafts]:
    """Our chain decoding, as the engine would do it: (outputs, drafts of every round)."""
    drafter: Head | Standalone
    if source.head is not None:
        drafter = widened(source.head) if source.cut and source.method in WIDE.get(format_name, ()) else source.head
    else:
        assert source.draft is not None
        in_parallel = source.mask_token_id is not None and format_name != "transformers"
        drafter = (Pard(source.draft, source.mask_token_id or 0) if in_parallel else Standalone(source.draft)).bind(source.target)
    proposer, found = drafter.proposer(depth=depth), []
    propose = proposer.propose

    def recorded(*arguments: Any) -> Any:
        tree = propose(*arguments)
        found.append([int(token) for token in tree.tokens_BN[0, 1:]])
        return tree

    proposer.propose = recorded  # type: ignore[method-assign, assignment]
    engine = Engine(source.target, proposer)
    outputs, drafts = [], []
    for prompt in prompts:
        found.clear()
        with torch.no_grad():
            outputs.append(engine.generate([prompt], SamplingParams(), max_tokens).tokens[0][:max_tokens])
        drafts.append(list(found))
    return outputs, drafts


def placed(outputs: Sequence[list[int]], drafts: Drafts, first: int = 1) -> dict[tuple[int, int], list[int]]:
    """{(text, place of the first token that is drafted): draft}, without what lies behind the end.

    Greedy decoding alone tells the places: a drafted token is accepted if it and all before it are the output's. first: that of the first draft; most
    engines draft once the prefill has given a token.
    """
    found = {}
    for index, (text, rounds) in enumerate(zip(outputs, drafts, strict=False)):
        at = first
        for draft in rounds:
            if at >= len(text):
                break
            found[index, at] = draft[: len(text) - at]
            at += accepted(text, at, draft) + 1
    return found


def agreed(one: list[int], other: list[int]) -> int:
    """How many of their first tokens are the same."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def accepted(text: list[int], at: int, draft: list[int]) -> int:
    """How many of the draft's tokens are the text's from there on."""
    return agreed(draft, text[at:])


def acceptance(outputs: Sequence[list[int]], drafts: Drafts, first: int = 1) -> float:
    """Accepted / drafted tokens of greedy decoding, counted the same for both sides."""
    places = placed(outputs, drafts, first)
    right = sum(accepted(outputs[index], at, draft) for (index, at), draft in places.items())
    return right / max(1, sum(map(len, places.values())))
