"""Rings: what they give is what the target would compute, in the stream's order, and never more of it than the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.train.objectives.common import Batch
from draftsmith.train.ring import Ring
from draftsmith.train.store import writing

from ..heads.tiny import random_ids, tiny_target, whole

TAPS = (1, 3)
TOKEN = 3 * 32 * 4  # bytes: two taps and the last hidden state


class Counting:
    """A stream of two micro-batches a step, of lengths that come again."""

    ahead = True

    def __init__(self) -> None:
        self.step = 0

    def __next__(self) -> list[Batch]:
        self.step += 1
        return [whole(random_ids(2, 5 + 3 * (self.step % 3), seed=10 * self.step + part)) for part in range(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def same(ring: Ring, target: Target, batches: list[Batch], want: list[Batch]) -> None:
    for got, plain in zip(batches, want, strict=True):
        assert torch.equal(got.ids_BT, plain.ids_BT)
        step, computed = ring.of(got), target.features(plain.ids_BT, plain.position_BT, plain.document_BT)
        assert step.taps_BNF is not None and computed.taps_BNF is not None
        assert torch.equal(step.hidden_BNH, computed.hidden_BNH) and torch.equal(step.taps_BNF, computed.taps_BNF)


@pytest.mark.parametrize("on", ["memory", "disk"])
def test_a_ring_gives_the_streams_steps_and_keeps_to_its_limit(tmp_path: Path, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, plain = tiny_target(), Counting()
    target.set_taps(TAPS)
    folder, limit = tmp_path if on == "disk" else None, 70 * TOKEN
    moves: list[str] = []
    monkeypatch.setattr(Target, "move_layers", lambda self, device: moves.append(str(device)))
    ring = Ring(Counting(), target, limit, folder)
    for number in range(1, 12):
        batches = next(ring)
        same(ring, target, batches, next(plain))
        assert ring.bytes <= limit and ring.state_dict() == {"step": number}
        assert len(list(tmp_path.glob("ring-*"))) == (len(ring._entries) * 2 if on == "disk" else 0)
    assert 2 * 3 <= len(moves) < 2 * 11  # several steps a turn
    ring.close()
    assert not list(tmp_path.glob("ring-*"))


def test_a_ring_goes_on_where_it_stood_and_holds_a_step_that_is_larger_than_it(tmp_path: Path) -> None:
    target = tiny_target()
    target.set_taps(TAPS)
    ring, plain = Ring(Counting(), target, 1), Counting()
    for _ in range(3):
        next(ring), next(plain)
    state = ring.state_dict()
    other = Ring(Counting(), target, 200 * TOKEN, tmp_path)
    next(other)
    other.load_state_dict(state)
    assert not list(tmp_path.glob("ring-*"))
    same(other, target, next(other), next(plain))
    other.close()


def test_a_folder_is_one_process_s_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "ring-00000003.safetensors").write_bytes(b"left")
    with writing(tmp_path), pytest.raises(UserError, match="no other process writes"):
        Ring(Counting(), tiny_target(), 1, tmp_path)
    ring = Ring(Counting(), tiny_target(), 1, tmp_path)
    assert not list(tmp_path.glob("ring-*"))
    ring.close()
    stream = Counting()
    stream.ahead = False
    with pytest.raises(UserError, match=r"features.source: wanted online, as the drafter takes part in making the data, got ring"):
        Ring(stream, tiny_target(), 1)


def test_layers_that_were_moved_away_and_back_compute_the_same() -> None:
    target, batch = tiny_target(), whole(random_ids(2, 9))
    target.set_taps(TAPS)
    before = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    target.move_layers(torch.device("meta"))  # nothing is left of them but their shapes
    assert {p.device.type for p in target.layers.parameters()} == {"meta"}
    assert target.logits(before.hidden_BNH).isfinite().all()
    fresh = tiny_target()
    fresh.set_taps(TAPS)
    fresh.move_layers(torch.device("cpu"))
    after = fresh.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    assert torch.equal(after.hidden_BNH, before.hidden_BNH)
