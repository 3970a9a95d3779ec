"""The MLP speculator's objective (2404.19124): cross-entropy of every step, which weigh alike, the true tokens being those drafted before.

The paper takes the text's tokens as labels; the target's own distributions of them are the default here, as for the other heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .medusa import MedusaObjective


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorObjective(MedusaObjective):
    """See `MedusaObjective`."""

    name: ClassVar[str] = "mlp_speculator"
    step_decay: float = 1.0
