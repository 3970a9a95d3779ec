"""Targets and drafters without weights, from a config alone, and what a drafter's activations take.

Dims: B sequences of a micro-batch, T tokens of a sequence, H hidden, F target's features of a token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from .. import UserError
from ..decode.target import Step, Target
from ..heads.draft_model import SIZES, DraftModel, DraftModelConfig, resized
from ..heads.head import Head
from ..heads.registry import METHODS, known_settings, new_head
from ..recipes.schema import DrafterRecipe
from ..recipes.sheets import fact_sheet
from .bench import RandomTarget
from .objectives.common import Batch, Objective
from .objectives.pard import PardObjective
from .optimizers import Muon, Part, make_optimizers

_SHORT = (48, 96)  # tokens of the sequences that activations are measured on
_FEW = (4, 8)  # blocks of those that draft in blocks


class PlannedTarget(Target):
    """A target without weights or tokenizer: sizes only."""

    def _check_logits(self) -> None:
        """Nothing can be computed."""


def planned_target(recipe: DrafterRecipe, config: str | Path | None = None, default_dtype: str = "float32") -> PlannedTarget:
    """From `config`, a config.json, or from that of the recipe's target. Raises UserError if there is none, or of a model that cannot be a target."""
    place = str(config) if config is not None else recipe.target.location
    if config is not None and not Path(config).exists():
        raise UserError(f"--config: wanted a model's config.json, or a folder with one, got {config}, which does not exist")
    try:
        if Path(place).is_file():
            values = json.loads(Path(place).read_text(encoding="utf-8"))
            values = values.get("config", values)
            read = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            read = _config_of(place, recipe.target.revision)
        dtype = default_dtype if recipe.target.dtype == "auto" else recipe.target.dtype
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"target {place}: wanted a model's config.json, or a folder with one, got none that can be read ({text})") from error
    return PlannedTarget(model, None, place)


def _config_of(place: str, revision: str | None = None) -> Any:
    """Of a folder or a hub name; that of a model with a fact sheet is not asked for anywhere."""
    sheet = fact_sheet(place) if revision is None else None
    if sheet is None:
        return AutoConfig.from_pretrained(place, revision=revision)
    values = sheet["config"]
    return AutoConfig.for_model(values.pop("model_type"), **values)


def planned_drafter(recipe: DrafterRecipe, target: Target) -> Head:
    """The recipe's drafter without weights. Raises UserError as making it does."""
    method, settings = recipe.drafter.method, dict(recipe.drafter.settings)
    with torch.device("meta"):
        if method != DraftModel.method:
            return new_head(method, target, with_mask_token(method, settings))
        given = known_settings(method, {name: value for name, value in settings.items() if name in {*SIZES, "block_size", "mask_token_id"}})
        if recipe.drafter.init not in (None, "target"):
            try:
                read = _config_of(recipe.drafter.init)
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"drafter.init {recipe.drafter.init}: wanted a causal LM with a config.json, got none that can be read") from error
            read = resized(read, {name: given.get(name) for name in SIZES})
            block, mask = given.get("block_size"), given.get("mask_token_id")
            made = DraftModel(DraftModelConfig.of(read, int(read.vocab_size), target, block, 0 if block is not None and mask is None else mask))
        else:
            made = DraftModel(DraftModelConfig.for_target(target, **(with_mask_token(method, given) if given.get("block_size") else given)))
        made.bind(target)
        return made if recipe.drafter.lora_rank is None else made.adapt(recipe.drafter.lora_rank, recipe.drafter.lora_alpha)


def with_mask_token(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Which token it is makes no difference to sizes, and without a tokenizer it cannot be told."""
    known = known_settings(method, settings)
    wants = "mask_token_id" in METHODS[method][1].__dataclass_fields__
    return {"mask_token_id": 0, **known} if wants else known


def trained_bytes(drafter: Head, recipe: DrafterRecipe) -> dict[str, int]:
    """{"drafter weights", "gradients", "optimizer"}: of a drafter in float32, gradients alike, and the state of the recipe's optimizer."""
    trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    count = sum(p.numel() for _, p in trained)
    state = 0
    for optimizer in make_optimizers([Part(name="drafter", parameters=trained)], recipe.train):
        each = 4 if isinstance(optimizer, Muon) else 8  # one average, or two
        state += each * sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    whole = sum(p.numel() for p in drafter.parameters())
    half = 2 * whole if recipe.train.mixed_precision != "no" else 0  # autocast's copies
    return {"drafter weights": 4 * whole + half, "gradients": 4 * count, "optimizer": state}


@contextmanager
def saved_for_backward(apart: set[int]) -> Iterator[list[int]]:
    """The bytes of what autograd keeps inside, one entry a tensor; storages in `apart` are not counted, and none twice."""
    sizes, seen = list[int](), set(apart)
    held: list[Tensor] = []  # so that no address comes again

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(x.detach())
            sizes.append(storage.nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes


class _Scaled(RandomTarget):
    """A target of a fraction of the width, as far as training reads one: random features, random output layer."""

    def __init__(self, config: Any, hidden: int, intermediate: int, head_dim: int, layers: int) -> None:
        heads = int(config.num_attention_heads)
        super().__init__(
            hidden=hidden,
            vocab=64,
            intermediate=intermediate,
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.config.head_dim, self.num_layers = head_dim, layers


Activations = Callable[[int, int], float]  # (rows, tokens of each) -> bytes


def measure_activations(recipe: DrafterRecipe, objective: Objective, target: Target, drafter: Head) -> Activations:
    """What autograd keeps of a micro-batch: measured at two widths, two lengths and, of blocks, two counts, and extrapolated linearly in each.

    That is exact but for what is rounded: attention scores of blocks, which are kept, grow with length and count, but not with the width.
    """
    share = 0.6 if recipe.train.mixed_precision != "no" else 1.0  # most of it in half precision, norms in float32
    if isinstance(drafter, DraftModel):
        each = 4 * _model_floats(drafter) * places(drafter, objective, recipe.data.sequence_length)
        return lambda rows, tokens: rows * tokens * each * share
    head_dim = int(getattr(target.config, "head_dim", None) or target.hidden_size // target.config.num_attention_heads)
    narrow = [2, 4] if head_dim > 4 else [head_dim]
    blocks: int | None = getattr(objective, "anchors", None)
    changed: Any = objective  # `anchors` is a field of some
    tried: list[Objective] = [objective] if blocks is None else [dataclasses.replace(changed, anchors=few) for few in _FEW]
    kept = [[[kept_bytes(recipe, one, target, width / head_dim, width, length) for length in _SHORT] for one in tried] for width in narrow]

    def of(rows: int, tokens: int) -> float:
        by_count = [[_line(_SHORT, pair, tokens) for pair in counts] for counts in kept]
        by_width = [counts[0] if blocks is None else _line(_FEW, counts, min(blocks, tokens)) for counts in by_count]
        return rows * share * max(0.0, by_width[0] if len(narrow) == 1 else _line(narrow, by_width, head_dim))

    return of


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at x of the straight line through two points."""
    return ys[0] + (ys[1] - ys[0]) * (x - xs[0]) / (xs[1] - xs[0])


def kept_bytes(recipe: DrafterRecipe, objective: Objective, target: Target, share: float, head_dim: int, length: int) -> float:
    """What autograd keeps of one sequence of so many tokens, measured on a copy of a share of the width with heads of head_dim."""
    inner = getattr(target.config, "intermediate_size", None) or 4 * target.hidden_size
    hidden = max(2, round(target.hidden_size * share))
    small = _Scaled(target.config, hidden, max(1, round(int(inner) * share)), head_dim, target.num_layers)
    settings = with_mask_token(recipe.drafter.method, recipe.drafter.settings) | {"draft_vocab_size": small.vocab_size}
    if settings.get("intermediate_size") is not None:
        settings["intermediate_size"] = max(1, round(settings["intermediate_size"] * share))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = new_head(recipe.drafter.method, small, settings)
        ids = torch.randint(1, small.vocab_size, (1, length))
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(length).expand_as(ids), torch.zeros_like(ids))
        small.set_taps(drafter.taps)
        step = Step(torch.randn(1, length, hidden), torch.randn(1, length, hidden * len(drafter.taps)))
        apart = {p.untyped_storage().data_ptr() for p in [*drafter.parameters(), *drafter.buffers(), *small.embeddings.parameters()]}
        apart |= {x.untyped_storage().data_ptr() for x in (step.hidden_BNH, step.taps_BNF) if x is not None}
        with saved_for_backward(apart) as sizes:
            objective(drafter, drafter, cast(Target, small), batch, step)
    return float(sum(sizes))


def places(drafter: Head, objective: Objective, length: int) -> float:
    """Places that a drafter's training pass computes for every token: blocks, or PARD's mask entries, come on top of the text."""
    block, anchors = getattr(drafter.sizes, "block_size", None), getattr(objective, "anchors", None)
    if block is None:
        return 1.0
    if isinstance(objective, PardObjective):
        return 1 + objective.entries_per_token(block)
    return 1 + (0 if anchors is None else min(anchors, length) * block / length)


def _model_floats(drafter: DraftModel) -> int:
    """Of a transformer: what its layers keep of a token, by the usual count (inputs of norms, projections, attention and MLP)."""
    config = drafter.model.config.get_text_config(decoder=True)
    heads, width = int(config.num_attention_heads), int(config.hidden_size)
    head_dim = int(getattr(config, "head_dim", None) or width // heads)
    kv = int(getattr(config, "num_key_value_heads", None) or heads) * head_dim
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    return int(config.num_hidden_layers) * (8 * width + 4 * heads * head_dim + 4 * kv + 4 * inner) + 4 * width
