"""DSpark's confidence: calibrated by measured decoding, kept in the contract, and what decides how much of a chain is verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.length import Expected, Latencies
from draftsmith.decode.prompts import eos_ids
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.eval.drafting import LEAST_CONFIDENCE, make_proposer
from draftsmith.heads.dspark import Calibration, DSpark, DSparkProposer
from draftsmith.heads.registry import load_drafter, save_drafter
from draftsmith.recipes.schema import Decode
from draftsmith.train.calibration import calibrate, calibration_error, fit, measured_pairs
from draftsmith.train.objectives.dspark import DSparkObjective

from ..heads.parallel import PROMPTS, make, over_fit
from ..heads.tiny import random_ids, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: Target) -> DSpark:
    """One that knows a text, so that its drafts are accepted in part."""
    head = make("dspark", target, draft_vocab_size=97, noise=0.0, num_layers=1, markov_rank=8)
    over_fit(target, head, DSparkObjective(anchors=16, step_decay=1.0), steps=40, lr=6e-3)
    assert isinstance(head, DSpark)
    return head


def prompts(count: int = 6) -> list[list[int]]:
    """Beginnings of what the head has learnt, and other texts."""
    return [random_ids(1, 6, seed=5)[0].tolist() if n % 3 == 0 else random_ids(1, 5, seed=n)[0].tolist() for n in range(count)]


def test_the_fit_finds_the_scale_and_shift_behind_the_pairs() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(20000, generator=generator, dtype=torch.float64)
    accepted = (torch.rand(20000, generator=generator, dtype=torch.float64) < (0.5 * logits - 1).sigmoid()).double()
    scale, shift = fit(logits, accepted)
    assert scale == pytest.approx(0.5, abs=0.03) and shift == pytest.approx(-1, abs=0.06)  # over 3 standard errors
    # At the best place the gradient, prior included, is zero.
    p = (scale * logits + shift).sigmoid() - accepted
    assert abs(float((p * logits).sum()) + scale - 1) < 1e-6 and abs(float(p.sum()) + shift) < 1e-6
    for ones in (0.0, 1.0):  # pairs of one kind, or none, leave it finite
        assert all(abs(value) < 20 for value in fit(logits[:50], torch.full((50,), ones, dtype=torch.float64)))
    assert fit(logits[:0], accepted[:0]) == (1.0, 0.0)


def test_the_calibration_error_is_the_mean_gap_over_bins() -> None:
    p = torch.tensor([0.05, 0.09, 0.31, 0.39, 1.0], dtype=torch.float64)
    accepted = torch.tensor([0.0, 1, 0, 1, 1], dtype=torch.float64)
    assert calibration_error(p, accepted) == pytest.approx((abs(0.14 - 1) + abs(0.70 - 1) + 0) / 5)


def test_confidence_is_calibrated_by_what_decoding_accepts(target: Target, head: DSpark, tmp_path: Path) -> None:
    pairs = measured_pairs(head, target, prompts(), 1.0, 24)
    # Counted once more from the rounds of the same decoding: every accepted token is a 1, and every rejection a 0.
    ones = zeros = 0
    for index, prompt in enumerate(prompts()):
        engine = Engine(target, head.proposer(depth=head.longest), overlap=False)
        for entry in engine.generate([prompt], SamplingParams(temperature=1.0, seed=index), 24, eos_ids=eos_ids(target.model)).rounds[0]:
            if entry.emitted > entry.accepted:
                ones, zeros = ones + entry.accepted, zeros + (entry.accepted < entry.proposed)
    assert (int(pairs[1].sum()), len(pairs[1])) == (ones, ones + zeros) and ones > 10 < zeros
    notes = calibrate(head, target, prompts(), 24)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        scale, shift = notes[name]
        logit, accepted = (torch.cat(p) for p in zip(*(measured_pairs(head, target, prompts()[i::2], temperature, 24) for i in (0, 1)), strict=True))
        assert calibration_error((scale * logit + shift).sigmoid(), accepted) <= calibration_error(logit.sigmoid(), accepted) + 0.02
        assert (scale * logit + shift).sigmoid().mean() == pytest.approx(float(accepted.mean()), abs=0.03)  # a fitted shift makes the mean right
        assert notes["error"][name]["pairs"] == len(logit)
    # Kept in the contract, read when the drafter is loaded, and used.
    contract = {"target": {"name": "tiny", "fingerprint": target.fingerprint()}, "calibration": notes}
    save_drafter(head, tmp_path / "d", contract)
    loaded, _ = load_drafter(tmp_path / "d", target)
    assert isinstance(loaded, DSpark) and loaded.calibration == head.calibration == Calibration.of(notes)
    contract["calibration"] = {"greedy": [1.0]}
    save_drafter(head, tmp_path / "d", contract)
    with pytest.raises(UserError, match="wanted calibration with scale and shift"):
        load_drafter(tmp_path / "d", target)


def test_rows_are_read_as_greedy_or_sampled() -> None:
    table = Calibration(greedy=(2.0, 1.0), sampled=(0.5, -1.0))
    got = table.apply(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([True, False]))
    assert got.tolist() == [[3.0, 5.0], [-0.5, 0.0]]


def test_a_chain_is_verified_as_far_as_it_pays() -> None:
    latencies = Latencies(level=0.5, verify=((1, 4.0), (2, 5.0), (8, 11.0)))  # 1 ms a token

    def best(rows: list[list[float]]) -> int:
        """As long as tokens a millisecond rise."""
        rates = [(len(rows) + sum(sum(row[:d]) for row in rows)) / (4 * 0.5 + 4 + d) for d in range(1, 5)]
        return next((d for d in range(1, 4) if rates[d] <= rates[d - 1]), 4)

    policy, lengths = Expected(latencies), set()
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        paths = torch.rand(1 + seed % 3, 4, generator=generator, dtype=torch.float64).sqrt().cumprod(1).tolist()
        assert policy.choose(paths) == best(paths)
        lengths.add(best(paths))
    assert lengths == {1, 2, 3, 4}
    assert policy.choose([[0.0, 0.0]]) == 1 and policy.choose([[1.0] * 6]) == 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", ["confidence", "expected"])
def test_confidence_drives_verification_and_stays_lossless(target: Target, head: DSpark, length: str, temperature: float) -> None:
    head.calibration = Calibration()
    decode = Decode(tree="chain", depth=6, length=length)  # type: ignore[arg-type]
    proposer = make_proposer(head, decode, target, prompts(1)[0])
    assert isinstance(proposer, DSparkProposer) and not proposer.asynchronous
    assert proposer.min_confidence == (LEAST_CONFIDENCE if length == "confidence" else None)
    assert (proposer.expected is not None) == (length == "expected")
    if length == "expected":
        proposer.expected = Expected(Latencies(level=0.0, verify=((1, 2.0), (2, 2.6), (8, 6.2))))  # measured ones would differ from run to run
    params = [SamplingParams(temperature=temperature, seed=n) for n in range(len(PROMPTS))]
    out = Engine(target, proposer).generate(PROMPTS, params, 16)
    assert out.tokens == Engine(target).generate(PROMPTS, params, 16).tokens
    proposed = {entry.proposed for rounds in out.rounds for entry in rounds}
    known = Engine(target, proposer).generate([prompts(1)[0]], SamplingParams(temperature=1.0, seed=3), 40)
    assert len(proposed | {entry.proposed for entry in known.rounds[0]}) > 1  # longer where it is surer


def test_expected_wants_a_confidence_head(target: Target) -> None:
    medusa = make("p_eagle", target)
    with pytest.raises(UserError, match=r"decode\.length: wanted a drafter with a confidence head \(dspark\) for expected, got p_eagle"):
        make_proposer(medusa, Decode(tree="chain", depth=4, length="expected"), target, [5, 6, 7])
