"""The engine on a GPU: captured rounds equal uncaptured ones, no round waits for the host, and the noise is the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from draftsmith.decode.budget import plan
from draftsmith.decode.engine import Engine, _Stages
from draftsmith.decode.proposer import Proposer
from draftsmith.decode.sampling import SamplingParams, gumbel_noise
from draftsmith.decode.target import Target
from draftsmith.eval.harness import evaluate
from draftsmith.eval.runs import Settings
from draftsmith.eval.suites import load_suite
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.heads.standalone import Standalone, early_exit
from draftsmith.recipes.schema import TargetRef
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ..decode.sizes import SIZES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11], [12, 80, 6, 6, 6, 19, 21, 20, 50, 51, 52, 53]]
NEW = 60


def tiny(seed: int, dtype: torch.dtype = torch.float64) -> Target:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model.cuda(), None, "tiny")


def head(target: Target) -> Eagle3:
    torch.manual_seed(5)
    made = Eagle3(Eagle3Config.for_target(target, taps=[1, 2, 3], draft_vocab_size=60)).to(target.device, target.dtype).bind(target)
    made.set_draft_vocabulary(torch.randperm(97)[:60], target)
    return made.eval()


PROPOSERS: dict[str, Callable[[Target], Proposer | None]] = {
    "none": lambda target: None,
    "chain": lambda target: Standalone(tiny(0)).bind(target).proposer(depth=3),
    "tree": lambda target: Standalone(tiny(1)).bind(target).proposer(tree="dynamic", depth=3, topk=3, nodes=10),
    "eagle3": lambda target: head(target).proposer(depth=4),
    "eagle3-tree": lambda target: head(target).proposer(tree="dynamic", depth=3, topk=2, nodes=7),
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


def params(kind: str, first: int = 0) -> list[SamplingParams]:
    return [SamplingParams(seed=first + row, **KINDS[kind]) for row in range(len(PROMPTS))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_captured_rounds_equal_uncaptured_ones(name: str, kind: str) -> None:
    """Over several requests, of which the later ones replay the first one's graphs."""
    target = tiny(0)
    plain, captured = Engine(target, PROPOSERS[name](target), overlap=False), Engine(target, PROPOSERS[name](target))
    assert captured.overlap
    for first, prompts in ((0, PROMPTS), (50, PROMPTS[::-1]), (90, PROMPTS[:1])):
        settings = params(kind, first)[: len(prompts)]
        want = plain.generate(prompts, settings, NEW, eos_ids=[6])
        out = captured.generate(prompts, settings, NEW, eos_ids=[6])
        assert (out.tokens, out.rounds, out.finish) == (want.tokens, want.rounds, want.finish)
    assert captured._kept is not None
    stages = [piece for stage in captured._kept._rounds.values() for piece in stage._pieces.values()]
    assert stages and all(piece._graph is not None for piece in stages)


@pytest.fixture
def errors_on_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run, seen = _Stages.run, [0]

    def watched(stages: _Stages, clock: Any) -> Tensor:
        seen[0] += 1
        torch.cuda.set_sync_debug_mode("error" if seen[0] > 2 else "default")  # the first round is not captured, the second is
        try:
            return run(stages, clock)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(_Stages, "run", watched)
    yield
    assert seen[0] > 10


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.usefixtures("errors_on_waiting")
def test_no_round_waits_for_the_device(name: str) -> None:
    target = tiny(0)
    Engine(target, PROPOSERS[name](target)).generate(PROMPTS, params("penalised"), NEW)


def test_the_noise_is_the_one_of_the_cpu() -> None:
    seed, position = torch.tensor([3, 2**40 + 1]), torch.tensor([[0, 7, 1000], [5, 6, 131071]])
    assert torch.equal(gumbel_noise(seed.cuda(), position.cuda(), 5001).cpu(), gumbel_noise(seed, position, 5001))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_quickstart_target_is_lossless(dtype: str) -> None:
    """Identical in float32; where bfloat16 parts, the two candidates are closer than its kernels' own rounding."""
    target = Target.load(TargetRef().location, dtype=dtype, device="cuda")
    proposer = early_exit(target, range(4)).proposer(tree="dynamic", depth=3, topk=3, nodes=10)
    rows = evaluate(target, proposer, load_suite("stdlib", 8, split="test"), Settings(max_new_tokens=64, bootstrap=50, eager=False)).rows
    assert all(row.lossless.status == "pass" for row in rows)
    if dtype == "float32":
        assert all(row.lossless.identical == row.lossless.checked for row in rows)


def test_greedy_decoding_is_transformers_own() -> None:
    target = Target.load(TargetRef().location, dtype="float32", device="cuda")
    prompts = [list(range(20, 50)), list(range(300, 340))]
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        want = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert Engine(target).generate([prompt], SamplingParams(), 48).tokens[0] == want[0, len(prompt) :].tolist()


def test_what_is_allocated_is_what_was_planned() -> None:
    """The plan must never be below the peak, and not far above it where the cache is most of it."""
    target = Target.load(TargetRef().location, dtype="float32", device="cuda")
    prompts, new = [list(range(20, 60))] * 32, 300
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Engine(target, overlap=False).generate(prompts, SamplingParams(), new)
    peak = torch.cuda.max_memory_allocated() - before
    fresh = Target.load(TargetRef().location, dtype="float32", device="cuda")
    planned = plan(fresh, None, len(prompts), len(prompts[0]) + new + 2, prompt=len(prompts[0]), settings=[SamplingParams()]).total
    assert peak <= planned <= 1.5 * peak
