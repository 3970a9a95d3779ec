"""What a run trains: how it is built, which parameters learn how fast, how it is stored. The loop knows no kind of drafter; this is the seam.

A new kind (a causal LM saved as a Hugging Face folder, heads together with adapters in the target) is a subclass of `Trainee` and a line in
`make_trainee`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import UserError
from ..decode.target import Target
from ..eval.drafting import check_proposer
from ..heads.adapter import Joint, TunableTarget
from ..heads.dspark import DSpark
from ..heads.head import Head
from ..heads.own_mtp import OwnMtp, own_mtp, refuse_settings
from ..heads.registry import copy_drafter, head_config, known_settings, load_drafter, new_head, save_drafter, tunes_target
from ..recipes.schema import DrafterRecipe
from .data import Sequences, frequent_tokens
from .optimizers import Part
from .stream import Share, Stream


class Trainee(ABC):
    """drafter: what the objective and the proposer get (a `heads.registry.Drafter`).

    module: what is wrapped for several processes, and called by the objective as `model`; it holds every trained parameter, and its `state_dict` is
    what a checkpoint keeps. The same as `drafter`, unless more is trained.
    """

    drafter: Any
    module: nn.Module

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers that training reads."""
        return tuple(self.drafter.taps)

    @property
    def target_is_fixed(self) -> bool:
        """Whether the target's features of a text stay the same all the time, so that the loop may compute and keep them.

        If not, the objective gets no features (step=None): it runs the target itself, with gradients where it wants them.
        """
        return True

    def parts(self) -> list[Part]:
        """All trained parameters."""
        return [Part(name="drafter", parameters=[(name, p) for name, p in self.module.named_parameters() if p.requires_grad])]

    def stream(self, base: Stream, recipe: DrafterRecipe, sequences: Sequences, share: Share) -> Stream:
        """What it reads, from what was made of the data. Raises UserError if the recipe wants text of it, and it writes none."""
        if recipe.train.on_policy:
            raise UserError(f"train.on_policy: wanted 0 for the method {recipe.drafter.method}, which writes no text, got {recipe.train.on_policy}")
        return base

    def mode(self, training: bool) -> None:
        """Training, or measuring."""
        self.module.train(training)

    @abstractmethod
    def save(self, folder: Path, contract: dict[str, Any]) -> None:
        """Write what users load (`open_drafter` reads it). It appears whole or not at all."""

    @abstractmethod
    def publish(self, best: Path, folder: Path) -> None:
        """Write what users load from `best`, which `save` wrote, to `folder`, having checked that it can be read."""


class HeadTrainee(Trainee):
    """A head of `heads.registry.METHODS` on a frozen target."""

    def __init__(self, head: Head, target: Target) -> None:
        self.drafter, self.module, self.target = head, head, target

    @classmethod
    def of(cls, recipe: DrafterRecipe, target: Target, sequences: Sequences) -> HeadTrainee:
        """A new head, or the one to continue from. Raises UserError if it does not fit the recipe, or cannot draft the recipe's tree."""
        if recipe.drafter.init == "target":
            head = _of_target(recipe, target)
        elif recipe.drafter.init:
            head = _continued(recipe, target)
        else:
            head = new_head(recipe.drafter.method, target, recipe.drafter.settings)
        check_draft_shape(recipe, head, target)
        if recipe.drafter.init in (None, "target"):
            head.set_draft_vocabulary(frequent_tokens(sequences, head.sizes.draft_vocab_size, head.sizes.target_vocab_size), target)
        return cls(head, target)

    def save(self, folder: Path, contract: dict[str, Any]) -> None:
        save_drafter(self.drafter, folder, contract)

    def publish(self, best: Path, folder: Path) -> None:
        chosen, notes = load_drafter(best, self.target, dtype=torch.float32)
        save_drafter(chosen, folder, notes)


def _continued(recipe: DrafterRecipe, target: Target) -> Head:
    """The head of drafter.init. Raises UserError if the recipe asks for another method, or for sizes that it does not have."""
    method, init = recipe.drafter.method, recipe.drafter.init
    assert init is not None
    head, _ = load_drafter(init, target, dtype=torch.float32)
    if head.method != method:
        raise UserError(f"drafter.init: wanted a drafter of method {method}, got {head.method}")
    if isinstance(head, OwnMtp):
        refuse_settings(recipe.drafter.settings)
        return head.train()
    asked, has = head_config(method, target, recipe.drafter.settings), head.sizes
    for name, value in known_settings(method, recipe.drafter.settings).items():
        # A setting that is no size by itself (as a width that has another name there) shows in what follows from it.
        differing = [part.name for part in dataclasses.fields(asked) if getattr(asked, part.name) != getattr(has, part.name)]
        if name in differing or (differing and not hasattr(asked, name)):
            got = getattr(has, name, None)
            raise UserError(
                f"drafter.{name}: wanted null{'' if got is None else f' or {got}'}, as drafter.init={init} has its sizes already, got {value}"
            )
    return head.train()


def check_draft_shape(recipe: DrafterRecipe, drafter: Any, target: Target) -> None:
    """Raise UserError for a draft, a length or a rule that the drafter cannot follow: now, not at the first measurement or after the training."""
    decode = recipe.decode
    if decode.length == "predicted":  # the predictor is trained when the drafter is
        decode = dataclasses.replace(decode, length="entropy")
    check_proposer(drafter, decode, recipe.eval.rule)


def check_decode(recipe: DrafterRecipe) -> None:
    """Raise UserError, before anything is loaded, for a length that what is trained will not be able to decide."""
    length, method = recipe.decode.length, recipe.drafter.method
    if length == "predicted" and not recipe.drafter.predictor:
        raise UserError("decode.length: wanted another rule, or drafter.predictor=true (draft_model), which trains what predicts, got predicted")
    if length == "expected" and method != DSpark.method:
        raise UserError(f"decode.length: wanted another rule for the method {method}, which has no confidence head (dspark has), got expected")


def _of_target(recipe: DrafterRecipe, target: Target) -> Head:
    """The target's own MTP layer. Raises UserError if it has none, or the recipe asks for another method, or for sizes."""
    if recipe.drafter.method != OwnMtp.method:
        raise UserError(f"drafter.init: wanted null or a folder for the method {recipe.drafter.method}, got target, which is for mtp and draft_model")
    refuse_settings(recipe.drafter.settings)
    return own_mtp(target, recipe.target.location, revision=recipe.target.revision, draft_vocab_size=recipe.drafter.draft_vocab_size)


class TunedTrainee(HeadTrainee):
    """A head together with an adapter of its target (Medusa-2)."""

    target: TunableTarget

    def __init__(self, head: Head, target: TunableTarget, lr_share: float) -> None:
        super().__init__(head, target)
        self.module, self.lr_share = Joint(head, target.parameters()), lr_share

    @property
    def target_is_fixed(self) -> bool:
        return False

    def parts(self) -> list[Part]:
        """The head's parameters, and the adapter's, which learn more slowly."""
        named = list(self.module.named_parameters())
        head, adapter = ([(name, p) for name, p in named if name.startswith("adapter.") == of] for of in (False, True))
        return [
            Part(name="drafter", parameters=head),
            Part(name="adapter", parameters=adapter, lr_scale=self.lr_share, weight_decay=0.0, muon=False),
        ]

    def publish(self, best: Path, folder: Path) -> None:
        copy_drafter(best, folder)


def make_trainee(recipe: DrafterRecipe, target: Target, sequences: Sequences) -> Trainee:
    """What the recipe trains, untrained, made from the global random state. target: see `tuning.tunable` for a recipe with an adapter."""
    from .starts import DraftTrainee  # it is a subclass of what is defined here

    if recipe.drafter.init and tunes_target(recipe.drafter.init):
        raise UserError(f"drafter.init: wanted a drafter that leaves its target as it is, got {recipe.drafter.init}, which brings an adapter")
    if recipe.drafter.method == DraftTrainee.method:
        return DraftTrainee.of(recipe, target, sequences)
    made = HeadTrainee.of(recipe, target, sequences)
    return TunedTrainee(made.drafter, target, recipe.adapter.lr_share) if isinstance(target, TunableTarget) else made
