"""MLP speculator on a tiny target: training pass against drafting, objective against the published formula, over-fit, folders."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from draftsmith.decode.target import Target
from draftsmith.heads.mlp_speculator import MLPSpeculator
from draftsmith.heads.stepwise import StepwiseHead
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.mlp_speculator import MLPSpeculatorObjective

from .stepwise import (
    CHAIN,
    TREE,
    acquainted,
    check_drafting,
    check_lossless,
    check_objective,
    check_refusals,
    learnt,
    make,
    tau,
)
from .tiny import check_folder, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def known(target: Target) -> StepwiseHead:
    return acquainted("mlp_speculator", target, MLPSpeculatorObjective())


def speculator(target: Target, tied: bool) -> MLPSpeculator:
    head = make("mlp_speculator", target, intermediate_size=24, tie_weights=tied)
    assert isinstance(head, MLPSpeculator)
    return head


def plain_outputs(head: MLPSpeculator, taps: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """The published formula, position by position; parameters by name."""
    p, heads, inner = dict(head.named_parameters()), head.heads, head.config.inner_size
    a = 0.5 ** (0.5 / heads)
    b = math.sqrt((1 - a**2) * inner / 2)
    rows, total, _ = taps.shape
    outputs: list[torch.Tensor] = []
    for k in range(heads):
        own, projection = (0, min(k, 1)) if head.config.tie_weights else (k, k)
        x = torch.zeros(rows, total, inner)
        for t in range(total - 1 - k):
            before = taps[:, t] if k == 0 else outputs[k - 1][:, t]
            z = a * before @ p[f"proj.{projection}.weight"].t() + b * p[f"embeddings.{own}.weight"][batch.ids_BT[:, t + 1 + k]]
            z = z * (z.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * p[f"ln.{own}.weight"] + p[f"ln.{own}.bias"]
            x = x.index_put((torch.arange(rows), torch.tensor(t)), 0.5 * z * (1 + torch.erf(z / math.sqrt(2))))
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_the_objective_equals_the_formula_in_value_and_gradient(target: Target, labels: str, tied: bool) -> None:
    head = speculator(target, tied)

    def outputs(taps: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        return plain_outputs(head, taps, batch)

    check_objective(head, outputs, target, MLPSpeculatorObjective(labels=labels, chunk_tokens=5))  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_training_pass_equals_step_by_step_drafting(target: Target, tied: bool) -> None:
    check_drafting(target, speculator(target, tied))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "dynamic"])
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, known: StepwiseHead, settings: dict[str, int], temperature: float) -> None:
    check_lossless(target, lambda: known.proposer(**settings), temperature)  # type: ignore[arg-type]


def test_an_over_fitted_speculator_drafts_nearly_all(target: Target) -> None:
    head, prompt, text = learnt("mlp_speculator", target, MLPSpeculatorObjective(labels="hard"), steps=60)
    assert tau(target, head.proposer(), prompt, text) > 4  # of 5
    assert tau(target, head.proposer(tree="dynamic", nodes=8, topk=2), prompt, text) > 4


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_folder_round_trip(target: Target, tied: bool, tmp_path: Path) -> None:
    check_folder(speculator(target, tied), target, tmp_path / "d")


def test_tied_weights_are_one_set_of_layers(target: Target) -> None:
    counts = [sum(p.numel() for p in speculator(target, tied).parameters()) for tied in (False, True)]
    vocabularies = (target.vocab_size + 60) * 24
    assert counts[0] == 4 * (vocabularies + 2 * 24) + 24 * (32 + 3 * 24)
    assert counts[1] == vocabularies + 2 * 24 + 24 * (32 + 24)


def test_wrong_input_is_refused(target: Target) -> None:
    check_refusals("mlp_speculator", target)
