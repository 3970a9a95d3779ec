"""vLLM's layout: conformance, and the round trip gives the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.heads.export import vllm
from draftsmith.recipes.schema import TargetRef
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetRef().location)


@pytest.mark.parametrize("draft_vocab", [600, 2048])
def test_round_trip_gives_the_same_drafts(target: Target, draft_vocab: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = Eagle3(Eagle3Config.for_target(target, draft_vocab_size=draft_vocab)).bind(target).eval()
    head.set_draft_vocabulary(torch.randperm(2048)[:draft_vocab], target)
    vllm.export(head, {}, tmp_path / "out", 5)
    assert ("d2t" in load_file(tmp_path / "out" / "model.safetensors")) == (draft_vocab < 2048)  # vLLM refuses it for the whole vocabulary
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]  # k
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]  # k - 1, for SGLang
    back = vllm.read(tmp_path / "out").bind(target)
    ids, position = torch.arange(20, 40)[None], torch.arange(20)[None]
    target.set_taps(back.config.taps)
    taps = target.features(ids, position, torch.zeros_like(ids)).taps_BNF
    assert taps is not None
    with torch.no_grad():
        ours = head.logits(head(taps, ids, position, torch.zeros_like(ids), 2)[1])
        theirs = back.logits(back(taps, ids, position, torch.zeros_like(ids), 2)[1])
    assert torch.equal(ours, theirs) and torch.equal(head.draft_ids, back.draft_ids)


def test_planted_faults_are_refused(target: Target, tmp_path: Path) -> None:
    head = Eagle3(Eagle3Config.for_target(target, draft_vocab_size=600))
    head.set_draft_vocabulary(torch.arange(600) * 3)
    head.d2t += torch.arange(600)  # absolute ids in place of offsets
    with pytest.raises(UserError, match="offsets"):
        vllm.export(head, {}, tmp_path / "out", 5)
    assert not (tmp_path / "out").exists()
    head.set_draft_vocabulary(torch.arange(600) * 3)
    vllm.export(head, {}, tmp_path / "out", 5)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match="hidden_norm"):
        vllm.read(tmp_path / "out")
    with pytest.raises(UserError, match="taps >= 1"):
        vllm.vllm_config(Eagle3Config.for_target(target, taps=[0, 2]))
