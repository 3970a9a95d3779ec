"""What a recipe will take, before anything is loaded or written: tokens, disk, memory by part, time.

    draftsmith data plan RECIPE [key=value ...]                            for this machine
    draftsmith data plan RECIPE --config config.json --device h100         for a target of which only this file is at hand, and another machine

Models with a fact sheet (recipes/facts/: those of the recipes that come with draftsmith) need no file either, and no network.

The target is built without weights, and so is the drafter, whose parameters are counted, not estimated. What its activations take is measured on
copies of a fraction of its width, on short sequences, and extrapolated: they grow linearly with both. The rest is counted from shapes. Times are
from a model that is stated with them.

Dims: B sequences of a micro-batch, T tokens of a sequence, H hidden, V vocabulary, F target's features of a token.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .. import UserError
from ..decode.budget import Budget, available_bytes, cache_growth, pass_bytes
from ..decode.budget import plan as decoding_plan
from ..decode.proposer import Proposer
from ..decode.sampling import SamplingParams
from ..decode.target import Target, check_folder
from ..heads.head import Head
from ..recipes.schema import DrafterRecipe
from .features import check_source, layers_read, saved_form
from .judging import measures
from .objectives import OBJECTIVES
from .objectives.common import Objective
from .store import Saved, Store
from .weightless import Activations, PlannedTarget, measure_activations, places, planned_drafter, planned_target, trained_bytes

GIB = 2**30
TRAIN_SHARE, READ_SHARE = 0.4, 0.6  # of a device's peak: floating point operations while training, memory bandwidth while decoding
RESPONSE_BYTES_PER_TOKEN = 7  # of responses.jsonl: an id, a comma, a space
_LOGIT_COPIES = 4  # [C, V] float32 tensors that are alive at once in a chunk of the loss


@dataclass(frozen=True)
class Device:
    """memory: bytes. operations: a second, dense, in bfloat16 (float32: for a CPU). bandwidth: bytes a second of its memory."""

    name: str
    memory: int | None
    operations: float
    bandwidth: float


def _gpu(name: str, gib: float, tera: float, tera_bytes: float) -> Device:
    return Device(name, int(gib * GIB), tera * 1e12, tera_bytes * 1e12)


# Usable memory as CUDA reports it, and the makers' figures without sparsity.
DEVICES = {
    device.name: device
    for device in (
        _gpu("a100-40gb", 39.4, 312, 1.56),
        _gpu("a100", 79.2, 312, 2.04),
        _gpu("b200", 178, 2250, 8.0),
        _gpu("h100", 79.2, 989, 3.35),
        _gpu("h200", 139.8, 989, 4.8),
        _gpu("l4", 22.0, 121, 0.3),
        _gpu("l40s", 44.4, 362, 0.86),
        _gpu("rtx3090", 23.6, 71, 0.94),
        _gpu("rtx4090", 23.5, 165, 1.01),
        _gpu("rtx5090", 31.4, 210, 1.79),
    )
}
_CUDA_NAMES = {"H200": "h200", "H100": "h100", "A100": "a100", "B200": "b200", "L40S": "l40s", "L4": "l4", "4090": "rtx4090", "3090": "rtx3090"}
_CPU_CORE = Device("cpu core", None, 3e10, 8e9)  # of a server, in float32, sustained rather than peak


@dataclass
class Plan:
    """Bytes, seconds and counts. `refusals`: what does not fit, each with what would. `notes`: what the figures rest on."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    tokens: dict[str, Any]
    disk: dict[str, int]
    disk_wanted: int
    disk_free: int
    bytes_per_token: dict[str, int]
    memory: dict[str, int]
    phases: dict[str, int]
    available: int | None
    seconds: dict[str, float]
    device: str
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Bytes of the phase that takes most."""
        return max(self.phases.values())


@dataclass(frozen=True)
class _Draft:
    """What a plan of decoding asks of a proposer."""

    num_nodes: int
    max_depth: int
    taps: tuple[int, ...]


def make_plan(
    recipe: DrafterRecipe,
    objective: Objective,
    *,
    config: str | Path | None = None,
    device: str | None = None,
    processes: int = 1,
    sample_tokens: int | None = None,
    activations: bool = True,
) -> Plan:
    """The plan, with what does not fit in `refusals`.

    config: see `planned_target`. device: one of DEVICES; None: what this machine has. processes: each has a device of its own. sample_tokens: of a
    training sequence, on average; None: data.sequence_length, the most. activations: measure those of the drafter, which takes about a second.
    """
    check_source(recipe)
    hardware, available = _hardware(recipe, device)
    target = planned_target(recipe, config, "float32" if hardware.name == "cpu" else "bfloat16")
    drafter = planned_drafter(recipe, target)
    # An adapter cannot be put into a target without weights: its heads alone are measured, as if the target were frozen (a note says so).
    measured = OBJECTIVES[recipe.drafter.method].of({}) if objective.tunes_target else objective
    kept: Activations = measure_activations(recipe, measured, target, drafter) if activations else lambda rows, tokens: 0.0

    def planned(changed: DrafterRecipe) -> Plan:
        if changed.target.dtype != "auto":
            target.dtype = getattr(torch, changed.target.dtype)
        return _planned(changed, objective, target, drafter, hardware, available, processes, sample_tokens, kept)

    plan = planned(recipe)
    plan.refusals = _refusals(plan, recipe, planned)
    return plan


def _planned(
    recipe: DrafterRecipe,
    objective: Objective,
    target: PlannedTarget,
    drafter: Head,
    hardware: Device,
    available: int | None,
    processes: int,
    sample_tokens: int | None,
    activations: Activations,
) -> Plan:
    data, train, taps = recipe.data, recipe.train, tuple(drafter.taps)
    notes: list[str] = []
    if data.num_prompts is None:
        raise UserError("data.num_prompts: wanted a number, as all that the source holds cannot be planned, got null; set it")
    length = min(sample_tokens or data.sequence_length, data.sequence_length)
    rows = train.micro_batch_size or max(1, train.batch_size // processes)
    tokens = {
        "sequences": data.num_prompts,
        "tokens a sequence": length,
        "in the data": data.num_prompts * length,
        "trained on": train.steps * train.batch_size * length,
    }
    if sample_tokens is None:
        notes.append(f"tokens are at most these: every sequence is counted with data.sequence_length ({length}); --sample-tokens sets their mean")

    # Disk
    answers = tokens["in the data"] * RESPONSE_BYTES_PER_TOKEN if data.responses == "target" else 0
    saved = saved_form(recipe, objective, target, taps)
    hidden = dataclasses.replace(saved, layers=tuple(sorted({*taps, target.num_layers + 1})), topk=None)
    beside = {*taps, target.num_layers + 1} if objective.reads_hidden else {*taps}
    topk = dataclasses.replace(saved, layers=tuple(sorted(beside)), topk=min(recipe.features.topk, target.vocab_size))
    forms = {
        f"store, hidden states in {saved.dtype}": hidden,
        "store, hidden states in float8": dataclasses.replace(hidden, dtype="float8"),
        f"store, top-{topk.topk} logits, taps in {saved.dtype}": topk,
    }
    modes = {"online": 0, "ring": int(recipe.features.ring_gib * GIB) if recipe.features.ring_on == "disk" else 0}
    modes |= {name: form.bytes_per_token * tokens["in the data"] for name, form in forms.items()}
    trained = trained_bytes(drafter, recipe)
    kept = trained["drafter weights"] * (2 + len(recipe.export.formats))  # the best checkpoint, drafter/, exports
    kept += train.keep_last * (trained["drafter weights"] + trained["optimizer"])
    missing = 0 if _is_whole(recipe) else max(0, saved.bytes_per_token * tokens["in the data"] - _written(recipe))
    own = {"online": 0, "ring": modes["ring"], "store": missing}[recipe.features.source]
    disk = {"answers": answers, "checkpoints and drafter": kept, f"features ({recipe.features.source})": own}

    # Memory of a device
    weights = _weight_bytes(target.model, target.dtype)
    light = _weight_bytes(target.embeddings, target.dtype) + (0 if _tied(target) else _weight_bytes(target.lm_head, target.dtype))
    itemsize, features_size = target.dtype.itemsize, len(layers_read(recipe, objective, taps, target.num_layers)) * target.hidden_size
    chunk = min(objective.chunk_tokens, rows * length)
    draft_vocab = drafter.sizes.draft_vocab_size
    memory = {
        "target weights": light if recipe.features.source in ("store", "ring") else weights,
        **trained,
        "features of a micro-batch": rows * length * (features_size + (0 if target.num_layers + 1 in taps else target.hidden_size)) * itemsize,
        "target activations": 0 if recipe.features.source == "store" else pass_bytes(target, rows, length, length),
        "drafter activations": int(activations(rows, length)),
        "logit chunks": chunk * (draft_vocab * 4 * _LOGIT_COPIES + target.vocab_size * (itemsize + 4)),
    }
    keep = min(int(train.keep_features_gib * GIB), hidden.bytes_per_token * tokens["in the data"]) if recipe.features.source == "online" else 0
    if keep:
        memory["features kept"] = keep
    if recipe.features.source == "ring" and recipe.features.ring_on == "memory" and hardware.name == "cpu":
        memory["features kept"] = int(recipe.features.ring_gib * GIB)
    always = sum(trained.values()) - trained["gradients"] + memory.get("features kept", 0)
    step = memory["features of a micro-batch"] + max(memory["target activations"], memory["drafter activations"] + memory["logit chunks"])
    if recipe.features.source == "ring":  # the target's layers come to the device while the ring is filled, and go before it is emptied
        filling = weights + always + memory["features of a micro-batch"] + memory["target activations"]
        step = memory["features of a micro-batch"] + memory["drafter activations"] + memory["logit chunks"]
    phases = {"training": memory["target weights"] + always + trained["gradients"] + step}
    if recipe.features.source == "ring":
        phases["filling the ring"] = filling
    if measures(recipe):
        budget = _decoding(target, recipe, drafter, min(recipe.eval.dev_prompts, 64), recipe.eval.dev_tokens)
        memory["measured decoding"] = budget.total
        phases["measuring"] = weights + always + budget.total
    if data.responses == "target" and data.server is None and recipe.features.source != "store":
        most = cache_growth(target, data.generation_batch, data.sequence_length) + data.generation_batch * target.vocab_size * 16
        memory["answers' cache"] = most
        phases["answering"] = weights + most
    if recipe.adapter.rank is not None:
        notes.append("the adapter's parameters and the target's own activations (adapter.rank) are not counted")
    if recipe.drafter.method == "mtp" and recipe.drafter.init == "target":
        notes.append("the target's own MTP layer is counted as a new one of the target's sizes")
    if recipe.features.source == "ring" and recipe.features.ring_on == "memory" and hardware.name != "cpu":
        notes.append(f"the host's memory holds the ring and the target's layers: {size(recipe.features.ring_gib * GIB + weights - light)} a process")
    notes += _why_online(modes, saved, recipe)
    seconds, model = _seconds(recipe, objective, target, drafter, tokens, hardware, processes)
    return Plan(
        target={
            "name": recipe.target.path if target.name == recipe.target.location else target.name,
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "layers": target.num_layers,
            "hidden": target.hidden_size,
            "vocabulary": target.vocab_size,
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        drafter={
            "method": recipe.drafter.method,
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "trained": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
            "taps": list(taps),
        },
        tokens=tokens,
        disk=disk | {f"if {name}": count for name, count in modes.items()},
        disk_wanted=sum(disk.values()),
        disk_free=_free(recipe),
        bytes_per_token={name: form.bytes_per_token for name, form in forms.items()} | {"store of this recipe": saved.bytes_per_token},
        memory=memory,
        phases=phases,
        available=available,
        seconds=seconds,
        device=hardware.name if processes == 1 else f"{processes} x {hardware.name}",
        notes=[*notes, *model],
    )


def _hardware(recipe: DrafterRecipe, name: str | None) -> tuple[Device, int | None]:
    """(device, what it has left or, if it is not this machine's, all its memory)."""
    if name is not None:
        if name not in DEVICES:
            raise UserError(f"--device: wanted one of {', '.join(DEVICES)}, got {name}")
        return DEVICES[name], DEVICES[name].memory
    if recipe.target.device != "cpu" and torch.cuda.is_available():
        said = torch.cuda.get_device_name()
        known = next((DEVICES[ours] for part, ours in _CUDA_NAMES.items() if part in said), DEVICES["a100"])
        return dataclasses.replace(known, name=said), available_bytes(torch.device("cuda", torch.cuda.current_device()))
    cores = torch.get_num_threads()
    return Device("cpu", None, _CPU_CORE.operations * cores, _CPU_CORE.bandwidth * cores), available_bytes(torch.device("cpu"))


def _weight_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    return sum(p.numel() for p in module.parameters()) * dtype.itemsize


def _tied(target: Target) -> bool:
    return target.lm_head.weight is target.embeddings.weight


def _decoding(target: Target, recipe: DrafterRecipe, drafter: Head, batch: int, new_tokens: int) -> Budget:
    """Measuring with the recipe's tree; the drafter's own cache is counted as a layer of the target's."""
    decode, prompt = recipe.decode, min(recipe.data.sequence_length, 512)
    draft = _Draft(decode.num_nodes + 1, decode.depth, tuple(drafter.taps))
    capacity = prompt + new_tokens + 2 * (decode.num_nodes + 1)
    settings = [SamplingParams(temperature=temperature) for temperature in recipe.eval.temperatures]
    budget = decoding_plan(target, cast(Proposer, draft), batch, capacity, prompt=prompt, settings=settings)
    return Budget(budget.parts | {"drafter cache": cache_growth(target, batch, capacity) // target.num_layers})


def _written(recipe: DrafterRecipe) -> int:
    return sum(path.stat().st_size for path in recipe.features_folder.glob("shard-*.safetensors"))


def _is_whole(recipe: DrafterRecipe) -> bool:
    """Whether the recipe's store holds all that it was made for: what is planned is an upper bound, which a finished store is below."""
    return recipe.features.source == "store" and (recipe.features_folder / "store.json").is_file() and Store(recipe.features_folder).complete


def _free(recipe: DrafterRecipe) -> int:
    folder = recipe.features_folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _why_online(modes: dict[str, int], saved: Saved, recipe: DrafterRecipe) -> list[str]:
    stored = next(count for name, count in modes.items() if name.startswith("store"))
    if recipe.features.source == "store" or stored < 10 * GIB:
        return []
    return [
        f"online is preferred: a store of the same would take {size(stored)}, and reading it once costs as much as writing it; "
        "it pays if the target does not fit beside the drafter, or for many runs over one set of data"
    ]


# -- time ----------------------------------------------------------------------------------------------------------------------------------


def active_parameters(target: Target) -> int:
    """Parameters that a token passes through: all but the embeddings, of experts those that are chosen."""
    config = target.config
    experts = next((int(n) for name in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(config, name, None))), 0)
    chosen = int(getattr(config, "num_experts_per_tok", 0) or 0)
    count = 0.0
    for name, p in target.model.named_parameters():
        share = chosen / experts if experts and chosen and ".experts." in name else 1.0
        count += p.numel() * share
    return int(count) - (0 if _tied(target) else sum(p.numel() for p in target.embeddings.parameters()))


def _seconds(
    recipe: DrafterRecipe, objective: Objective, target: Target, drafter: Head, tokens: dict[str, Any], hardware: Device, processes: int
) -> tuple[dict[str, float], list[str]]:
    data, train, part = recipe.data, recipe.train, recipe.eval
    active, length = active_parameters(target), tokens["tokens a sequence"]
    attention = 2 * target.num_layers * target.hidden_size * length  # scores and values of a causal pass, a token
    forward = 2 * active + attention
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad and p.ndim > 1)
    unrolled = int(getattr(objective, "steps", 1))
    judged = 2 * target.hidden_size * (target.vocab_size + 2 * unrolled * drafter.sizes.draft_vocab_size)
    learn = 6 * trained * unrolled * places(drafter, objective, length) + judged
    speed, read = hardware.operations * TRAIN_SHARE * processes, hardware.bandwidth * READ_SHARE
    weights = active * target.dtype.itemsize
    step = weights / read  # of plain decoding; computing is waited for only by large batches
    seconds: dict[str, float] = {}
    if data.responses == "target" and data.server is None:
        many = math.ceil(tokens["sequences"] / data.generation_batch / processes)
        each = max(step, 2 * active * data.generation_batch / (hardware.operations * TRAIN_SHARE))
        seconds["answers"] = many * data.response_tokens * each + tokens["in the data"] * forward / speed
    passes = tokens["trained on"]
    if recipe.features.source != "online" or train.keep_features_gib:
        passes = min(passes, tokens["in the data"])
    seconds["target's features"] = passes * forward / speed
    seconds["training"] = tokens["trained on"] * learn / speed
    if measures(recipe):
        times = train.steps // part.every + 1
        seconds["measured decoding"] = times * part.dev_tokens * max(step, 2 * active * part.dev_prompts * recipe.decode.num_nodes / speed)
        engines = 2 + part.eager
        seconds["final evaluation"] = engines * len(part.temperatures) * (part.timed_prompts or part.num_prompts) * part.max_new_tokens * step
    model = [
        f"time: target {forward / 1e9:.3g} GFLOP a token, training {learn / 1e9:.3g} GFLOP a token, at {TRAIN_SHARE:.0%} of "
        f"{hardware.operations / 1e12:.3g} TFLOP/s; decoding reads {size(weights)} a step at {READ_SHARE:.0%} of {hardware.bandwidth / 1e12:.3g} TB/s"
    ]
    return seconds, model


# -- what does not fit ---------------------------------------------------------------------------------------------------------------------


Change = dict[str, Any]  # {"train.micro_batch_size": 1}


def _changes(recipe: DrafterRecipe) -> Iterator[Change]:
    """Settings that take less, the least intrusive first."""
    train, features, data = recipe.train, recipe.features, recipe.data
    micro = train.micro_batch_size or train.batch_size
    yield from ({"train.micro_batch_size": n} for n in range(micro - 1, 0, -1) if train.batch_size % n == 0)
    if train.keep_features_gib:
        yield {"train.keep_features_gib": 0.0}
    yield from ({"data.generation_batch": n} for n in (16, 4, 1) if n < data.generation_batch)
    yield from ({"eval.dev_prompts": n} for n in (4, 1) if n < recipe.eval.dev_prompts)
    if recipe.target.dtype == "float32":
        yield {"target.dtype": "bfloat16"}
    if features.source == "store":
        yield {"features.dtype": "float8"}
        yield {"features.logits": "topk"}
        yield {"features.logits": "topk", "features.dtype": "float8"}
    if features.source != "online":
        yield {"features.source": "online"}
    elif recipe.adapter.rank is None:
        yield {"features.source": "ring"}
        yield {"features.source": "store", "features.measure": "loss"}
    if features.source == "ring" and features.ring_on == "disk":
        yield {"features.ring_on": "memory"}
    if features.source == "store" and data.num_prompts:
        yield {"data.num_prompts": max(1, data.num_prompts // 2)}
    for length in (data.sequence_length // 2, data.sequence_length // 4):
        if length > data.response_tokens or data.responses == "given":
            yield {"data.sequence_length": max(1, length)}


def _with(recipe: DrafterRecipe, change: Change) -> DrafterRecipe:
    for key, value in change.items():
        section, _, name = key.partition(".")
        part = dataclasses.replace(getattr(recipe, section), **{name: value})
        recipe = dataclasses.replace(recipe, **{section: part})
    return recipe


def _fits(plan: Plan) -> bool:
    return plan.disk_wanted <= plan.disk_free and (plan.available is None or plan.peak <= plan.available)


def _what_fits(recipe: DrafterRecipe, again: Callable[[DrafterRecipe], Plan]) -> list[Change]:
    """Up to three changes that make it fit, each by itself; or one of several settings, none of which can be left out."""
    known = list(_changes(recipe))
    alone = list(itertools.islice((change for change in known if _fits(again(_with(recipe, change)))), 3))
    if alone:
        return alone
    together: Change = {}
    for change in known:
        together |= change
        if _fits(again(_with(recipe, together))):
            for key in list(together):
                fewer = {name: value for name, value in together.items() if name != key}
                if _fits(again(_with(recipe, fewer))):
                    together = fewer
            return [together]
    return []


def _refusals(plan: Plan, recipe: DrafterRecipe, again: Callable[[DrafterRecipe], Plan]) -> list[str]:
    if _fits(plan):
        return []
    found = [" ".join(f"{key}={value}" for key, value in change.items()) for change in _what_fits(recipe, again)]
    refused = []
    if plan.disk_wanted > plan.disk_free:
        advice = f"use {' or '.join(found)}" if found else "give another out=FOLDER or features.folder, on a disk with more room"
        refused.append(f"disk: wanted at most {size(plan.disk_free)} ({recipe.features_folder}), got {size(plan.disk_wanted)}; {advice}")
    if plan.available is not None and plan.peak > plan.available:
        phase = max(plan.phases, key=lambda name: plan.phases[name])
        parts = ", ".join(f"{name} {size(n)}" for name, n in sorted(plan.memory.items(), key=lambda item: -item[1])[:3])
        last = "use a device with more memory, a smaller drafter (drafter.draft_vocab_size) or a smaller target"
        advice = f"use {' or '.join(found)}" if found else last
        refused.append(f"memory: wanted at most {size(plan.available)} on {plan.device}, got {size(plan.peak)} while {phase} ({parts}); {advice}")
    return refused


def check_plan(recipe: DrafterRecipe, objective: Objective, processes: int = 1, sample_tokens: int | None = None) -> None:
    """Refuse a training that cannot fit, before anything is loaded. Raises UserError with what would make it fit.

    What is not known is not refused: data of unknown size, and a memory that weights alone do not fill to a GiB.
    """
    check_folder(recipe.target.location)
    if recipe.data.num_prompts is None:
        recipe = _with(recipe, {"data.num_prompts": 1})
    plan = make_plan(recipe, objective, processes=processes, sample_tokens=sample_tokens, activations=False)
    if plan.memory["target weights"] + plan.memory["drafter weights"] < GIB:
        plan.refusals = [text for text in plan.refusals if text.startswith("disk")]
    if plan.refusals:
        raise UserError(plan.refusals[0])


# -- printing ------------------------------------------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Bytes in words."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in words."""
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.1f} s"


def as_text(plan: Plan) -> str:
    """For people."""
    target, drafter = plan.target, plan.drafter
    lines = [
        f"target    {target['name']}: {target['parameters']:,} parameters, {target['layers']} layers of {target['hidden']}, {target['dtype']}",
        f"drafter   {drafter['method']}: {drafter['parameters']:,} parameters, {drafter['trained']:,} trained, reads layers {drafter['taps']}",
        f"device    {plan.device}",
        "",
        "tokens",
        *(f"  {name:<44}{count:>16,}" for name, count in plan.tokens.items()),
        "",
        f"disk                                            {'':>4}(free: {size(plan.disk_free)})",
        *(f"  {name:<44}{size(count):>16}" for name, count in plan.disk.items()),
        "",
        "bytes a token",
        *(f"  {name:<44}{count:>16,}" for name, count in plan.bytes_per_token.items()),
        "",
        f"memory of a device{'':>30}{'' if plan.available is None else f'(available: {size(plan.available)})'}",
        *(f"  {name:<44}{size(count):>16}" for name, count in plan.memory.items()),
        *(f"  = while {name:<36}{size(count):>16}" for name, count in plan.phases.items()),
        "",
        "time",
        *(f"  {name:<44}{duration(count):>16}" for name, count in plan.seconds.items()),
        f"  {'= in all':<44}{duration(sum(plan.seconds.values())):>16}",
        "",
        *(f"- {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """For programs."""
    return dataclasses.asdict(plan) | {"peak": plan.peak, "fits": not plan.refusals}
