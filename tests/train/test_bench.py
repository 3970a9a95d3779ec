"""The training benchmark: its figures on tiny sizes, the bounds it exists for, and flags it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from draftsmith.heads.registry import METHODS
from draftsmith.train import bench
from draftsmith.train.objectives import OBJECTIVES

SIZES = {"seq": 24, "hidden": 16, "vocab": 97, "draft-vocab": 40, "heads": 2, "intermediate": 24, "repeats": 2}
TINY = ["--device", "cpu", *(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))]


def figures(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, float | str]:
    assert bench.main([*TINY, *flags]) == 0
    out: dict[str, float | str] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_line_has_the_figures_and_the_settings(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    out = figures(capsys, "--steps", "3", "--dtype", dtype)
    assert {"method", "seq", "batch", "hidden", "vocab", "draft_vocab", "steps", "dtype", "threads", "repeats", "intermediate"} <= set(out)
    assert out["dtype"] == dtype and out["steps"] == 3 and out["kv_heads"] == 1
    for name in ("tokens_per_s", "tokens_per_s_median", "tokens_per_cpu_s", "peak_rss_gib", "last_loss"):
        assert float(out[name]) > 0
    assert float(out["tokens_per_s"]) >= float(out["tokens_per_s_median"])
    assert 0 <= float(out["peak_rss_above_bare_gib"]) < float(out["peak_rss_gib"])


def test_the_drafter_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    """In float32, thirty steps on one batch; the loss named is the one that falls."""
    losses = [float(figures(capsys, "--loss", "kl", "--warmup", str(n))["last_loss"]) for n in (0, 30)]
    assert losses[1] < 0.99 * losses[0]


def test_choices_that_are_given_are_those_of_the_first_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    given, formed = (figures(capsys, *flags)["last_loss"] for flags in ([], ["--first-epoch"]))
    assert given == formed


def test_nearly_all_places_are_judged() -> None:
    """Else it would measure places that carry no loss: a random target's choices lie in the draft vocabulary as seldom as its size says."""
    torch.manual_seed(0)
    target = bench.RandomTarget(hidden=64, vocab=2000, intermediate=64, heads=2, kv_heads=1, dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.randint(0, 300, (2, 200))
    step = bench.features(target, ids, 3)
    assert step.taps_BNF is not None and step.taps_BNF.shape == (2, 200, 3 * 64)
    assert float((target.logits(step.hidden_BNH).argmax(-1) < 300).float().mean()) > 0.95


def test_sizes_that_are_not_given_have_the_proportions_of_an_8b_model() -> None:
    options = bench.parse(["--hidden", "4096"])
    assert (options.intermediate, options.heads, options.kv_heads, options.draft_vocab) == (14336, 32, 8, options.vocab)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--seq", "0"], "--seq: wanted at least 1, got 0"),
        (["--repeats", "0"], "--repeats: wanted at least 1, got 0"),
        (["--heads", "3"], "--heads: wanted a divisor of --hidden 16, got 3"),
        (["--heads", "4", "--kv-heads", "3"], "num_kv_heads 3"),
        (["--draft-vocab", "98"], "draft_vocab_size: wanted 1 .. 97"),
        (["--loss", "l2"], "objective.loss: wanted one of ce"),
        (["--dtype", "int8"], "--dtype"),
        (["--method", "none"], "--method"),
        (["--seq", "x"], "--seq"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_flags_exit_with_2_and_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert bench.main([*TINY, *flags]) == 2
    out = capsys.readouterr()
    assert out.out == "" and len(out.err.splitlines()) == 1 and out.err.startswith("error: ") and said in out.err


@pytest.mark.parametrize("method", sorted(set(METHODS) & set(OBJECTIVES) - {"draft_model"}))
def test_every_method_with_an_objective_runs(capsys: pytest.CaptureFixture[str], method: str) -> None:
    assert figures(capsys, "--method", method, "--seq", "40")["method"] == method
