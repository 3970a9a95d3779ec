"""Hydra's objective (2402.05109): Medusa's, with the true tokens as those drafted before. Soft labels are what the paper chooses for Hydra++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .medusa import MedusaObjective


@dataclass(frozen=True, kw_only=True)
class HydraObjective(MedusaObjective):
    """See `MedusaObjective`."""

    name: ClassVar[str] = "hydra"
