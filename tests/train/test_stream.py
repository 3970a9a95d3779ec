"""Streams: one global batch for any number of processes, every sequence once an epoch, and a state from which any number of processes goes on."""

from __future__ import annotations

import pytest
import torch
from draftsmith import UserError
from draftsmith.train.objectives.common import Batch
from draftsmith.train.stream import SequenceStream, Share, strata
from draftsmith.train.templates import Sample

SEQUENCES = [Sample(list(range(100 * i, 100 * i + 4 + i % 5)), [(2, 4 + i % 5)]) for i in range(27)]


def stream(process: int = 0, processes: int = 1, *, micro: int | None = 2, seed: int = 0) -> SequenceStream:
    return SequenceStream(SEQUENCES, Share(batch_size=8, micro=micro, process=process, processes=processes), seed)


def step(streams: list[SequenceStream]) -> list[list[int]]:
    """The sequences of a step's micro-batches, in the order of their numbers."""
    found: dict[int, list[int]] = {}
    for one in streams:
        for number, batch in zip(one.share.micro_batches, next(one), strict=True):
            assert batch.sequence_B is not None and [int(ids[0]) // 100 for ids in batch.ids_BT] == batch.sequence_B
            found[number] = batch.sequence_B
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("processes", [2, 4])
def test_a_step_is_the_same_whatever_the_number_of_processes(processes: int) -> None:
    """Micro-batch by micro-batch, and a process meets only its own sequences, so that what it keeps of them is of use."""
    one, many = [stream()], [stream(p, processes) for p in range(processes)]
    owner: dict[int, int] = {}
    for _ in range(12):  # four epochs of three batches
        want = step(one)
        assert len(want) == 4 and all(len(rows) == 2 for rows in want)
        assert step(many) == want
        for number, rows in enumerate(want):
            for index in rows:
                assert owner.setdefault(index, number * processes // 4) == number * processes // 4


def test_an_epoch_has_every_sequence_once_and_is_followed_by_another_order() -> None:
    epochs = [[index for _ in range(3) for rows in step([one]) for index in rows] for one in [stream()] for _ in range(6)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 24  # 27 sequences: three are left out
    assert len({tuple(epoch) for epoch in epochs}) == 6 and set().union(*epochs) == set(range(27))
    assert step([stream(seed=1)]) != step([stream()])
    assert strata(3, 8, 0, 0) == [[0, 1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("done", [1, 3, 5])
def test_another_number_of_processes_goes_on_where_a_state_was_taken(done: int) -> None:
    undisturbed, first = [stream()], [stream(p, 2) for p in range(2)]
    for _ in range(done):
        step(undisturbed), step(first)
    states = [one.state_dict() for one in first]
    assert states[0] == states[1]
    second = [stream(p, 4) for p in range(4)]
    for one in second:
        one.load_state_dict(states[0])
    assert [step(second) for _ in range(5)] == [step(undisturbed) for _ in range(5)]


def test_batches_mask_prompts_and_padding() -> None:
    def check(batch: Batch, whole: bool) -> None:
        length_B = (batch.document_BT == 0).sum(1)
        for row, length in enumerate(length_B.tolist()):
            assert batch.loss_BT[row].tolist() == [(whole or t >= 2) and t < length for t in range(batch.ids_BT.shape[1])]

    for whole in (False, True):
        for batch in next(SequenceStream(SEQUENCES, Share(batch_size=8, micro=4), 0, whole=whole)):
            check(batch, whole)
            assert torch.equal(batch.document_BT >= 0, batch.position_BT < (batch.document_BT == 0).sum(1, keepdim=True))


def test_what_cannot_be_shared_evenly_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.batch_size: wanted a multiple of 3 processes, got 8"):
        Share(batch_size=8, processes=3)
    with pytest.raises(UserError, match=r"wanted a multiple of 4 processes x micro batch 4, got 8"):
        Share(batch_size=8, micro=4, processes=4)
    with pytest.raises(UserError, match="data: wanted one sequence or more"):
        SequenceStream([], Share(batch_size=2), 0)
    with pytest.raises(UserError, match="data: wanted those that the run began with"):
        SequenceStream(SEQUENCES[:9], Share(batch_size=8), 0).load_state_dict(stream().state_dict())
