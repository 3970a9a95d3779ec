"""Activation checkpointing: what a layer computed is not kept for the backward pass, but computed again there. Memory for time.

    draftsmith train RECIPE train.activation_checkpointing=true

Of decoder layers, projections and MLP, whose activations are the largest, are computed again; the attention between them is not, as what it keeps is
needed either way. Layers are called in parts (`heads/recurrent.py` unrolls them), so parts are wrapped, in place: parameters keep their names.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import UserError
from ..heads.blocks import DecoderLayer
from ..heads.dflash import BlockLayer
from ..heads.draft_model import DraftModel
from ..recipes.schema import Train
from .trainee import Trainee, TunedTrainee


def recompute_activations(trainee: Trainee, train: Train) -> None:
    """Make the layers that are trained compute their activations again. Raises UserError for what has no such layers."""
    drafter: Any = trainee.drafter
    name = "train.activation_checkpointing"
    if train.compile:
        raise UserError(f"{name}: wanted false with train.compile, which chooses by itself what to compute again, got true")
    if isinstance(trainee, TunedTrainee):
        raise UserError(f"{name}: wanted false, as the adapter of a target is trained (adapter.rank), got true")
    if isinstance(drafter, DraftModel):
        model: Any = drafter.causal_lm
        if not model.supports_gradient_checkpointing:
            raise UserError(f"{name}: wanted false for a {type(model).__name__}, of which transformers cannot do it, got true")
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # older name
        enable({"use_reentrant": False})
        return
    parts: list[tuple[nn.Module, str]] = []
    for module in trainee.module.modules():
        if isinstance(module, DecoderLayer):
            parts += [(module, "finish"), (module.self_attn, "project")]
        elif isinstance(module, BlockLayer):
            parts.append((module, "forward"))
    if not parts:
        raise UserError(f"{name}: wanted false for this {drafter.method} drafter, which has no decoder layers of ours, got true")
    for module, method in parts:
        setattr(module, method, functools.partial(checkpoint, getattr(module, method), use_reentrant=False))
