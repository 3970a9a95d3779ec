"""EAGLE-1 and HASS: arithmetic, cache, losslessness, objectives, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.recurrent import RecurrentHead
from draftsmith.heads.registry import new_head
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.eagle1 import Eagle1Objective, HassObjective, noisy

from .recurrent import (
    CHAIN,
    PROMPTS,
    TREE,
    Weights,
    check_cache,
    check_decoding,
    check_objective,
    check_training_pass,
    layer,
    make,
    plain_cross_entropy,
    step_means,
)
from .tiny import check_folder, features, tiny_target, whole


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def plain(head: RecurrentHead, w: Weights, embedded: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
    hidden = torch.cat([embedded, fed], dim=-1) @ w["fc.weight"].t()
    return layer(w, "layers.0", head, hidden, hidden)


@pytest.mark.parametrize("detach", [False, True])
def test_the_training_pass_equals_the_arithmetic_written_out(target: Target, detach: bool) -> None:
    check_training_pass(make("eagle1", target), plain, lambda w, taps: taps, target, detach=detach)


def test_the_training_pass_equals_step_by_step_drafting_with_the_cache(target: Target) -> None:
    check_cache(make("eagle1", target), target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "dynamic"])
def test_decoding_is_token_identical_in_a_ragged_batch(target: Target, how: dict[str, Any], temperature: float) -> None:
    check_decoding(make("eagle1", target), target, how, temperature)


def test_the_layout_is_the_served_one_and_the_feature_is_the_normed_one(target: Target) -> None:
    head = make("eagle1", target)
    attention = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    mlp = {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert set(dict(head.named_parameters())) == {"fc.weight", "layers.0.post_attention_layernorm.weight"} | attention | mlp
    batch = whole(torch.tensor(PROMPTS[:1]))
    taps = features(target, head, batch)
    want = target.model(input_ids=batch.ids_BT).logits[..., head.draft_ids]
    torch.testing.assert_close(head.logits(taps), want, atol=1e-4, rtol=1e-4)  # its output layer on the feature gives the target's logits


@pytest.mark.parametrize("size", [60, 97])
def test_the_logits_carry_the_familys_factor(size: int) -> None:
    scaled = tiny_target()
    scaled.config.logits_scaling = 3.0
    head = make("eagle1", scaled, size)
    state = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.logits(state), scaled.logits(state)[..., head.draft_ids])
    torch.testing.assert_close(head.proposer()._logits(state), scaled.logits(state)[..., head.draft_ids])


def written_out(head: RecurrentHead, target: Target, batch: Batch, steps: int, topk: int, decay: float) -> torch.Tensor:
    step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    assert step.taps_BNF is not None
    outputs = head.training_outputs(step.taps_BNF, batch.ids_BT, batch.position_BT, batch.document_BT, steps, True)
    logits = target.logits(step.hidden_BNH).float()
    total = torch.zeros(())
    for k in range(steps):

        def feature(row: int, t: int, k: int = k) -> torch.Tensor:
            gap = (outputs[k][row, t] - step.hidden_BNH[row, t + 1 + k]).abs()
            return torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()

        def distilled(row: int, t: int, k: int = k) -> torch.Tensor | None:
            if not head.t2d[logits[row, t + 1 + k].argmax()]:
                return None
            p = logits[row, t + 1 + k, head.draft_ids].softmax(-1)
            best = p.argsort(descending=True)[:topk]
            return -(p[best] * head.logits(outputs[k][row, t]).log_softmax(-1)[best]).sum()

        value = step_means(head, batch, k, feature) + 0.1 * step_means(head, batch, k, plain_cross_entropy(head, outputs, logits, k))
        total = total + decay**k * (value if topk == 0 else value + 0.7 * step_means(head, batch, k, distilled))
    return total / sum(decay**k for k in range(steps))


def test_eagle_1s_objective_equals_the_formula(target: Target) -> None:
    head = make("eagle1", target)
    check_objective(head, target, Eagle1Objective(chunk_tokens=7), lambda batch: written_out(head, target, batch, 1, 0, 1.0))


def test_hasss_objective_equals_the_formula(target: Target) -> None:
    head = make("eagle1", target)
    objective = HassObjective(steps=3, topk=5, topk_weight=0.7, step_decay=0.9, chunk_tokens=7)
    check_objective(head, target, objective, lambda batch: written_out(head, target, batch, 3, 5, 0.9))
    assert (HassObjective().steps, HassObjective().topk, HassObjective().step_decay) == (3, 10, 1.0)


def test_noise_is_for_training_only_and_shrinks_with_the_sequence(target: Target) -> None:
    document = torch.zeros(2, 64, dtype=torch.int64)
    document[1, 32:] = -1
    noise = noisy(torch.zeros(2, 64, 400), document, 0.2)
    for row, length in ((0, 64), (1, 32)):
        most = 0.1 * 512 / length
        assert 0.999 * most < noise[row].max() <= most and -most <= noise[row].min() < -0.999 * most
        assert noise[row].std() == pytest.approx(most / 3**0.5, rel=0.02)
    head, batch = make("eagle1", target), whole(torch.tensor(PROMPTS[:1]))
    target.set_taps(head.taps)

    def value(training: bool, noise: float = 0.2) -> float:
        return Eagle1Objective(feature_noise=noise)(head.train(training), head, target, batch)[0].item()

    quiet, loud, silent = [value(False), value(False)], [value(True), value(True)], value(True, 0.0)
    assert quiet[0] == quiet[1] == silent and len({*quiet, *loud}) == 3


def test_a_padded_batch_without_a_place_to_judge_has_no_loss(target: Target) -> None:
    head, batch = make("eagle1", target), whole(torch.tensor(PROMPTS[:1]))
    batch.loss_BT[:] = False
    target.set_taps(head.taps)
    assert HassObjective()(head, head, target, batch)[0].item() == 0.0


def test_folder_round_trip(target: Target, tmp_path: Path) -> None:
    check_folder(make("eagle1", target), target, tmp_path)


def test_wrong_input_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match=r"drafter\.taps: wanted null"):
        new_head("eagle1", target, {"taps": [1, 2]})
    with pytest.raises(UserError, match=r"objective\.steps: wanted null, as the objective eagle1 has no such setting"):
        Eagle1Objective.of({"steps": 3})
    biased = tiny_target()
    biased.lm_head.bias = torch.nn.Parameter(torch.zeros(97))
    with pytest.raises(UserError, match="output layer has no bias"):
        new_head("eagle1", biased, {})


def test_a_whole_vocabulary_needs_no_copy_of_the_output_layer(target: Target) -> None:
    head = make("eagle1", target, 97)
    assert head.output_rows() is target.lm_head.weight
    params = SamplingParams(temperature=1.0, seed=1)
    assert Engine(target, head.proposer(**TREE)).generate(PROMPTS, params, 12).tokens == Engine(target).generate(PROMPTS, params, 12).tokens
