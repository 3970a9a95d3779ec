"""The engine as it runs on a GPU: captured rounds equal uncaptured ones, no round waits for the host, bfloat16 parts at near-ties only, memory is as
planned. Without a GPU the same rounds run uncaptured on the CPU, so that the tests stay true; what only a GPU can show is skipped.

    python -m pytest tests/gpu            DRAFTSMITH_GPU_TESTS=cpu: as if there were no GPU
"""

from __future__ import annotations

import os
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from ..decode.sizes import SIZES

CUDA = torch.cuda.is_available() and os.environ.get("DRAFTSMITH_GPU_TESTS") != "cpu"
DEVICE = torch.device("cuda" if CUDA else "cpu")
gpu_only = pytest.mark.skipif(not CUDA, reason="compares a GPU with the CPU: needs a CUDA GPU")

PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11], [12, 80, 6, 6, 6, 19, 21, 20, 50, 51, 52, 53]]
NEW = 60 if CUDA else 16


def tiny(seed: int, dtype: torch.dtype = torch.float64, **sizes: Any) -> Target:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | sizes)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model.to(DEVICE), None, "tiny")


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
USED = KINDS if CUDA else {"penalised": KINDS["penalised"]}  # tests/decode/test_overlap.py has the others on the CPU


def params(kind: str, first: int = 0) -> list[SamplingParams]:
    return [SamplingParams(seed=first + row, **KINDS[kind]) for row in range(len(PROMPTS))]


@pytest.mark.parametrize("kind", USED)
@pytest.mark.parametrize("name", PROPOSERS)
def test_captured_rounds_equal_uncaptured_ones(name: str, kind: str) -> None:
    """Over several requests, of which the later ones replay the first one's graphs."""
    target = tiny(0)
    plain, captured = Engine(target, PROPOSERS[name](target), overlap=False), Engine(target, PROPOSERS[name](target), overlap=None if CUDA else True)
    assert captured.overlap
    for first, prompts in ((0, PROMPTS), (50, PROMPTS[::-1]), (90, PROMPTS[:1])):
        settings = params(kind, first)[: len(prompts)]
        want = plain.generate(prompts, settings, NEW, eos_ids=[6])
        out = captured.generate(prompts, settings, NEW, eos_ids=[6])
        assert (out.tokens, out.rounds, out.finish) == (want.tokens, want.rounds, want.finish)
    assert captured._kept is not None
    stages = [piece for stage in captured._kept._rounds.values() for piece in stage._pieces.values()]
    assert stages and all((piece._graph is not None) == CUDA for piece in stages)


@pytest.fixture
def errors_on_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run, seen = _Stages.run, [0]

    def watched(stages: _Stages, clock: Any) -> Tensor:
        seen[0] += 1
        if not CUDA:
            return run(stages, clock)
        torch.cuda.set_sync_debug_mode("error" if seen[0] > 2 else "default")  # the first round is not captured, the second is
        try:
            return run(stages, clock)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(_Stages, "run", watched)
    yield
    assert seen[0] > (10 if CUDA else 3)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.usefixtures("errors_on_waiting")
def test_no_round_waits_for_the_device(name: str) -> None:
    """On the CPU tests/decode/test_overlap.py watches what would wait."""
    target = tiny(0)
    Engine(target, PROPOSERS[name](target), overlap=True).generate(PROMPTS, params("penalised"), NEW)


@gpu_only
def test_the_noise_is_the_one_of_the_cpu() -> None:
    seed, position = torch.tensor([3, 2**40 + 1]), torch.tensor([[0, 7, 1000], [5, 6, 131071]])
    assert torch.equal(gumbel_noise(seed.cuda(), position.cuda(), 5001).cpu(), gumbel_noise(seed, position, 5001))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_quickstart_target_is_lossless(dtype: str) -> None:
    """Identical in float32; where bfloat16 parts, the two candidates are closer than its kernels' own rounding, and the report lists by how much."""
    target = Target.load(TargetRef().location, dtype=dtype, device=DEVICE.type)
    proposer = early_exit(target, range(4)).proposer(tree="dynamic", depth=3, topk=3, nodes=10)
    count, tokens = (8, 64) if CUDA else (2, 8)
    settings = Settings(max_new_tokens=tokens, bootstrap=50, eager=False)
    rows = evaluate(target, proposer, load_suite("stdlib", count, split="test"), settings).rows
    assert all(row.lossless.status == "pass" for row in rows)
    ties = [tie for row in rows for tie in row.lossless.ties]
    assert all(tie.gap <= tie.bound for tie in ties)
    assert sum(row.lossless.checked - row.lossless.identical for row in rows) == len({(tie.prompt, tie.position) for tie in ties}) or CUDA
    if dtype == "float32":
        assert all(row.lossless.identical == row.lossless.checked for row in rows)


def test_greedy_decoding_is_transformers_own() -> None:
    target = Target.load(TargetRef().location, dtype="float32", device=DEVICE.type)
    prompts = [list(range(20, 50)), list(range(300, 340))]
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        want = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert Engine(target).generate([prompt], SamplingParams(), NEW).tokens[0] == want[0, len(prompt) :].tolist()


class Allocated(TorchDispatchMode):
    """The most bytes that were alive at once of what operations inside made: what a GPU's allocator would hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                self.alive[StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]  # equal for the same storage
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def test_what_is_allocated_is_what_was_planned() -> None:
    """To 5 %, where the cache is most of it, as it is wherever memory is short."""
    batch, prompt, new = (64, 64, 1900) if CUDA else (16, 16, 40)
    sizes = {"max_position_embeddings": 4096, "num_key_value_heads": 4, "num_hidden_layers": 24 if CUDA else 8}
    target = tiny(0, torch.float32, **sizes)
    prompts, capacity = [list(range(20, 20 + prompt))] * batch, prompt + new + 2
    planned = plan(target, None, batch, capacity, prompt=prompt, settings=[SamplingParams()]).total
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        Engine(target, overlap=False).generate(prompts, SamplingParams(), new)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with Allocated() as allocated:
            Engine(target, overlap=False).generate(prompts, SamplingParams(), new)
        peak = allocated.peak
    assert abs(planned / peak - 1) <= 0.05, (planned, peak)
