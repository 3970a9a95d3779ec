"""Smaller copies of a causal LM: fewer layers, narrower ones. What goes is chosen by what the model does on a few texts, not by hand.

    model = pruned(target, {"num_layers": 2, "intermediate_size": 256}, sequences, "influence")

Layers, by name: "influence" keeps those that change their input most, 1 - cos(input, output) on average (ShortGPT, 2403.03853); "loss" takes away one
layer after the other, each time the one whose absence moves the model's distributions least (KL). Widths keep what is most active (Minitron,
2407.14679): channels by the mean size of the norms' outputs, units of the MLPs by that of their activations, heads by the norm of theirs. Layers go
first; activity is that of the model that is left.

Dims: T sequence, H hidden, F units of an MLP, L layers, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .. import UserError
from ..decode.fused import FAMILIES
from ..decode.target import Target
from ..heads.draft_model import SIZES, resized
from ..heads.standalone import early_exit
from .data import Sequences

CHUNK = 512  # tokens whose distributions are compared at once
_CHANNELS, _UNITS, _HEADS = "channels", "units", "heads"


def pruned(source: Target, sizes: dict[str, int | None], sequences: Sequences, prune_by: Literal["influence", "loss"]) -> PreTrainedModel:
    """A float32 copy of a model, cut down to these sizes (named as in recipes; None: the model's own), on the model's device.

    sequences: what is looked at. Raises UserError for sizes that the model does not have, or larger than its own.
    """
    own = {name: int(getattr(source.config, key, None) or 0) for name, key in SIZES.items()}
    for name, value in sizes.items():
        if value is not None and value > own[name]:
            raise UserError(f"drafter.{name}: wanted at most the {own[name]} of the model to start from, got {value}")
    layers = list(range(source.num_layers))
    kept = sizes.get("num_layers") or source.num_layers
    if kept < source.num_layers:
        layers = choose_layers(source, kept, sequences, prune_by)
    part = early_exit(source, layers).draft
    smaller = {name: value for name, value in sizes.items() if name != "num_layers" and value is not None and value != own[name]}
    return _narrowed(part, smaller, sequences) if smaller else copy_of(part, part.config, lambda name, tensor: tensor)


def choose_layers(source: Target, count: int, sequences: Sequences, prune_by: Literal["influence", "loss"]) -> list[int]:
    """The `count` layers to keep, ascending."""
    if prune_by == "influence":
        influence = block_influence(source, sequences)
        return sorted(sorted(range(source.num_layers), key=lambda layer: -influence[layer])[:count])
    wanted = [_features(source, ids) for ids, _ in sequences]
    layers = list(range(source.num_layers))
    while len(layers) > count:
        rest = {layer: [other for other in layers if other != layer] for layer in layers}
        layers = rest[min(layers, key=lambda layer: _divergence(source, rest[layer], sequences, wanted))]
    return layers


@torch.no_grad()
def block_influence(source: Target, sequences: Sequences) -> list[float]:
    """1 - cos(input, output) of each layer, mean over all tokens."""
    source.set_taps(range(source.num_layers + 1))
    total, tokens = torch.zeros(source.num_layers, dtype=torch.float64), 0
    for ids, _ in sequences:
        step = source.features(*_whole(ids, source.device))
        assert step.taps_BNF is not None
        hidden_TLH = step.taps_BNF[0].view(len(ids), source.num_layers + 1, -1).float()
        similarity_TL = torch.cosine_similarity(hidden_TLH[:, :-1], hidden_TLH[:, 1:], dim=-1)
        total += (1 - similarity_TL).double().sum(0).cpu()
        tokens += len(ids)
    source.set_taps(())
    influence: list[float] = (total / tokens).tolist()
    return influence


def _whole(ids: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, positions, documents) of one text."""
    ids_BT = torch.tensor([list(ids)], device=device)
    return ids_BT, torch.arange(len(ids), device=device).unsqueeze(0), torch.zeros_like(ids_BT)


def _features(model: Target, ids: Sequence[int]) -> Tensor:
    model.set_taps(())
    return model.features(*_whole(ids, model.device)).hidden_BNH[0]


@torch.no_grad()
def _divergence(source: Target, layers: Sequence[int], sequences: Sequences, wanted: Sequence[Tensor]) -> float:
    """Mean KL per token between the whole model's distributions (of last hidden states `wanted`) and those of some of its layers."""
    part = early_exit(source, layers).draft
    total, tokens = 0.0, 0
    for (ids, _), whole_TH in zip(sequences, wanted, strict=True):
        for want, got in zip(torch.split(whole_TH, CHUNK), torch.split(_features(part, ids), CHUNK), strict=True):
            log_p, log_q = (source.logits(hidden).float().log_softmax(-1) for hidden in (want, got))
            total += float((log_p.exp() * (log_p - log_q)).sum())
        tokens += len(ids)
    return total / tokens


def copy_of(source: Target, config: Any, cut: Callable[[str, Tensor], Tensor]) -> PreTrainedModel:
    """A new float32 model with this configuration, whose tensors are what `cut` makes of the source's. Never a deep copy: a target's layers are
    fused, and a copy's would still be the target's."""
    config = copy.deepcopy(config)
    config._attn_implementation = source.model.config._attn_implementation
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(source.device)
    tensors = source.model.state_dict()
    with torch.no_grad():
        model.load_state_dict({name: cut(name, tensors[name]).to(torch.float32).clone() for name in model.state_dict()})
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.model.generation_config)
    return model


def _narrowed(source: Target, sizes: dict[str, int], sequences: Sequences) -> PreTrainedModel:
    kinds = {type(layer).__name__ for layer in source.layers}
    if not kinds <= set(FAMILIES):
        raise UserError(
            f"drafter.{next(iter(sizes))}: wanted null, as only layers of kind {', '.join(FAMILIES)} can be made narrower, got {', '.join(kinds)}; "
            "set drafter.num_layers alone"
        )
    config = resized(source.config, dict(sizes))
    width = source.config.head_dim if getattr(source.config, "head_dim", None) else source.hidden_size // source.config.num_attention_heads
    config.head_dim = width
    active = activity(source, sequences)
    channels = _best(active[_CHANNELS, 0], config.hidden_size)
    units = [_best(active[_UNITS, layer], config.intermediate_size) for layer in range(source.num_layers)]
    heads = [_best_heads(active[_HEADS, layer], source.config.num_key_value_heads, config) for layer in range(source.num_layers)]

    def cut(name: str, tensor: Tensor) -> Tensor:
        parts = name.split(".")
        module = parts[-2]
        if "layers" not in parts:
            return tensor[..., channels]  # embeddings, output layer and the last norm
        layer = int(parts[parts.index("layers") + 1])
        rows = {"q_proj": _places(heads[layer][0], width), "k_proj": _places(heads[layer][1], width), "gate_proj": units[layer]}
        rows |= {"v_proj": rows["k_proj"], "up_proj": units[layer], "o_proj": channels, "down_proj": channels}
        columns = {"o_proj": rows["q_proj"], "down_proj": units[layer]}
        if module in ("q_norm", "k_norm"):
            return tensor
        if module not in rows:
            return tensor[channels]  # a norm
        return tensor[rows[module]] if parts[-1] == "bias" else tensor[rows[module]][:, columns.get(module, channels)]

    return copy_of(source, config, cut)


def _best(activity_F: Tensor, count: int) -> Tensor:
    """The `count` most active, ascending."""
    return activity_F.topk(count).indices.sort().values


def _best_heads(norm_N: Tensor, groups: int, config: Any) -> tuple[Tensor, Tensor]:
    """(query heads, key heads) to keep, ascending: the most active groups, and in each of them the most active heads."""
    norm_GN = norm_N.view(groups, -1)
    kept_G = _best(norm_GN.sum(1), config.num_key_value_heads)
    inside_GN = norm_GN[kept_G].topk(config.num_attention_heads // config.num_key_value_heads, dim=1).indices.sort(dim=1).values
    return (kept_G.unsqueeze(1) * norm_GN.shape[1] + inside_GN).flatten(), kept_G


def _places(heads: Tensor, width: int) -> Tensor:
    """Rows of a projection that belong to these heads."""
    return (heads.unsqueeze(1) * width + torch.arange(width, device=heads.device)).flatten()


@torch.no_grad()
def activity(source: Target, sequences: Sequences) -> dict[tuple[str, int], Tensor]:
    """{(what, layer): its activity}: of the hidden channels (layer 0: all layers' norms together), of the MLPs' units, of the heads."""
    sums: dict[tuple[str, int], Tensor] = defaultdict(lambda: torch.zeros((), device=source.device))
    width = source.config.head_dim if getattr(source.config, "head_dim", None) else source.hidden_size // source.config.num_attention_heads
    hooks = []

    def listen(module: nn.Module, what: str, layer: int, size: Callable[[Tensor], Tensor], inputs: bool) -> None:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            x: Tensor = args[0] if inputs else output
            sums[what, layer] = sums[what, layer] + size(x.float().flatten(0, -2)).sum(0)

        hooks.append(module.register_forward_hook(hook))

    for index, layer in enumerate(source.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            listen(layer.get_submodule(norm), _CHANNELS, 0, torch.abs, False)
        listen(layer.get_submodule("mlp.down_proj"), _UNITS, index, torch.abs, True)
        listen(layer.get_submodule("self_attn.o_proj"), _HEADS, index, lambda x: torch.unflatten(x, -1, (-1, width)).norm(dim=-1), True)
    try:
        for ids, _ in sequences:  # the model's own layers, whose modules hooks hear, not the fused ones
            source.model(input_ids=torch.tensor([list(ids)], device=source.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return sums
