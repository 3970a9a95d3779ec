"""Fact sheets: the sizes of public models by their names on the hub, so that their recipes can be planned and checked without a network."""

from __future__ import annotations

import copy
import functools
import json
from importlib.resources import files
from typing import Any


@functools.cache
def _sheets() -> dict[str, dict[str, Any]]:
    assert __package__
    found = (json.loads(entry.read_text(encoding="utf-8")) for entry in (files(__package__) / "facts").iterdir() if entry.name.endswith(".json"))
    return {sheet["target"]: sheet for sheet in found}


def fact_sheet(name: str) -> dict[str, Any] | None:
    """{"target": name, "parameters": their number, "config": what of config.json decides sizes}; None for a model that has none."""
    return copy.deepcopy(_sheets().get(name))
