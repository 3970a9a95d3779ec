"""Checkpoints that lack weights, tied ones too, are refused by name instead of being filled with random numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.heads.registry import load_drafter, new_head, save_drafter
from draftsmith.recipes.schema import TargetRef
from safetensors.torch import load_file, save_file

from .tiny import tiny_target


def test_a_target_whose_output_layer_is_neither_there_nor_tied_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(TargetRef().location, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert settings["tie_word_embeddings"] is True
    Target.load(str(folder))
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}), encoding="utf-8")
    with pytest.raises(UserError, match=r"wanted all weights in its checkpoint, got none of lm_head\.weight; if they are tied to others"):
        Target.load(str(folder))


@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_that_lacks_weights_is_refused(tied: bool, tmp_path: Path) -> None:
    target = tiny_target()
    head = new_head("mlp_speculator", target, {"tie_weights": tied})
    save_drafter(head, tmp_path / "d", {"target": {"name": "tiny", "fingerprint": target.fingerprint()}})
    load_drafter(tmp_path / "d", target)
    file = tmp_path / "d" / "model.safetensors"
    tensors = load_file(file)
    last = "lm_heads.0.weight" if tied else "lm_heads.3.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != last}, file)
    with pytest.raises(UserError, match=rf"wanted all tensors of its config\.json, got none of {last.replace('.', '[.]')}"):
        load_drafter(tmp_path / "d", target)
