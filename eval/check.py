"""Does a drafter still belong to this target? `draftsmith check DRAFTER --target T [--measure]`, for pipelines that fine-tune the target.

Fingerprints tell whether anything changed at all. What a change costs is measured: the drafter's acceptance on a fixed set of prompts, kept as
token ids in the drafter's acceptance.json with what each of them gave at training, is measured again on this target, prompt by prompt.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import UserError
from ..decode.engine import Engine
from ..decode.prompts import eos_ids
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..heads.registry import Drafter, differences, open_drafter
from ..recipes.schema import Decode
from .drafting import make_proposer, plain
from .stats import Interval, paired_ratio_interval

SCHEMA = "draftsmith.acceptance/1"
FILE = "acceptance.json"
THRESHOLD = 0.9  # of the recorded tau, below which a drafter no longer belongs to its target
LEVEL = 0.05  # of the test
BATCH = 8


@dataclass(frozen=True)
class Probe:
    """One prompt, how it is sampled, and what it gave: tokens emitted in rounds, and rounds."""

    ids: list[int]
    temperature: float
    seed: int
    tokens: int
    rounds: int


@dataclass(frozen=True)
class Acceptance:
    """A drafter's acceptance on a fixed set of prompts. decode: a recipe's section. target: the fingerprint it was measured on."""

    target: dict[str, str]
    decode: dict[str, Any]
    max_new_tokens: int
    probes: list[Probe]
    schema: str = SCHEMA

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return sum(p.tokens for p in self.probes) / sum(p.rounds for p in self.probes)


def measure_acceptance(
    target: Target,
    drafter: Drafter,
    decode: Decode,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int = 0,
) -> Acceptance:
    """Of these prompts, the temperatures taking turns. Draft-length policies, whose decisions rest on the clock, are left out."""
    decode = decode if decode.tree == "static" else plain(decode)
    asked = [Probe(list(ids), temperatures[i % len(temperatures)], seed + i, 0, 0) for i, ids in enumerate(prompts)]
    about = {k: v for k, v in dataclasses.asdict(decode).items() if v is not None}
    return _measured(target, drafter, Acceptance(target.fingerprint(), about, max_new_tokens, asked))


def _measured(target: Target, drafter: Drafter, recorded: Acceptance) -> Acceptance:
    """The same probes, decoded anew."""
    decode = Decode(**recorded.decode)
    engine = Engine(target, make_proposer(drafter, decode, target, recorded.probes[0].ids))
    stops, found = eos_ids(target.model), []
    for start in range(0, len(recorded.probes), BATCH):
        part = recorded.probes[start : start + BATCH]
        params = [SamplingParams(temperature=p.temperature, seed=p.seed) for p in part]
        out = engine.generate([p.ids for p in part], params, recorded.max_new_tokens, eos_ids=stops)
        for probe, tokens, rounds in zip(part, out.tokens, out.rounds, strict=True):
            found.append(dataclasses.replace(probe, tokens=len(tokens) - 1, rounds=len(rounds)))
    if not any(p.rounds for p in found):
        raise UserError("acceptance: wanted prompts that the target answers with more than one token, got none; allow more new tokens")
    return dataclasses.replace(recorded, target=target.fingerprint(), probes=found)


def write_acceptance(folder: Path, acceptance: Acceptance) -> Path:
    """Write acceptance.json, whole or not at all."""
    path, draft = folder / FILE, folder / f".{FILE}.{os.getpid()}.tmp"
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(acceptance)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    return path


def read_acceptance(folder: Path) -> Acceptance:
    """Raises UserError if there is none, or a damaged one."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder}: wanted {FILE}, which a training writes, got none; write it on the original target: draftsmith check --record")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA:
            raise ValueError(f"schema {values['schema']!r} is not {SCHEMA}")
        acceptance = Acceptance(**{**values, "probes": [Probe(**probe) for probe in values["probes"]]})
        Decode(**acceptance.decode)
        if not sum(p.rounds for p in acceptance.probes):
            raise ValueError("no round was recorded")
        return acceptance
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: wanted the acceptance of a drafter, got a damaged file ({error}); record it again") from error


@dataclass(frozen=True)
class Drifted:
    """What a check found. changed: parts of the fingerprint that differ. ratio: tau now over tau then, with its interval; None if not measured.

    p_value: how often prompts whose two measurements are swapped at random show so great a loss.
    """

    changed: list[tuple[str, str, str]]
    then: float | None = None
    now: float | None = None
    ratio: Interval | None = None
    p_value: float | None = None
    threshold: float = THRESHOLD

    @property
    def failed(self) -> bool:
        """Without a measurement: whether anything changed. With one: whether the loss is below the threshold, and beyond chance."""
        if self.ratio is None or self.p_value is None:
            return bool(self.changed)
        return self.ratio.value < self.threshold and self.p_value < LEVEL

    def lines(self) -> list[str]:
        """For people."""
        told = [f"{part}: this target's {ours}, the drafter's {theirs}" for part, ours, theirs in self.changed]
        said = ["fingerprints differ: " + "; ".join(told)] if told else ["fingerprints are the same"]
        if self.ratio is None or self.p_value is None:
            return said + (["measure what it costs: --measure"] if told else [])
        r = self.ratio
        said.append(f"tau {self.now:.3f}, at training {self.then:.3f}: {r.value:.3f} of it, 95 % {r.lo:.3f}-{r.hi:.3f}, p = {self.p_value:.3g}")
        if self.failed:
            said.append(f"FAIL: below {self.threshold:g} of the recorded acceptance; train the drafter on this target, starting from this one")
        elif self.ratio.value < self.threshold:
            said.append(f"below {self.threshold:g}, but that may be chance (p >= {LEVEL:g}): record more prompts to be certain")
        else:
            said.append("the drafter still belongs to this target")
        return said


def swap_test(now: Acceptance, then: Acceptance, *, swaps: int = 4000, seed: int = 0) -> float:
    """One-sided paired permutation test of tau: under no change, a prompt's two measurements are exchangeable."""
    a = np.array([[p.tokens, p.rounds] for p in now.probes], dtype=np.float64)
    b = np.array([[p.tokens, p.rounds] for p in then.probes], dtype=np.float64)
    observed = np.divide(*a.sum(0)) / np.divide(*b.sum(0))
    swapped = np.random.default_rng(seed).random((swaps, len(a))) < 0.5
    first = swapped @ b + ~swapped @ a
    second = swapped @ a + ~swapped @ b
    ratios = (first[:, 0] / first[:, 1]) / (second[:, 0] / second[:, 1])
    return float((1 + (ratios <= observed + 1e-12).sum()) / (1 + swaps))


def check(folder: Path, target: Target, *, measure: bool, threshold: float = THRESHOLD) -> Drifted:
    """Compare a drafter with a target.

    Raises UserError for a folder that is no drafter's, for another tokenizer, or if there is no recorded acceptance to measure by.
    """
    try:
        contract = json.loads((folder / "contract.json").read_text(encoding="utf-8"))
        changed = differences(contract, target)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"drafter {folder}: wanted a drafter's folder, got none that can be read ({error}); give a run's drafter/ folder") from error
    if not measure:
        return Drifted(changed, threshold=threshold)
    then = read_acceptance(folder)
    if any(part == "tokenizer" for part, _, _ in changed):
        raise UserError(f"drafter {folder}: wanted the target's tokenizer, got another one; what was drafted would mean something else")
    if changed and "adapter" in contract:
        raise UserError(f"drafter {folder}: wanted the target that its adapter was trained with, got another one; train it on this target")
    recorded = contract["target"]["fingerprint"]
    setattr(target, "fingerprint", lambda: recorded)  # noqa: B010  # this one target passes for the drafter's: what changed is known
    try:
        drafter, _ = open_drafter(folder, target)
    finally:
        del target.fingerprint
    now = _measured(target, drafter, then)
    ratio = paired_ratio_interval(
        [p.tokens for p in now.probes], [p.rounds for p in now.probes], [p.tokens for p in then.probes], [p.rounds for p in then.probes]
    )
    return Drifted(changed, then.tau, now.tau, ratio, swap_test(now, then), threshold)
