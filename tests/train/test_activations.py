"""Activations that are computed again: the same loss and gradients to the last bit, with less kept; where it cannot be done it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.heads.blocks import MLP
from draftsmith.train.activations import recompute_activations
from draftsmith.train.run import make_objective
from draftsmith.train.stream import Share, make_stream
from draftsmith.train.trainee import Trainee, make_trainee
from torch import Tensor

from . import small

PLAIN = ["objective.name=null", "objective.steps=null", "objective.step_decay=null", "drafter.taps=null", "drafter.draft_vocab_size=null"]
PLAIN += ["decode.depth=3", "train.activation_checkpointing=true"]
METHODS = {
    "eagle3": ["drafter.num_layers=2", "drafter.norm_features=true"],
    "eagle1": [],
    "mtp": [],
    "dflash": ["drafter.block_size=4"],
    "dspark": ["drafter.block_size=4", "drafter.markov_rank=4"],
    "p_eagle": ["drafter.block_size=4"],
    "draft_model": ["drafter.num_layers=2", "drafter.hidden_size=16"],
}


def target() -> Target:
    made = small.target()
    return Target(made.model.double(), None, "small")


def gradients(trainee: Trainee, settings: list[str], on: Target) -> tuple[Tensor, dict[str, Tensor], int]:
    """(loss, gradients, bytes that the forward pass kept)."""
    recipe, kept = small.recipe(*settings), dict[int, int]()
    batch = next(make_stream(recipe, small.sequences(), Share(batch_size=4)))[0]
    on.set_taps(trainee.taps)

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = make_objective(recipe)(trainee.module, trainee.drafter, on, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad.clone() for name, p in trainee.module.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("method", list(METHODS))
def test_loss_and_gradients_are_the_same_and_less_is_kept(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [0], MLP.forward

    def counted(self: MLP, x: Tensor) -> Tensor:
        calls[0] += 1
        return forward(self, x)

    monkeypatch.setattr(MLP, "forward", counted)
    settings = [*PLAIN, f"drafter.method={method}", *METHODS[method]]
    on = target()
    torch.manual_seed(1)
    trainee = make_trainee(small.recipe(*settings), on, small.sequences())
    trainee.module.double()
    plain = gradients(trainee, settings, on)
    trainee.module.zero_grad()
    calls_plain, calls[0] = calls[0], 0
    recompute_activations(trainee, small.recipe(*settings).train)
    names = list(trainee.module.state_dict())
    again = gradients(trainee, settings, on)
    assert torch.equal(plain[0], again[0]) and plain[1].keys() == again[1].keys() and names == list(copy.deepcopy(trainee.module).state_dict())
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, again[1][name]), name
    assert again[2] < 0.9 * plain[2] and (method == "draft_model" or calls[0] == 2 * calls_plain > 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["drafter.method=medusa"], "wanted false for this medusa drafter"),
        (["drafter.method=hydra"], "wanted false for this hydra drafter"),
        (["drafter.method=eagle3", "train.compile=true"], "wanted false with train.compile"),
    ],
)
def test_it_is_refused_where_it_cannot_be_done(settings: list[str], says: str) -> None:
    recipe: Any = small.recipe(*PLAIN, *settings)
    with pytest.raises(UserError, match=f"train.activation_checkpointing: {says}"):
        recompute_activations(make_trainee(recipe, small.target(), small.sequences()), recipe.train)
