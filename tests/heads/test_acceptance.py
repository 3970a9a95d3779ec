"""The predictor of acceptance: what it learns from, how it is calibrated, and how it decides a draft's length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.eval.drafting import make_proposer
from draftsmith.heads.acceptance import FILE, AcceptancePredictor
from draftsmith.heads.pard import Pard
from draftsmith.heads.standalone import Standalone
from draftsmith.recipes.schema import Decode
from draftsmith.train.acceptance import calibrate, calibration_error, overlaps, train_predictor
from draftsmith.train.templates import Sample

from .test_standalone import PROMPTS, tiny
from .tiny import random_ids


def drafter() -> tuple[Any, Standalone]:
    target, draft = tiny("llama"), tiny("llama", seed=1, num_hidden_layers=2)
    made = Standalone(draft).bind(target)
    torch.manual_seed(0)
    made.predictor = AcceptancePredictor(draft.hidden_size).double().requires_grad_(False)
    for parameter in made.predictor.parameters():
        parameter.add_(0.5 * torch.randn_like(parameter))
    made.predictor.shift.fill_(1.0)
    return target, made


@torch.no_grad()
def test_it_learns_from_the_overlap_of_both_distributions() -> None:
    target, made = drafter()
    samples = [Sample(ids, [(3, 12)]) for ids in random_ids(3, 12).tolist()]
    hidden, overlap = overlaps(made, target, samples)
    want = []
    for ids, _ in samples:
        p, q = (model.model(torch.tensor([ids])).logits[0, 2:-1].softmax(-1) for model in (target, made.draft))
        want.append(1 - (p - q).abs().sum(-1) / 2)
    torch.testing.assert_close(overlap.double(), torch.cat(want), atol=1e-6, rtol=1e-5)
    assert hidden.shape == (27, 32)


def test_the_calibration_error_is_the_mean_gap_of_ten_steps() -> None:
    predicted, so = torch.tensor([0.05, 0.02, 0.55, 0.58, 1.0]), torch.tensor([0.0, 0.2, 0.9, 0.7, 0.5])
    want = (abs(0.07 - 0.2) + abs(1.13 - 1.6) + 0.5) / 5
    assert calibration_error(predicted, so) == pytest.approx(want, abs=1e-6)


def test_a_predictor_that_is_too_sure_is_calibrated() -> None:
    """Logits three times too large and shifted: the line that undoes it is found, and the error goes to that of the finite sample."""
    torch.manual_seed(0)
    made = AcceptancePredictor(8).requires_grad_(False)
    hidden = torch.randn(4000, 8)
    logit = made.raw(hidden)
    truth = torch.bernoulli(((logit / logit.std() - 0.3) * 1.5).sigmoid())
    made.out.weight.mul_(3)
    before = calibration_error(made(hidden), truth)
    calibrate(made, hidden, truth)
    assert float(made.scale) == pytest.approx(1.5 / float(made.raw(hidden).std()), rel=0.15)
    assert calibration_error(made(hidden), truth) < 0.03 < before


def test_training_predicts_what_can_be_predicted() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(3000, 16)
    overlap = (2 * hidden[:, 0] - hidden[:, 1]).sigmoid()
    parts = [(hidden[a:b], overlap[a:b]) for a, b in ((0, 2000), (2000, 2500), (2500, 3000))]
    _, figures = train_predictor(*parts, steps=300)
    assert figures["correlation"] > 0.95 and figures["ece"] < 0.05
    assert figures["overlap"] == pytest.approx(float(overlap[2500:].mean()))


def test_a_chain_ends_where_its_tokens_are_not_likely_to_be_accepted_together() -> None:
    """By hand, from the draft's hidden states of the whole text."""
    target, made = drafter()
    proposer = make_proposer(made, Decode(depth=4, length="predicted", threshold=0.45), target, [0])
    out = Engine(target, proposer).generate([PROMPTS[0]], SamplingParams(), 24)
    text, at = [*PROMPTS[0], *out.tokens[0]], len(PROMPTS[0]) + 1
    assert made.predictor is not None
    for round_ in out.rounds[0]:
        drafts, likely = list[int](), 1.0
        while len(drafts) < 4 and likely >= 0.45:
            with torch.no_grad():
                hidden = made.draft.model.model(torch.tensor([[*text[:at], *drafts]])).last_hidden_state[0, -1]
                likely *= float(made.predictor(hidden))
                drafts.append(int(made.draft.logits(hidden).argmax()))
        assert round_.proposed == len(drafts)
        at += round_.emitted
    assert len({round_.proposed for round_ in out.rounds[0]}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_changes_no_token(temperature: float) -> None:
    target, made = drafter()
    params = [SamplingParams(temperature=temperature, seed=row) for row in range(len(PROMPTS))]
    proposer = make_proposer(made, Decode(depth=4, length="predicted", threshold=0.45), target, [0])
    assert Engine(target, proposer).generate(PROMPTS, params, 20).tokens == Engine(target).generate(PROMPTS, params, 20).tokens


def test_it_is_stored_beside_the_draft(tmp_path: Path) -> None:
    _, made = drafter()
    assert made.predictor is not None
    made.predictor.float().save(tmp_path)
    loaded = AcceptancePredictor.load(tmp_path, 32)
    hidden = torch.randn(5, 32)
    assert loaded is not None and torch.equal(loaded(hidden), made.predictor(hidden)) and [p.name for p in tmp_path.iterdir()] == [FILE]
    with pytest.raises(UserError, match="another model's"):
        AcceptancePredictor.load(tmp_path, 16)
    (tmp_path / FILE).write_bytes(b"x")
    with pytest.raises(UserError, match=r"predictor\.safetensors is damaged"):
        AcceptancePredictor.load(tmp_path, 32)
    (tmp_path / FILE).unlink()
    assert AcceptancePredictor.load(tmp_path, 32) is None


def test_a_drafter_without_a_predictor_cannot_be_asked() -> None:
    target, made = drafter()
    made.predictor = None
    for one in (made, Pard(made.draft, 3).bind(target)):
        with pytest.raises(UserError, match=r"decode\.length: wanted another rule, as this (draft_model|pard) drafter has no predictor"):
            make_proposer(one, Decode(depth=3, length="predicted"), target, [0])
    with pytest.raises(UserError, match=r"decode\.threshold: wanted null, as decode\.length is none of"):
        Decode(length="additive", threshold=0.5)
