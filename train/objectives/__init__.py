"""Objectives by name; a method's own has the method's name."""

from __future__ import annotations

from .common import Objective
from .eagle3 import Eagle3Objective

OBJECTIVES: dict[str, type[Objective]] = {objective.name: objective for objective in (Eagle3Objective,)}
