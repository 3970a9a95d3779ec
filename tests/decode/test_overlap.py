"""Rounds that start before the host has read the last one: the same tokens and rounds, no waiting, and everything stays where a graph expects it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine, Generation, _Stages
from draftsmith.decode.free import Hybrid, PromptLookup
from draftsmith.decode.length import Additive
from draftsmith.decode.proposer import DeviceProposer, Proposer
from draftsmith.decode.replay import Replay, bucket
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.heads.standalone import Standalone
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from .sizes import SIZES

PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11], [12, 80, 6, 6, 6, 19, 21, 20, 50, 51, 52, 53]]
NEW = 33


def tiny(seed: int, family: str = "llama") -> Target:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES) if family == "llama" else Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=["sliding_attention"] * 4)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model, None, family)


def head(target: Target) -> Eagle3:
    torch.manual_seed(5)
    made = Eagle3(Eagle3Config.for_target(target, taps=[1, 2, 3], draft_vocab_size=60)).double().bind(target)
    made.set_draft_vocabulary(torch.randperm(97)[:60], target)
    return made.eval()


PROPOSERS: dict[str, Callable[[Target], Proposer | None]] = {
    "none": lambda target: None,
    "chain": lambda target: Standalone(tiny(0)).bind(target).proposer(depth=3),
    "tree": lambda target: Standalone(tiny(1)).bind(target).proposer(tree="dynamic", depth=3, topk=3, nodes=10),
    "windows": lambda target: Standalone(tiny(1, "gemma3")).bind(target).proposer(tree="dynamic", depth=2, topk=2, nodes=4),
    "eagle3": lambda target: head(target).proposer(depth=4),
    "eagle3-tree": lambda target: head(target).proposer(tree="dynamic", depth=3, topk=2, nodes=7),
    "hybrid": lambda target: Hybrid(head(target).proposer(depth=2), Standalone(tiny(0)).bind(target).proposer(depth=3), 4),
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


def params(kind: str, first: int = 0) -> list[SamplingParams]:
    return [SamplingParams(seed=first + row, **KINDS[kind]) for row in range(len(PROMPTS))]


def parts(out: Generation) -> Any:
    return out.tokens, out.rounds, out.finish


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_the_same_is_generated_by_the_same_rounds(name: str, kind: str) -> None:
    """Over several requests of one engine, which use the same tensors again."""
    target = tiny(0)
    plain, ahead = Engine(target, PROPOSERS[name](target), overlap=False), Engine(target, PROPOSERS[name](target), overlap=True)
    for first, prompts in ((0, PROMPTS), (50, PROMPTS[::-1]), (90, PROMPTS[:1])):
        settings = params(kind, first)[: len(prompts)]
        want = plain.generate(prompts, settings, NEW, eos_ids=[6, 21])
        assert parts(ahead.generate(prompts, settings, NEW, eos_ids=[6, 21])) == parts(want)
        assert max(map(len, want.rounds)) > 1


@pytest.mark.parametrize("rule", ["token_wise", "target_sampling"])
def test_rules_that_draw_on_their_own_draw_the_same(rule: str) -> None:
    target = tiny(0)

    def out(overlap: bool) -> Any:
        proposer = Standalone(tiny(1)).bind(target).proposer(depth=3, kind="iid" if rule == "token_wise" else "deterministic")
        return parts(Engine(target, proposer, rule=rule, overlap=overlap).generate(PROMPTS, params("sampled"), NEW))

    assert out(True) == out(False)


def test_rows_without_speculation_and_streaming() -> None:
    target = tiny(0)
    heard: dict[bool, list[tuple[int, list[int], int]]] = {True: [], False: []}
    for overlap, told in heard.items():
        engine = Engine(target, PROPOSERS["tree"](target), overlap=overlap)
        engine.generate(PROMPTS, params("sampled"), NEW, speculate=[True, False, True, False], on_tokens=lambda *new, told=told: told.append(new))
    assert heard[True] == heard[False]


@pytest.mark.parametrize("name", PROPOSERS)
def test_no_round_reads_the_device_or_moves_what_it_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(0)
    engine = Engine(target, PROPOSERS[name](target), overlap=True)
    run, pointers, reading = _Stages.run, [], []

    def watched(stages: _Stages, clock: Any) -> Tensor:
        session = engine._kept
        assert session is not None
        kept = [session.root_B, session.length_B, session.live_B, session.sampler.seed_B, session.sampler._counts_BV, *target.tensors()]
        kept += engine.proposer.tensors() if isinstance(engine.proposer, DeviceProposer) else []
        kept += [] if session.window._noise_BPV is None else [session.window._noise_BPV, session.window._first_B]
        pointers.append([tensor.data_ptr() for tensor in kept])
        reading.append(True)
        report = run(stages, clock)
        reading.pop()
        return report

    monkeypatch.setattr(_Stages, "run", watched)
    for method in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy", "cpu"):
        original = getattr(Tensor, method)

        def guarded(self: Tensor, *arguments: Any, original: Any = original, method: str = method, **options: Any) -> Any:
            assert not reading, f"{method} inside a round"
            return original(self, *arguments, **options)

        monkeypatch.setattr(Tensor, method, guarded)
    for first in (0, 70):
        engine.generate(PROMPTS, params("penalised", first), NEW)
    assert len(pointers) > 10 and all(p == pointers[0] for p in pointers)


def test_shapes_change_at_powers_of_two_only() -> None:
    assert [bucket(n) for n in (1, 256, 257, 512, 1025)] == [256, 256, 512, 512, 2048]
    target = tiny(0)
    engine = Engine(target, PROPOSERS["chain"](target), overlap=True)
    engine.generate(PROMPTS, params("greedy"), 60)
    assert engine._kept is not None and list(engine._kept._rounds) == [256]


def test_a_piece_runs_every_time_where_nothing_is_captured() -> None:
    calls: list[int] = []
    piece = Replay(lambda: calls.append(1), capture=False)
    for _ in range(3):
        piece()
    assert len(calls) == 3


def test_proposers_that_wait_are_refused() -> None:
    target = tiny(0)
    waiting = Standalone(tiny(1)).bind(target).proposer(depth=3)
    waiting.length = Additive()
    for proposer in (PromptLookup(3), waiting, Hybrid(PromptLookup(3), head(target).proposer(depth=2))):
        assert not Engine(target, proposer).overlap
        with pytest.raises(UserError, match="overlap: wanted a proposer that never waits for the device"):
            Engine(target, proposer, overlap=True)
