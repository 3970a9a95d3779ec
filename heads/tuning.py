"""tuning.json in a drafter's folder: what `draftsmith tune` found best on one machine. Decoding and export use it unless they are told otherwise.

    tuning = read_tuning(folder)                    # None if the drafter was not tuned
    tuning.decode                                   # {"tree": "static", "depth": 4, "topk": 4, "nodes": 11, "paths": [[0], [0, 0], ..]}
    tuning.num_speculative_tokens                   # the best length of a chain, for engines that draft chains

Keys of the file: `schema`, `device`, `dtype`, `target` (fingerprint), `decode` (keys as a recipe's section `decode`), `num_speculative_tokens`,
`acceptance` ({temperature: [depth][rank] share of the judged places whose token was the candidate of that rank}; empty after a brief tuning),
`confidence` ({"greedy": [..], "sampled": [..]}: by depth, what the draft's scores are divided by, so that its probabilities are those of acceptance),
`measured` (what the choice rests on; `words` tells it), `costs` (conditions of the cost model), `prompts` (suite, split, count, hash), `created`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from .. import UserError

SCHEMA = "draftsmith.tuning/1"
FILE = "tuning.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """See the module's docstring."""

    device: str
    dtype: str
    target: dict[str, str]
    decode: dict[str, Any]
    num_speculative_tokens: int
    acceptance: dict[str, list[list[float]]]
    confidence: dict[str, list[float]]
    measured: dict[str, Any]
    costs: list[dict[str, Any]]
    prompts: dict[str, Any]
    created: str
    schema: str = SCHEMA


def read_tuning(folder: str | Path) -> Tuning | None:
    """The tuning of a drafter's folder; None if there is none, or if `folder` is no folder.

    Raises UserError for a file that is damaged or of another schema.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("schema") != SCHEMA:
            raise ValueError(f"schema {values.get('schema')!r} is not {SCHEMA}")
        tuning = Tuning(**values)
        if not isinstance(tuning.decode, dict) or type(tuning.num_speculative_tokens) is not int or tuning.num_speculative_tokens < 1:
            raise ValueError("decode or num_speculative_tokens is missing")
        return tuning
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: wanted the output of draftsmith tune, got a damaged file ({error}); tune again, or delete it") from error


def write_tuning(folder: Path, tuning: Tuning) -> Path:
    """Write tuning.json, whole or not at all."""
    path, draft = folder / FILE, folder / f".{FILE}.{os.getpid()}.tmp"
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(tuning), indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    return path
