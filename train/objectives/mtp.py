"""MTP's objective: soft cross-entropy over recursive steps with FastMTP's weights (2509.18362, equation 2), no feature loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .eagle3 import Eagle3Objective


@dataclass(frozen=True, kw_only=True)
class MtpObjective(Eagle3Objective):
    """EAGLE-3's objective with 3 steps of weights 0.6^k. The paper's is hard cross-entropy on text that the target wrote, whose mean this is."""

    name: ClassVar[str] = "mtp"
    steps: int = 3
    step_decay: float = 0.6
