"""The memory budget: what it plans against what is then held, the refusal and its advice, and how free memory is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode import budget
from draftsmith.decode.budget import Budget, host_bytes, plan
from draftsmith.decode.cache import TreeCache
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import NoiseWindow, Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.heads.recurrent import RecurrentProposer
from draftsmith.heads.standalone import Standalone, StandaloneProposer, early_exit
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

from .sizes import SIZES

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, wide heads": lambda: LlamaConfig(**{**SIZES, "head_dim": 24, "num_key_value_heads": 1}),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt2": lambda: GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=128, eos_token_id=1, bos_token_id=2, pad_token_id=0),
}
PROMPTS = [[5, 9, 33, 2, 71, 8, 15], [7], [44, 3, 3, 18, 90]]
PROMPT, CAPACITY = 7, 60  # the longest prompt of PROMPTS; slots of a row in plans
GREEDY = SamplingParams()
MEBIBYTE = 2**20


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(FAMILIES[family]()).to(dtype), None, family)


def held(cache: TreeCache | None) -> int:
    return 0 if cache is None else sum(store.nbytes for store in (cache._shared, *cache._odd.values()) if store is not None)


def drafter(kind: str, target: Target, **how: Any) -> RecurrentProposer | StandaloneProposer:
    if kind == "eagle3":
        return Eagle3(Eagle3Config.for_target(target, draft_vocab_size=50)).to(target.dtype).bind(target).proposer(**how)
    draft = early_exit(target, [0, 3]) if kind == "early exit" else Standalone(tiny("gpt2", target.dtype)).bind(target)
    return draft.proposer(**how)


def plan_of(engine: Engine, batch: int, new_tokens: int, **more: Any) -> Budget:
    """The plan for PROMPTS' length, with the capacity that the engine asks for."""
    proposer = engine.proposer
    nodes, depth = (proposer.num_nodes, proposer.max_depth) if proposer else (1, 0)
    return plan(engine.target, proposer, batch, PROMPT + new_tokens + nodes + depth + 1, prompt=PROMPT, **more)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets how many bytes there seem to be; no plan is too small to be compared with them."""

    def set_to(count: int | None) -> None:
        monkeypatch.setattr(budget, "NEGLIGIBLE", 0)
        monkeypatch.setattr(budget, "available_bytes", lambda device, fresh=False: count)

    return set_to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_cache_is_the_one_that_is_made(family: str, dtype: torch.dtype) -> None:
    engine = Engine(tiny(family, dtype))
    planned = plan_of(engine, 3, 20).parts["target cache"]
    engine.generate(PROMPTS, GREEDY, 20)
    assert planned == held(engine.target._cache) > 0


def test_layers_of_different_shapes_are_counted_as_the_cache_stores_them() -> None:
    """The first layer's shape for all of them, and another tensor for each layer that differs."""
    target = tiny("llama")
    target.layers[1] = tiny("llama, wide heads").layers[1]
    cache = TreeCache(4, 3, CAPACITY)
    cache.place(torch.zeros(3, 1, dtype=torch.int64), 1, 0)
    for index, (heads, width) in enumerate([(2, 8), (1, 24), (2, 8), (2, 8)]):
        cache.update(torch.zeros(3, heads, 1, width), torch.zeros(3, heads, 1, width), index)
    assert plan(target, None, 3, CAPACITY, prompt=PROMPT).parts["target cache"] == held(cache)


@pytest.mark.parametrize("how", [{"depth": 3}, {"tree": "dynamic", "depth": 3, "topk": 3, "nodes": 9}], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["eagle3", "draft model", "early exit"])
def test_the_planned_drafter_cache_is_the_one_that_is_made(kind: str, how: dict[str, Any]) -> None:
    target = tiny("llama")
    proposer = drafter(kind, target, **how)
    engine = Engine(target, proposer)
    parts = plan_of(engine, 3, 20).parts
    engine.generate(PROMPTS, GREEDY, 20)
    if isinstance(proposer, RecurrentProposer):
        made = sum(tensor.nbytes for tensor in (proposer._keys, proposer._values, proposer._cos, proposer._sin))
    else:
        made = held(proposer.draft._cache)
    assert parts["drafter cache"] == made > 0
    assert parts["target cache"] == held(target._cache)
    again = plan_of(engine, 3, 20).parts
    assert again["drafter cache"] == again["target cache"] == 0  # what is held already is not counted


def test_a_cache_that_is_replaced_counts_by_its_growth() -> None:
    engine = Engine(tiny("llama"))
    whole = {new: plan_of(engine, 3, new).parts["target cache"] for new in (10, 20, 30)}
    engine.generate(PROMPTS, GREEDY, 20)
    assert {new: plan_of(engine, 3, new).parts["target cache"] for new in whole} == {10: 0, 20: 0, 30: whole[30] - whole[20]}
    engine.target.allocate(3, 64)  # made, but never written: nothing is held
    assert plan_of(engine, 3, 20).parts["target cache"] == _bytes(engine.target, 3, 64)


def _bytes(target: Target, batch: int, capacity: int) -> int:
    return int(4 * 2 * batch * 2 * capacity * 8 * target.dtype.itemsize)  # layers, keys and values, rows, kv heads, slots, width


@pytest.mark.parametrize("kind", ["none", "eagle3", "draft model"])
def test_too_little_memory_is_a_user_error_and_nothing_is_allocated(kind: str, free: Callable[[int | None], None]) -> None:
    target = tiny("llama")
    engine = Engine(target, None if kind == "none" else drafter(kind, target))
    wanted = plan_of(engine, 3, 100, settings=[GREEDY])
    available = wanted.total - 1
    free(available)
    with pytest.raises(UserError) as caught:
        engine.generate(PROMPTS, GREEDY, 100)
    message = str(caught.value)
    assert "\n" not in message
    assert f"wanted at most {available / MEBIBYTE:.2f} MiB more, got {wanted.total / MEBIBYTE:.2f} MiB" in message
    assert f"target cache {wanted.parts['target cache'] / MEBIBYTE:.2f} MiB" in message
    assert ("fewer draft nodes" in message) == (kind != "none")
    assert target._cache is None
    free(wanted.total)
    engine.generate(PROMPTS, GREEDY, 100)


def test_the_advice_fits_and_one_more_does_not(free: Callable[[int | None], None]) -> None:
    engine = Engine(tiny("llama"))
    free(plan_of(engine, 8, 50, settings=[GREEDY]).total)
    with pytest.raises(UserError, match="use a batch of at most") as caught:
        engine.generate([PROMPTS[0]] * 12, GREEDY, 100)
    numbers = re.search(r"a batch of at most (\d+) or max_new_tokens of at most (\d+)$", str(caught.value))
    assert numbers is not None
    rows, tokens = map(int, numbers.groups())
    assert 1 <= rows < 12 and 1 <= tokens < 100
    for batch, new_tokens in ((rows + 1, 100), (12, tokens + 1)):
        with pytest.raises(UserError, match="memory: wanted"):
            engine.generate([PROMPTS[0]] * batch, GREEDY, new_tokens)
    for batch, new_tokens in ((rows, 100), (12, tokens)):
        fresh = Engine(tiny("llama"))
        assert len(fresh.generate([PROMPTS[0]] * batch, GREEDY, new_tokens).tokens) == batch


def test_where_nothing_fits_the_advice_names_no_number(free: Callable[[int | None], None]) -> None:
    free(10)
    with pytest.raises(UserError, match=r"use shorter prompts or a smaller target$"):
        Engine(tiny("llama")).generate(PROMPTS, GREEDY, 20)


def test_without_knowledge_or_for_small_plans_there_is_no_check(free: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    free(None)
    Engine(tiny("llama")).generate(PROMPTS, GREEDY, 20)
    monkeypatch.undo()
    monkeypatch.setattr(budget, "available_bytes", lambda *_, **__: pytest.fail("the system was asked"))
    Engine(tiny("llama")).generate(PROMPTS, GREEDY, 20)
    assert budget.NEGLIGIBLE == 64 * MEBIBYTE


def test_sampling_and_trees_take_more() -> None:
    target = tiny("llama")
    engine = Engine(target, drafter("eagle3", target, tree="dynamic", depth=3, topk=3, nodes=12))
    sampled, filtered = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)
    penalised = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0)
    settings = ([GREEDY], [GREEDY, filtered], [penalised])
    totals = [plan_of(engine, 8, 100, settings=some).total for some in settings]
    assert totals == sorted(set(totals))
    window = NoiseWindow(Sampler([sampled] * 3, "cpu"), target.vocab_size)
    noise = window.at([4, 5, 6], 4)
    assert noise is not None and window._noise_BPV is not None
    assert plan_of(engine, 3, 20, settings=[sampled]).parts["noise"] == window._noise_BPV.nbytes
    assert "noise" not in plan_of(engine, 3, 20, settings=[GREEDY]).parts


def test_memory_that_was_freed_within_the_second_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5, 2**40])
    monkeypatch.setattr(budget, "NEGLIGIBLE", 0)
    monkeypatch.setattr(budget, "_reading", None)
    monkeypatch.setattr(budget, "host_bytes", lambda: next(readings))
    assert budget.available_bytes(torch.device("cpu")) == budget.available_bytes(torch.device("cpu")) == 5  # asked once
    Engine(tiny("llama")).generate(PROMPTS, GREEDY, 20)  # refused by the old reading, so there is a new one


def test_on_cuda_what_torch_has_reserved_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 120)
    assert budget.available_bytes(torch.device("cuda")) == 1180
    assert budget.available_bytes(torch.device("meta")) is None


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal:       2000 kB\nMemFree:         10 kB\nMemAvailable:   1000 kB\nHugePages_Total:       0\n"
GIVEN = 1000 * 1024


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 2000 kB\n"}, None),
        ({"proc/meminfo": MEMINFO}, GIVEN),
        # version 2: no limit, the group's own limit, a roomy one, page cache that can be dropped, an outer group's limit, over the limit
        ({"cgroup/memory.max": "max\n", "cgroup/memory.current": "5\n"}, GIVEN),
        ({"cgroup/memory.max": "9000\n", "cgroup/memory.current": "2500\n"}, 6500),
        ({"cgroup/memory.max": "900000000\n", "cgroup/memory.current": "2500\n"}, GIVEN),
        ({"cgroup/memory.max": "9000\n", "cgroup/memory.current": "2500\n", "cgroup/memory.stat": "anon 1\ninactive_file 700\n"}, 7200),
        (
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "cgroup/outer/memory.max": "9000\n",
                "cgroup/outer/memory.current": "2500\n",
                "cgroup/outer/inner/memory.max": "max\n",
                "cgroup/outer/inner/memory.current": "100\n",
            },
            6500,
        ),
        ({"cgroup/memory.max": "9000\n", "cgroup/memory.current": "9100\n"}, 0),
        # version 1: no limit, the root's, and the process's own group
        ({"cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "cgroup/memory/memory.usage_in_bytes": "5\n"}, GIVEN),
        ({"cgroup/memory/memory.limit_in_bytes": "8000\n", "cgroup/memory/memory.usage_in_bytes": "5\n"}, 7995),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
                "cgroup/memory/job/memory.limit_in_bytes": "8000\n",
                "cgroup/memory/job/memory.usage_in_bytes": "1000\n",
                "cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            7050,
        ),
    ],
)
def test_free_host_memory_is_read_from_the_kernel_and_the_control_groups(tmp_path: Path, files: dict[str, str], want: int | None) -> None:
    default = {} if not files or "proc/meminfo" in files else {"proc/meminfo": MEMINFO}
    write(tmp_path, {**default, **files})
    assert host_bytes(tmp_path / "proc", tmp_path / "cgroup") == want
