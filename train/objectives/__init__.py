"""Objectives by name; a method's own has the method's name."""

from __future__ import annotations

from .common import Objective
from .dflash import DFlashObjective
from .draft_model import DraftModelObjective
from .dspark import DSparkObjective
from .eagle1 import Eagle1Objective, HassObjective
from .eagle3 import Eagle3Objective
from .hydra import HydraObjective
from .medusa import MedusaObjective
from .medusa2 import Medusa2Objective
from .mlp_speculator import MLPSpeculatorObjective
from .mtp import MtpObjective
from .p_eagle import PEagleObjective
from .pard import PardObjective

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective
    for objective in (
        DFlashObjective,
        DSparkObjective,
        DraftModelObjective,
        Eagle1Objective,
        Eagle3Objective,
        HassObjective,
        HydraObjective,
        MLPSpeculatorObjective,
        MedusaObjective,
        Medusa2Objective,
        PEagleObjective,
        PardObjective,
        MtpObjective,
    )
}
