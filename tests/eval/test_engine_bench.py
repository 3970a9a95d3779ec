"""The engine's benchmark: every promised key, figures that agree with each other, one line of error for bad input. No speed is asserted."""

from __future__ import annotations

import json

import pytest
import torch
from draftsmith.eval import engine_bench

KEYS = {"t_ar_ms", "t_verify_ms", "t_draft_ms", "overhead_ms", "tau", "speedup", "efficiency", "ratios", "tokens_per_second", "hardware"}
KEYS |= {"bandwidth_gb_s", "floor_ms", "t_ar_over_floor"}


def test_it_prints_a_table_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = engine_bench.main(["--num-prompts", "2", "--max-new-tokens", "12", "--depth", "2", "--repeats", "2"])
    out = capsys.readouterr().out
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0 and result.keys() >= KEYS and "chain_vs_assisted" in out
    assert result["t_ar_over_floor"] == pytest.approx(result["t_ar_ms"] / result["floor_ms"], rel=0.01)
    assert result["floor_ms"] == pytest.approx(4 * 5_116_608 / result["bandwidth_gb_s"] / 1e6, rel=0.01)  # all weights in float32, tied embeddings
    assert list(result["t_verify_ms"]) == ["1", "2", "4", "8", "16", "32", "64"] and all(ms > 0 for ms in result["t_verify_ms"].values())
    assert set(result["ratios"]) == {"plain_vs_generate", "chain_vs_assisted", "lookup_vs_prompt_lookup"}
    assert all(ratio["lo"] <= ratio["value"] <= ratio["hi"] for ratio in result["ratios"].values())
    speed = result["tokens_per_second"]
    assert result["ratios"]["chain_vs_assisted"]["value"] == pytest.approx(speed["chain"] / speed["assisted"], rel=1e-2)
    assert 1 <= result["tau"] <= 3 and 0 < result["efficiency"] < 1.5


def test_a_random_shape_needs_no_download_and_has_the_same_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8}
    monkeypatch.setitem(engine_bench.SHAPES, "8b", tiny)
    monkeypatch.setattr(engine_bench, "RANDOM_VOCABULARY", 2000)
    flags = ["--random-shape", "8b", "--dtype", "bfloat16", "--device", "cpu", "--num-prompts", "1", "--max-new-tokens", "4"]
    assert engine_bench.main([*flags, "--depth", "2", "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result.keys() >= KEYS and result["target"] == "random-8b" and result["drafter"] == "random-8b, layers 0"
    assert result["hardware"]["dtype"] == "bfloat16" and not result["hardware"]["compile"]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_bench.main(["--num-prompts", "0"]) == 2
    assert engine_bench.main(["--drafter", "prompt_lookup"]) == 2
    assert engine_bench.main(["--drafter", "no/such/folder"]) == 2
    assert engine_bench.main(["--random-shape", "2b"]) == 2
    if not torch.cuda.is_available():
        assert engine_bench.main(["--random-shape", "8b", "--device", "cuda"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert "wanted cpu, as this machine has no CUDA" in errors.pop() or torch.cuda.is_available()
    assert "--random-shape: invalid choice: '2b'" in errors.pop()
    assert [line for line in errors if line.startswith("error: ")] == [
        "error: --num-prompts: wanted at least 1, got 0",
        "error: --drafter: wanted a causal LM, which transformers can use too, got a prompt_lookup drafter",
        next(line for line in errors if line.startswith("error: drafter no/such/folder: wanted a drafter's folder")),
    ]
