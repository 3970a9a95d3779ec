"""What an evaluation is asked to measure, and what decoding gave: the types that the harness, the gate and the rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decode.engine import Generation
from ..decode.sampling import SamplingParams
from .baselines import Timed

RULE = "shared_noise"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    timed_prompts: how many prompts are timed at batch 1 (None: all). The others are decoded in ragged batches of `gate_batch`, by both engines:
    they count for the gate and for tau. batches: sizes that get rows beside batch 1. rule: how drafts are judged. default_sampling: a row more,
    sampled as the model's own generation_config says. eager: also time transformers' `generate`. threads: CPU threads (None: measured, the fastest
    is taken).
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 128
    eager: bool = True
    timed_prompts: int | None = None
    gate_batch: int = 8
    batches: Sequence[int] = (1,)
    rule: str = RULE
    default_sampling: bool = False
    threads: int | None = None
    bootstrap: int = 2000
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Of the intervals."""
        return {"resamples": self.bootstrap, "seed": self.seed}


@dataclass(frozen=True)
class Item:
    """One prompt as token ids. conversation: which of the suite's; turn: how many answers of the target precede it there."""

    ids: list[int]
    category: str
    conversation: int
    turn: int


@dataclass(frozen=True)
class Sampling:
    """One way to sample. params: of every prompt, seeds apart."""

    label: str
    params: SamplingParams
    default: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What the report says of it: those settings that are not off."""
        off = vars(SamplingParams())
        shown = {name: value for name, value in vars(self.params).items() if name not in ("seed", "logit_bias") and value != off[name]}
        return {"temperature": self.params.temperature, **shown, **({"model_default": True} if self.default else {})}


@dataclass
class Runs:
    """What decoding gave, unit by unit. ours: by drafter, "" being the one that is measured. base: plain decoding. Peaks are MiB."""

    units: list[list[int]]  # the items of each
    owners: list[int]  # the conversation of each, or its own number where it has several: what the intervals draw again
    ours: dict[str, list[Generation]]
    base: list[Generation] = field(default_factory=list)
    eager: list[Timed] = field(default_factory=list)
    assisted: list[Timed] = field(default_factory=list)
    peaks: dict[str, float | None] = field(default_factory=dict)
