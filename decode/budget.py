"""What a generation will take, computed before anything is allocated: too large a request becomes one clear line, not an out-of-memory crash.

Bytes are counted that are not held yet: a cache that will be reused costs nothing, and one that will be replaced is freed first.

    total = caches + noise window + the largest of the passes, which follow each other (prefill, verification, making the noise)

Dims: B batch, T prompt, N nodes, L cache slots, H hidden, F tapped features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .. import UserError
from .proposer import Proposer
from .sampling import NOISE_BYTES, NOISE_POSITIONS, SamplingParams
from .target import PREFILL_CHUNK, Target

NEGLIGIBLE = 64 * 2**20  # plans below this are not compared with anything: asking the system would cost more than it tells
_FRESH_SECONDS = 1.0  # how long a reading of the host's free memory is good for
# Bytes for each of the [B, N, V] entries that are alive at once, counted along `Sampler` at its peak.
_LOGIT_BYTES, _WARPED_BYTES, _SORTED_BYTES, _PENALISED_BYTES, _DISTRIBUTION_BYTES = 8, 8, 28, 32, 32
_NOISE_MAKING_BYTES = 36  # a position and token; 33 were measured


@dataclass(frozen=True)
class Budget:
    """parts: {name: bytes to be allocated}. available: bytes that can be, None where the platform does not tell."""

    parts: dict[str, int]
    available: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.available is None or self.total <= self.available


def plan(
    target: Target,
    proposer: Proposer | None,
    batch: int,
    capacity: int,
    *,
    prompt: int,
    settings: Sequence[SamplingParams] = (),
    shared_noise: bool = True,
    overlap: bool = False,
) -> Budget:
    """The most that generating for `batch` rows of `capacity` slots takes, without what is available.

    prompt: tokens of the longest one. settings: how the rows are sampled. overlap: whether a round starts before the last one was read (noise is
    then made for both). The target's taps are those of the proposer. Nothing is allocated.
    """
    nodes, depth = (proposer.num_nodes, proposer.max_depth) if proposer else (1, 0)
    parts = {"target cache": cache_growth(target, batch, capacity)}
    memory: Callable[[int, int], int] | None = getattr(proposer, "memory", None)
    if memory is not None:
        parts["drafter cache"] = memory(batch, capacity)
    tapped = len(proposer.taps) if proposer else 0
    passes = {
        "prefill": _prefill_bytes(target, batch, prompt, tapped, drafts=memory is not None),
        "verification": pass_bytes(target, batch, nodes, capacity) + batch * nodes * target.vocab_size * _logit_bytes(settings, shared_noise),
    }
    if any(params.temperature > 0 for params in settings):
        positions = max((depth + 1) * (1 + overlap), min(NOISE_POSITIONS, NOISE_BYTES // (4 * target.vocab_size * batch)))
        parts["noise"] = 4 * batch * positions * target.vocab_size
        passes["making the noise"] = _NOISE_MAKING_BYTES * batch * positions * target.vocab_size
    largest = max(passes, key=lambda name: passes[name])
    parts[largest] = passes[largest]
    return Budget(parts)


def check(
    target: Target,
    proposer: Proposer | None,
    batch: int,
    capacity: int,
    *,
    prompt: int,
    max_new_tokens: int,
    settings: Sequence[SamplingParams],
    shared_noise: bool,
    overlap: bool = False,
) -> Budget:
    """The plan, with what is available if that was asked. Raises UserError if it does not fit; says what would."""

    def planned(rows: int, new_tokens: int) -> Budget:
        slots = capacity - max_new_tokens + new_tokens
        return plan(target, proposer, rows, slots, prompt=prompt, settings=settings, shared_noise=shared_noise, overlap=overlap)

    wanted = planned(batch, max_new_tokens)
    if wanted.total < NEGLIGIBLE:
        return wanted
    budget = Budget(wanted.parts, available_bytes(target.device))
    if not budget.fits:  # the reading may be a second old, and memory freed since
        budget = Budget(wanted.parts, available_bytes(target.device, fresh=True))
    if budget.available is None or budget.fits:
        return budget
    available = budget.available
    rows = _largest(batch - 1, lambda value: planned(value, max_new_tokens).total <= available)
    tokens = _largest(max_new_tokens - 1, lambda value: planned(batch, value).total <= available)
    raise UserError(_refusal(budget, rows, tokens, proposer is not None))


def _largest(top: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 .. top that fits, 0 if none does. What is larger takes more."""
    low = 0
    while low < top:
        middle = (low + top + 1) // 2
        low, top = (middle, top) if fits(middle) else (low, middle - 1)
    return low


def _refusal(budget: Budget, rows: int, tokens: int, drafting: bool) -> str:
    assert budget.available is not None
    biggest = sorted(budget.parts.items(), key=lambda part: -part[1])[:3]
    named = ", ".join(f"{name} {_size(count)}" for name, count in biggest if count)
    advice = [f"a batch of at most {rows}"] if rows else []
    advice += [f"max_new_tokens of at most {tokens}"] if tokens else []
    advice += ["fewer draft nodes"] if drafting else []
    advice = advice if rows or tokens else ["shorter prompts", *advice, "a smaller target"]
    return f"memory: wanted at most {_size(budget.available)} more, got {_size(budget.total)} ({named}); use {' or '.join(advice)}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


# -- what is needed ------------------------------------------------------------------------------------------------------------------------


def cache_growth(target: Target, batch: int, capacity: int) -> int:
    """Bytes that the model's cache will hold beyond what it holds now, once `Target.allocate(batch, capacity)` is followed by a forward pass."""
    cache = target._cache
    if cache is None:
        return _cache_bytes(target, batch, capacity)
    if cache.batch == batch and cache.capacity >= capacity:  # will be reused
        capacity = cache.capacity
    held = sum(store.nbytes for store in cache.tensors())
    return max(0, _cache_bytes(target, batch, capacity) - held)


def _cache_bytes(target: Target, batch: int, capacity: int) -> int:
    """A slot in the shared tensor for each layer, as wide as the first layer, and a tensor more for each layer of another shape."""
    shapes = layer_shapes(target)
    widths = [shapes[0]] * len(shapes) + [shape for shape in shapes if shape != shapes[0]]
    return int(sum(2 * batch * capacity * prod(shape) for shape in widths) * target.dtype.itemsize)


# They never change, and asking every layer for them at each request would be noticed with small targets.
_shapes: WeakKeyDictionary[Target, list[tuple[int, int]]] = WeakKeyDictionary()


def layer_shapes(target: Target) -> list[tuple[int, int]]:
    """(kv heads, head width) of each layer: by its own key projection if it has one (the configuration tells only one shape), or as configured."""
    if target in _shapes:
        return _shapes[target]
    config = target.config
    heads, width = int(config.num_attention_heads), _head_width(target)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        configured = (1, width)  # GPT-BigCode, Falcon
    else:
        configured = (int(getattr(config, "num_key_value_heads", None) or heads), width)
    shapes = []
    for layer in target.layers:
        attention: Any = getattr(layer, "self_attn", None)
        out, own = getattr(getattr(attention, "k_proj", None), "out_features", None), getattr(attention, "head_dim", None) or width
        shapes.append(configured if out is None else (int(out) // int(own), int(own)))
    _shapes[target] = shapes
    return shapes


def _head_width(target: Target) -> int:
    return int(getattr(target.config, "head_dim", None) or target.hidden_size // int(target.config.num_attention_heads))


def _prefill_bytes(target: Target, batch: int, prompt: int, tapped: int, *, drafts: bool) -> int:
    """The last chunk's pass, beside every position's features, which are joined from the chunks' (so they are there twice)."""
    size = int(target.dtype.itemsize)
    features = 2 * batch * prompt * target.hidden_size * (1 + tapped) * size
    drafter_mask = batch * prompt * prompt * (size + 2) if drafts else 0  # heads see the prompt in one pass, after the target
    return features + max(pass_bytes(target, batch, min(prompt, PREFILL_CHUNK), prompt), drafter_mask)


def pass_bytes(target: Target, batch: int, nodes: int, visible: int) -> int:
    """One pass over `nodes` tokens a row that see `visible` slots: masks of each kind, one layer's activations, its keys and values by query head."""
    size, config = int(target.dtype.itemsize), target.config
    masks = nodes * visible * (1 + len(target._windows) * (size + 1))
    inner: Any = getattr(config, "intermediate_size", None) or 4 * target.hidden_size
    inner = max(inner) if isinstance(inner, Sequence) else inner
    activations = nodes * (3 * int(inner) + 6 * target.hidden_size) * size
    heads, width = int(config.num_attention_heads), max(width for _, width in layer_shapes(target))
    repeated = 2 * heads * width * visible * size
    eager = getattr(config, "_attn_implementation", None) == "eager"
    weights = heads * nodes * visible * (2 * size + 4) if eager else 0  # fused attention never holds them
    return batch * (masks + activations + repeated + weights)


def _logit_bytes(settings: Sequence[SamplingParams], shared_noise: bool) -> int:
    """Bytes for each logit of the verification pass, from the model's output to the choice."""
    sampled = [params for params in settings if params.temperature > 0]
    count = _LOGIT_BYTES + _WARPED_BYTES * bool(sampled)
    count += _SORTED_BYTES * any(params.top_k or params.top_p < 1 for params in settings if sampled)
    penalised = (p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0 or p.logit_bias for p in settings)
    return count + _PENALISED_BYTES * any(penalised) + _DISTRIBUTION_BYTES * (not shared_noise)


# -- what there is -------------------------------------------------------------------------------------------------------------------------

_reading: tuple[float, int | None] | None = None  # when, and what, the host's free memory was last


def available_bytes(device: torch.device, *, fresh: bool = False) -> int | None:
    """Bytes that can be allocated on a device; None if unknown. fresh: ask the host again even if that was done within the last second."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type != "cpu":
        return None
    global _reading
    now = time.monotonic()
    if fresh or _reading is None or now - _reading[0] > _FRESH_SECONDS:
        _reading = (now, host_bytes())
    return _reading[1]


def host_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The kernel's MemAvailable, or what the process's control groups leave if that is less. None where there is no MemAvailable (not Linux)."""
    lines = [line.split() for line in _read(proc / "meminfo").splitlines()]
    available = [int(words[1]) * 1024 for words in lines if len(words) > 1 and words[0] == "MemAvailable:" and words[1].isdigit()]
    if not available:
        return None
    return min([available[0], *_group_bytes(proc, groups)])


def _group_bytes(proc: Path, groups: Path) -> list[int]:
    """What each control group that holds the process and has a limit leaves: limit - usage + page cache that is dropped under pressure."""
    left = []
    for line in ("0::/", "0:memory:/", *_read(proc / "self/cgroup").splitlines()):  # the roots are the process's own group in a container
        _, _, names_path = line.partition(":")
        names, _, path = names_path.partition(":")
        if not names:
            root, limit, usage, idle = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in names.split(","):
            root, limit, usage, idle = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
            if most.isdigit() and used.isdigit():  # no limit is "max" in v2, a number near 2^63 in v1
                left.append(max(0, int(most) - int(used) + _statistic(folder, idle)))
            if folder == root:
                break
    return left


def _statistic(folder: Path, name: str) -> int:
    lines = [line.split() for line in _read(folder / "memory.stat").splitlines()]
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == name and words[1].isdigit()), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
