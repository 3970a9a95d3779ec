"""The MTP head: arithmetic, cache, losslessness, objective, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.heads.recurrent import RecurrentHead
from draftsmith.heads.registry import new_head
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.mtp import MtpObjective

from .recurrent import (
    CHAIN,
    TREE,
    Weights,
    check_cache,
    check_decoding,
    check_objective,
    check_training_pass,
    layer,
    make,
    plain_cross_entropy,
    rms,
    step_means,
)
from .tiny import check_folder, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def plain(head: RecurrentHead, w: Weights, embedded: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
    hidden = torch.cat([rms(embedded, w["enorm.weight"]), rms(fed, w["hnorm.weight"])], dim=-1) @ w["eh_proj.weight"].t()
    return rms(layer(w, "mtp_block", head, rms(hidden, w["mtp_block.input_layernorm.weight"]), hidden), w["norm.weight"])


def test_the_training_pass_equals_the_arithmetic_written_out(target: Target) -> None:
    check_training_pass(make("mtp", target), plain, lambda w, taps: taps, target)


def test_the_training_pass_equals_step_by_step_drafting_with_the_cache(target: Target) -> None:
    check_cache(make("mtp", target), target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "dynamic"])
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, how: dict[str, Any], temperature: float) -> None:
    check_decoding(make("mtp", target), target, how, temperature)


def test_the_objective_equals_the_formula_with_fast_mtps_weights(target: Target) -> None:
    head = make("mtp", target)

    def written_out(batch: Batch) -> torch.Tensor:
        step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
        assert step.taps_BNF is not None
        outputs = head.training_outputs(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, 3)
        logits = target.logits(step.hidden_BNH).float()
        means = [step_means(head, batch, k, plain_cross_entropy(head, outputs, logits, k)) for k in range(3)]
        return (means[0] + 0.6 * means[1] + 0.36 * means[2]) / 1.96

    check_objective(head, target, MtpObjective(chunk_tokens=7), written_out)


def test_folder_round_trip(target: Target, tmp_path: Path) -> None:
    check_folder(make("mtp", target), target, tmp_path)


def test_settings_that_it_does_not_have_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match=r"drafter\.num_layers: wanted null, as the method mtp has no such setting, got 2"):
        new_head("mtp", target, {"num_layers": 2})
