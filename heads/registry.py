"""Which drafters exist, and how they are stored: config.json + model.safetensors + contract.json."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .. import UserError
from ..decode.target import Target
from .eagle3 import Eagle3, Eagle3Config

METHODS = {"eagle3": (Eagle3, Eagle3Config)}
FILES = ("config.json", "model.safetensors", "contract.json")


def save_drafter(drafter: Eagle3, folder: Path, contract: dict[str, Any]) -> None:
    """Write the native folder. It appears whole or not at all: a sibling is written, synced and renamed."""
    draft = folder.with_name(folder.name + ".partial")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    config = {"method": drafter.method, **dataclasses.asdict(drafter.config)}
    save_file({k: v.detach().contiguous().cpu() for k, v in drafter.state_dict().items()}, draft / "model.safetensors")
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (draft / "contract.json").write_text(json.dumps(contract, indent=2) + "\n")
    for name in FILES:
        with open(draft / name, "rb") as handle:
            os.fsync(handle.fileno())
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def load_drafter(folder: str | Path, target: Target, *, dtype: torch.dtype | None = None) -> tuple[Eagle3, dict[str, Any]]:
    """(drafter bound to its target, contract). Raises UserError for a folder that is none, is damaged, or belongs to another target."""
    folder = Path(folder)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"drafter {folder}: wanted a folder with {', '.join(FILES)}, got none of {', '.join(missing)}; give a run's drafter/ folder")
    try:
        values = json.loads((folder / "config.json").read_text())
        contract: dict[str, Any] = json.loads((folder / "contract.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        method = values.pop("method")
        if method not in METHODS:
            raise UserError(f"drafter {folder}: wanted method {', '.join(METHODS)}, got {method}")
        made, config = METHODS[method]
        drafter = made(config(**values))
        drafter.load_state_dict(tensors)
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"drafter {folder}: damaged ({' '.join(str(error).split())[:200]}); use another checkpoint") from error
    differs = [f"{part} {ours} is not {theirs}" for part, ours, theirs in differences(contract, target)]
    if differs:
        raise UserError(
            f"drafter {folder}: belongs to another target ({'; '.join(differs)}); wanted the one it was trained for: {contract['target']['name']}"
        )
    return drafter.to(device=target.device, dtype=dtype or target.dtype).eval().bind(target), contract


def differences(contract: dict[str, Any], target: Target) -> list[tuple[str, str, str]]:
    """[(part, this target's, the contract's)] of the fingerprints that differ."""
    theirs, ours = contract["target"]["fingerprint"], target.fingerprint()
    return [(part, ours.get(part, "none"), theirs.get(part, "none")) for part in sorted({*ours, *theirs}) if ours.get(part) != theirs.get(part)]
