"""A round against the roofline: bytes by shapes, figures that add up, one line of error for bad input. No speed is asserted."""

from __future__ import annotations

import json

import pytest
import torch
from draftsmith.eval import engine_bench, roofline
from draftsmith.eval.roofline import KINDS, kind_of, product_bytes, read_bandwidth, weight_bytes


def test_it_prints_a_table_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--tokens", "10", "--repeats", "1", "--depth", "2", "--bandwidth", "10"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["weights_mb"] == pytest.approx(4 * 5_116_608 / 1e6, rel=1e-3)  # float32, tied embeddings
    assert result["weights_floor_ms"] == pytest.approx(result["weights_mb"] / 10, rel=1e-3)
    for part in (result["plain"], result["round"]):
        assert sum(part["by_kind"].values()) == pytest.approx(1, abs=1e-3) and set(part["by_kind"]) == set(KINDS)
        assert sum(part["by_stage_ms"].values()) == pytest.approx(part["ms"], rel=1e-3)
        assert part["floor_ms"] == pytest.approx(part["matrices_mb"] / 10, rel=1e-2)
    # A plain step multiplies with every weight matrix once, and with little else; a round with the draft's besides.
    assert result["plain"]["matrices_mb"] == pytest.approx(result["weights_mb"], rel=0.05)
    assert result["round"]["matrices_mb"] > 1.2 * result["plain"]["matrices_mb"]
    assert result["plain"]["tokens_a_round"] == 1 < result["round"]["tokens_a_round"]
    assert result["plain"]["by_stage_ms"]["draft"] < 0.5 * result["round"]["by_stage_ms"]["draft"]  # two levels of a draft against no draft


def test_operations_are_told_apart_and_products_counted_by_their_matrix() -> None:
    names = ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::copy_", "aten::silu")
    assert tuple(map(kind_of, names)) == KINDS
    assert product_bytes([[3, 8], [8, 5], []], 4) == 160 and product_bytes([], 4) == 0


def test_bandwidth_is_of_this_machine() -> None:
    rate = read_bandwidth(torch.device("cpu"), torch.float32, size=2**22, repeats=2)
    assert 1e8 < rate < 1e14


def test_a_shape_counts_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8}
    monkeypatch.setitem(engine_bench.SHAPES, "8b", tiny)
    monkeypatch.setattr(engine_bench, "RANDOM_VOCABULARY", 500)
    target = engine_bench.random_target("8b", "bfloat16", "cpu")
    assert weight_bytes(target) == 2 * (sum(p.numel() for p in target.model.parameters()) - 500 * 64)  # of the embeddings one row is read


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (["--tokens", "2"], ["--bandwidth", "0"], ["--random-shape", "2b"], ["--drafter", "no/such/folder"])
    assert [roofline.main(flags) for flags in wrong] == [2] * 4
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4 and "--random-shape: wanted 1b or 8b, got 2b" in errors[2]
