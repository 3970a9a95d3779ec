"""Packed rows: every sequence once, none knows of its neighbours, and training is that of the same sequences unpacked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from draftsmith.heads.registry import new_head
from draftsmith.train.data import collate, collate_packed
from draftsmith.train.objectives import OBJECTIVES
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.dflash import sample_anchors
from draftsmith.train.stream import SequenceStream, Share, packed
from draftsmith.train.templates import Sample

from ..heads.tiny import random_ids, tiny_target

LENGTHS = [23, 9, 14, 5, 17, 3]
ROWS = [[0, 3], [4, 1, 5], [2]]
TOLERANCE = 1e-5  # float32: sums in another order


def sequences(lengths: list[int]) -> list[Sample]:
    """With a prompt, and a gap where a user speaks again."""
    found = []
    for seed, length in enumerate(lengths):
        ids = random_ids(1, length, seed)[0].tolist()
        found.append(Sample(ids, [(2, length)] if length < 12 else [(3, 8), (10, length)]))
    return found


@pytest.mark.parametrize("normaliser", ["per_sequence", "per_token"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [("eagle3", {"steps": 3}), ("medusa", {}), ("eagle1", {"feature_noise": 0.0}), ("dflash", {"anchors": 40}), ("p_eagle", {"anchors": 40})],
)
def test_packed_training_is_unpacked_training(method: str, settings: dict[str, Any], normaliser: str) -> None:
    """Loss and gradients of the same sequences; anchors of block drafters are all that there are."""
    target, samples = tiny_target(), sequences(LENGTHS)
    head = new_head(method, target, {"mask_token_id": 0} if method in ("dflash", "p_eagle") else {})
    objective = OBJECTIVES[method].of({**settings, "normaliser": normaliser, "chunk_tokens": 16})
    target.set_taps(head.taps)

    def loss_and_gradients(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        head.zero_grad()
        loss, _ = objective(head, head, target, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}

    want, want_gradients = loss_and_gradients(collate(samples))
    got, gradients = loss_and_gradients(collate_packed([[samples[i] for i in row] for row in ROWS]))
    assert want > 0.1 and gradients.keys() == want_gradients.keys() and gradients
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, want_gradients[name], atol=TOLERANCE, rtol=TOLERANCE)


def test_features_of_packed_sequences_are_their_own() -> None:
    target, samples = tiny_target(), sequences(LENGTHS)
    batch, alone = collate_packed([[samples[i] for i in ROWS[1]]]), [collate([samples[i]]) for i in ROWS[1]]
    together = target.features(batch.ids_BT, batch.position_BT, batch.document_BT).hidden_BNH[0]
    apart = [target.features(one.ids_BT, one.position_BT, one.document_BT).hidden_BNH[0] for one in alone]
    torch.testing.assert_close(together, torch.cat(apart), atol=TOLERANCE, rtol=TOLERANCE)
    assert batch.position_BT[0].tolist() == [*range(17), *range(9), *range(3)]


def test_every_sequence_of_a_packed_row_has_its_anchors() -> None:
    samples = sequences(LENGTHS)
    batch = collate_packed([[samples[i] for i in row] for row in ROWS])
    anchors, valid = sample_anchors(batch, 2)
    for row, anchored in enumerate(batch.document_BT.gather(1, anchors)):
        found = anchored[valid[row]].tolist()
        assert sorted(found) == [number for number, index in enumerate(ROWS[row]) for _ in range(min(2, samples[index].learned))]
        assert (anchors[row, valid[row]].diff() > 0).all()


def test_packing_uses_every_sequence_once_and_little_room() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 60) for _ in range(500)] + [130]
    rows = packed(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(501))
    assert [row for row in rows if sum(lengths[i] for i in row) > 100] == [[500]]  # longer than a row: by itself
    assert len(rows) - 1 <= sum(lengths[:-1]) / 100 * 1.02 + 1  # within 2 % of what cannot be less
    assert packed(lengths, 100) == rows


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_other_batchings_are_streams_like_the_first(batching: Any) -> None:
    """Once an epoch, another order in each, the same for any number of processes, and less padding."""
    generator = random.Random(1)
    samples = sequences([generator.randint(4, 60) for _ in range(100)])

    def stream(process: int = 0, processes: int = 1) -> SequenceStream:
        share = Share(batch_size=4, micro=2, process=process, processes=processes)
        return SequenceStream(samples, share, 0, batching=batching, length=64)

    one, two = stream(), [stream(0, 2), stream(1, 2)]
    steps = len(one.rows) // 4
    epochs = []
    for _ in range(2):
        seen: list[int] = []
        for _ in range(steps):
            batches = next(one)
            seen += [row for batch in batches for row in batch.sequence_B or []]
            for batch, other in zip(batches, [b for s in two for b in next(s)], strict=True):
                assert batch.sequence_B == other.sequence_B and torch.equal(batch.ids_BT, other.ids_BT)
        assert len(set(seen)) == len(seen) == steps * 4
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    shuffled = SequenceStream(samples, Share(batch_size=4, micro=2), 0)
    assert one.padding() < shuffled.padding() / 3
    places = [batch for _ in range(steps) for batch in next(fresh)] if (fresh := stream()) else []
    padding = sum(int((batch.document_BT < 0).sum()) for batch in places) / sum(batch.ids_BT.numel() for batch in places)
    assert one.padding() == pytest.approx(padding)
