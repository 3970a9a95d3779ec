"""The engine's benchmark: every promised key, figures that agree with each other, one line of error for bad input. No speed is asserted."""

from __future__ import annotations

import json

import pytest
from draftsmith.eval import engine_bench

KEYS = {"t_ar_ms", "t_verify_ms", "t_draft_ms", "overhead_ms", "tau", "speedup", "efficiency", "ratios", "tokens_per_second", "hardware"}


def test_it_prints_a_table_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = engine_bench.main(["--num-prompts", "2", "--max-new-tokens", "12", "--depth", "2", "--repeats", "2"])
    out = capsys.readouterr().out
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0 and result.keys() >= KEYS and "chain_vs_assisted" in out
    assert list(result["t_verify_ms"]) == ["1", "2", "4", "8", "16", "32", "64"] and all(ms > 0 for ms in result["t_verify_ms"].values())
    assert set(result["ratios"]) == {"plain_vs_generate", "chain_vs_assisted", "lookup_vs_prompt_lookup"}
    assert all(ratio["lo"] <= ratio["value"] <= ratio["hi"] for ratio in result["ratios"].values())
    speed = result["tokens_per_second"]
    assert result["ratios"]["chain_vs_assisted"]["value"] == pytest.approx(speed["chain"] / speed["assisted"], rel=1e-2)
    assert 1 <= result["tau"] <= 3 and 0 < result["efficiency"] < 1.5


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_bench.main(["--num-prompts", "0"]) == 2
    assert engine_bench.main(["--drafter", "prompt_lookup"]) == 2
    assert engine_bench.main(["--drafter", "no/such/folder"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert [line for line in errors if line.startswith("error: ")] == [
        "error: --num-prompts: wanted at least 1, got 0",
        "error: --drafter: wanted a causal LM, which transformers can use too, got a prompt_lookup drafter",
        next(line for line in errors if line.startswith("error: drafter no/such/folder: wanted a drafter's folder")),
    ]
