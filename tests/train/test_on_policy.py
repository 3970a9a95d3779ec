"""On-policy text: what the draft writes is the same for any number of processes, and a run goes on in the middle as it would have."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.registry import new_head
from draftsmith.train.objectives.draft_model import DraftModelObjective
from draftsmith.train.on_policy import OnPolicyStream, prompt_of
from draftsmith.train.stream import SequenceStream, Share
from draftsmith.train.templates import Sample

from ..heads.tiny import random_ids, tiny_target

SEQUENCES = [Sample(ids, [(3 + index % 3, 9)]) for index, ids in enumerate(random_ids(10, 9).tolist())]


class Writer:
    """A draft that becomes another every time it is asked for, as one in training does. Calls are counted."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls

    def __call__(self) -> Target:
        self.calls += 1
        return tiny_target(seed=self.calls)


def stream(writer: Writer, process: int = 0, processes: int = 1, **settings: Any) -> OnPolicyStream:
    share = Share(batch_size=4, micro=2, process=process, processes=processes)
    given = {"mixing": 0.5, "refresh": 4, "temperature": 1.0, "tokens": 5, "batch": 3, "eos": [1], "seed": 2, **settings}
    return OnPolicyStream(SequenceStream(SEQUENCES, share, 2), writer, SEQUENCES, share, **given)


def rows(batches: list[Any]) -> list[tuple[list[int], list[bool]]]:
    """Tokens of each row, and whether they are to be learned."""
    return [
        (ids[document >= 0].tolist(), loss[document >= 0].tolist())
        for batch in batches
        for ids, loss, document in zip(batch.ids_BT, batch.loss_BT, batch.document_BT, strict=True)
    ]


def test_the_draft_answers_the_prompts_of_its_share_of_the_steps() -> None:
    writer = Writer()
    one = stream(writer)
    base = SequenceStream(SEQUENCES, one.share, 2)
    prompts = {tuple(prompt_of(sample)) for sample in SEQUENCES}
    for step in range(8):
        batches = next(one)
        if step % 2 == 0:
            assert rows(batches) == rows(next(base)) and batches[0].sequence_B is not None
            continue
        assert batches[0].sequence_B is None  # its features are those of no sequence that comes again
        for number, (ids, loss) in enumerate(rows(batches)):
            prompt = ids[: loss.index(True)]
            assert tuple(prompt) in prompts and all(loss[len(prompt) :])
            params = SamplingParams(temperature=1.0, seed=(3 * 1_000_003 + step) * 65_537 + number)
            again = Engine(tiny_target(seed=1 + step // 4)).generate([prompt], params, 5, eos_ids=[1]).tokens[0]
            assert ids == prompt + again
    assert writer.calls == 2  # once for every four steps


@pytest.mark.parametrize("mixing", [0.25, 0.3, 1.0])
def test_the_share_of_steps_is_what_was_asked_for(mixing: float) -> None:
    one = stream(Writer(), mixing=mixing)
    assert sum(one.on_policy(step) for step in range(100)) == round(100 * mixing)
    assert [one.on_policy(step) for step in range(2)] == [mixing == 1.0] * 2  # it begins with what there is


def test_a_prompt_is_what_comes_before_the_last_answer() -> None:
    assert prompt_of(Sample([1, 2, 3, 4, 5, 6, 7], [(1, 2), (4, 6)])) == [1, 2, 3, 4]
    assert prompt_of(Sample([1, 2, 3, 4, 5, 6, 7, 8], [(0, 8)])) == [1, 2]  # a plain text, which is learned whole
    assert prompt_of(Sample([1, 2, 3, 4, 5, 6, 7, 8], [])) == [1, 2]


def test_two_processes_write_what_one_writes() -> None:
    want = [rows(next(one)) for one in [stream(Writer())] for _ in range(8)]
    parts: list[list[list[Sample]]] = [[], []]

    def note(process: int, mine: list[Sample]) -> list[Sample]:
        parts[process].append(mine)
        return mine * 2

    for process in range(2):  # what each writes, first
        alone = stream(Writer(), process, 2, gather=functools.partial(note, process))
        for _ in range(8):
            next(alone)
    for process in range(2):
        both = iter([first + second for first, second in zip(*parts, strict=True)])
        one = stream(Writer(), process, 2, gather=lambda _, both=both: next(both))
        for step in range(8):
            assert rows(next(one)) == want[step][2 * process : 2 * process + 2]


@pytest.mark.parametrize("done", [1, 2, 6])
def test_a_run_goes_on_in_the_middle(done: int) -> None:
    """Between two refreshes what is still to be used was written by a draft that is gone."""
    undisturbed = stream(Writer())
    steps = [rows(next(undisturbed)) for _ in range(9)]
    writer = Writer()
    first = stream(writer)
    for _ in range(done):
        next(first)
    kept = io.BytesIO()
    torch.save(first.state_dict(), kept)
    kept.seek(0)
    second = stream(Writer(writer.calls))
    second.load_state_dict(torch.load(kept, weights_only=True))
    assert [rows(next(second)) for _ in range(9 - done)] == steps[done:]


def test_training_goes_on_along_the_same_curve_in_the_middle() -> None:
    """Draft, adapters, optimizer and stream from what a checkpoint holds, between two refreshes: the same losses, to the last bit."""
    target = tiny_target()
    objective = DraftModelObjective()

    def start() -> tuple[DraftModel, torch.optim.Optimizer, OnPolicyStream]:
        torch.manual_seed(1)
        draft = new_head("draft_model", target, {"num_layers": 1})
        assert isinstance(draft, DraftModel)
        draft.adapt(rank=3)
        share = Share(batch_size=4)
        settings: dict[str, Any] = {"mixing": 0.5, "refresh": 6, "temperature": 1.0, "tokens": 5, "batch": 8, "eos": [1], "seed": 2}
        made = OnPolicyStream(SequenceStream(SEQUENCES, share, 2), draft.snapshot, SEQUENCES, share, **settings)
        return draft, torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-2), made

    def train(draft: DraftModel, optimizer: torch.optim.Optimizer, steps: OnPolicyStream, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            (batch,) = next(steps)
            loss, _metrics = objective(draft, draft, target, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return losses

    want = train(*start(), 14)
    first = start()
    got = train(*first, 8)  # the draft of step 6 has written for steps 7, 9 and 11
    kept = io.BytesIO()
    torch.save([part.state_dict() for part in first], kept)
    kept.seek(0)
    second, states = start(), torch.load(kept, weights_only=True)
    second[0].load_state_dict(states[0])
    second[1].load_state_dict(states[1])
    second[2].load_state_dict(states[2])
    assert got + train(*second, 6) == want and len(set(want)) == 14
