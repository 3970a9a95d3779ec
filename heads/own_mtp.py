"""An MTP head that starts from the target's own multi-token prediction layer, where its checkpoint has one. transformers leaves those weights out.

    head = own_mtp(target, "path/or/hub-name")           weights, norms, order of inputs and what is fed as the family has them

| family, names in the checkpoint | inputs of the projection | step 0 is fed what comes | later steps are fed |
|---|---|---|---|
| DeepSeek-V3, GLM-4.5: `model.layers.L.{enorm,hnorm,eh_proj,shared_head}` | [embedding; hidden] | after the final norm | the raw output |
| Qwen3-Next, Qwen3.5: `mtp.{fc,pre_fc_norm_embedding,...}` | [embedding; hidden] | after the final norm | the normed output |
| MiMo: `model.mtp_layers.0.{input_proj,token_layernorm,...}` | [hidden; embedding] | before the final norm | the normed output |
L is the number of the target's layers. Input columns are kept in the first order, so that what is saved is one layout. The layer itself is of
transformers' class for the target's last layer (attention with biases or norms, experts ...), as is its norm. Of several MTP layers the first is
taken; it is applied to its own output.

Dims: B batch, T sequence, M pairs, H hidden, L cache slots.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from .. import UserError
from ..decode.cache import TreeCache
from ..decode.growth import Grower, Kind
from ..decode.target import Target
from .blocks import DecoderLayer, within_documents
from .head import draft_shape, head_sizes, layer_sizes
from .mtp import Mtp, MtpConfig
from .recurrent import RecurrentHead, RecurrentProposer, check_output_layer


@dataclass(frozen=True)
class Layout:
    """Where a family keeps its MTP layer: names below `prefix`, in the order embedding norm, hidden norm, projection, final norm.

    layer: prefix of the decoder layer's own names. embedding_first: order of the projection's inputs. normed: whether step 0 is fed what comes after
    the target's final norm. feeds_normed: whether later steps are fed the normed output.
    """

    name: str
    prefix: str
    parts: tuple[str, str, str, str]
    layer: str
    embedding_first: bool
    normed: bool
    feeds_normed: bool
    copies: tuple[str, ...] = ()  # tensors below prefix that must be the target's own: its embeddings, its output rows


LAYOUTS = (
    Layout(
        name="deepseek",
        prefix="model.layers.{layers}.",
        parts=("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        layer="",
        embedding_first=True,
        normed=True,
        feeds_normed=False,
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    Layout(
        name="qwen",
        prefix="mtp.",
        parts=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        layer="layers.0.",
        embedding_first=True,
        normed=True,
        feeds_normed=True,
    ),
    Layout(
        name="mimo",
        prefix="model.mtp_layers.0.",
        parts=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        layer="",
        embedding_first=False,
        normed=False,
        feeds_normed=True,
    ),
)
_PARTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight")  # ours


@dataclass(frozen=True, kw_only=True)
class OwnMtpConfig(MtpConfig):
    """layout: a name of LAYOUTS. layer: transformers' configuration of a model of that one layer."""

    layout: str
    layer: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout not in {layout.name for layout in LAYOUTS}:
            raise UserError(f"drafter.layout: wanted one of {', '.join(layout.name for layout in LAYOUTS)}, got {self.layout}")


class OwnMtp(Mtp):
    """The head. What it feeds itself, and what it reads of the target, is as the family has it."""

    config: OwnMtpConfig

    def __init__(self, config: OwnMtpConfig) -> None:
        RecurrentHead.__init__(self, config)
        self.layout = next(layout for layout in LAYOUTS if layout.name == config.layout)
        decoder = _one_layer_model(config.layer).get_decoder()
        kind, size = type(decoder.norm), config.hidden_size
        self.enorm, self.hnorm, self.norm = (kind(size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = decoder.layers[0]
        self.rotary = decoder.rotary_emb

    def decoder_layers(self) -> list[DecoderLayer]:
        """None of ours."""
        return []

    def enter(self, embedded: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer reads, twice: its own norm comes first in it."""
        hidden = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(fed)], dim=-1))
        return hidden, hidden

    def leave(self, hidden: Tensor) -> Tensor:
        """The raw output, or the normed one."""
        out: Tensor = self.norm(hidden) if self.layout.feeds_normed else hidden
        return out

    def readout(self, state: Tensor) -> Tensor:
        """The normed output."""
        out: Tensor = state if self.layout.feeds_normed else self.norm(state)
        return out

    def run(self, ids_BM: Tensor, fed_BMH: Tensor, position_BM: Tensor, allowed_BML: Tensor, cache: Any) -> Tensor:
        """States [B, M, H] of pairs that see the entries of the cache that are allowed; their own are put into it."""
        _, hidden = self.enter(self.embed(ids_BM), fed_BMH)
        mask = torch.zeros(allowed_BML.shape, dtype=hidden.dtype, device=hidden.device).masked_fill_(~allowed_BML, torch.finfo(hidden.dtype).min)
        out = self.layer(
            hidden,
            attention_mask=mask.unsqueeze(1),
            position_ids=position_BM,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self.rotary(hidden, position_BM),
        )
        return self.leave(out[0] if isinstance(out, tuple) else out)

    def training_outputs(
        self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, steps: int, detach: bool = False
    ) -> list[Tensor]:
        """See `RecurrentHead.training_outputs`: the same, with masks over the entries of all steps in memory."""
        fed, outputs, entries = self.combine(taps_BTF), [], _Steps()
        total = ids_BT.shape[1]
        own = torch.eye(total, dtype=torch.bool, device=ids_BT.device).expand(len(ids_BT), -1, -1)
        allowed = [within_documents(document_BT).squeeze(1)]
        for k in range(steps):
            ids = torch.cat([ids_BT[:, k + 1 :], ids_BT.new_zeros(len(ids_BT), min(k + 1, total))], dim=1)
            if k:
                allowed.append(own)
            outputs.append(self.run(ids, fed, position_BT + k, torch.cat(allowed, dim=2), entries))
            fed = outputs[-1].detach() if detach else outputs[-1]
        return outputs

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> OwnMtpProposer:
        """A proposer of chains, or of dynamic trees with `nodes` draft nodes. kind: see `Grower`."""
        return OwnMtpProposer(self, **draft_shape(self.config.draft_vocab_size, tree, depth, topk, nodes), kind=kind)


class _Steps:
    """A cache for training: the keys and values of all steps so far, side by side, with their gradients."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add a step's; return those of all."""
        self._kept.append((key_states, value_states))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*self._kept, strict=True))
        return keys, values


class OwnMtpProposer(RecurrentProposer):
    """Grows chains and dynamic trees through transformers' layer, whose keys and values are kept in the cache that targets have."""

    head: OwnMtp

    def __init__(self, head: OwnMtp, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        super().__init__(head, depth=depth, topk=topk, nodes=nodes, kind=kind)
        self._cache: TreeCache | None = None

    def memory(self, batch: int, capacity: int) -> int:
        """Bytes that `reset` and the first pass after it will allocate; none if the cache is of that size already."""
        slots, config = capacity + self.max_depth * self.topk, self.head.config
        if self._cache is not None and (self._cache.batch, self._cache.capacity) == (batch, slots):
            return 0
        return 2 * batch * config.num_kv_heads * slots * config.head_dim * self._vocabulary.dtype.itemsize

    def reset(self, batch: int, capacity: int) -> None:
        """Make room for the committed pairs and one tree."""
        slots = capacity + self.max_depth * self.topk
        if self._cache is None or (self._cache.batch, self._cache.capacity) != (batch, slots):
            self._cache = TreeCache(1, batch, slots)
        self._restart(batch, self._vocabulary.device)

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [*Grower.tensors(self), *([] if self._cache is None else self._cache.tensors())]

    def _run(self, fed_BMH: Tensor, ids_BM: Tensor, position_BM: Tensor, slots_BM: Tensor, allowed_BML: Tensor, start: int | None = None) -> Tensor:
        assert self._cache is not None, "reset() comes first"
        self._cache.place(slots_BM, allowed_BML.shape[-1], start)
        return self.head.run(ids_BM, fed_BMH, position_BM, allowed_BML, self._cache)


def _one_layer_model(layer: dict[str, Any]) -> Any:
    """transformers' model of one layer; its few embeddings are never used."""
    values = dict(layer)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def _layer_config(target: Target) -> dict[str, Any]:
    """The configuration of a model whose only layer is like the target's last."""
    config = copy.deepcopy(target.config)
    count = int(config.num_hidden_layers)
    values = {key: value[-1:] if isinstance(value, list) and len(value) == count else value for key, value in config.to_dict().items()}
    values |= {"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    values["tie_word_embeddings"] = True
    if "first_k_dense_replace" in values:  # layers before it have no experts; the MTP layer comes after them
        values["first_k_dense_replace"] = 0
    if values.get("layer_types", ["full_attention"]) not in (["full_attention"], None):
        raise UserError(f"drafter.init: wanted a target whose last layer has full attention, got {values['layer_types'][0]}")
    kept = {key: value for key, value in values.items() if key not in ("architectures", "transformers_version", "_name_or_path", "dtype")}
    return dict(json.loads(json.dumps(kept, default=str)))


def own_mtp(target: Target, path: str, *, revision: str | None = None, draft_vocab_size: int | None = None) -> OwnMtp:
    """The head, with the weights of the checkpoint that the target was loaded from.

    Raises UserError if that has no MTP layer of a known layout, or one that does not belong to such a target.
    """
    check_output_layer(target)
    tensors = _Checkpoint(path, revision)
    found = [layout for layout in LAYOUTS if layout.prefix.format(layers=target.num_layers) + layout.parts[2] + ".weight" in tensors.files]
    if not found:
        names = ", ".join(f"{layout.prefix.format(layers=target.num_layers)}{layout.parts[2]}" for layout in LAYOUTS)
        raise UserError(f"drafter.init: wanted a target whose checkpoint has an MTP layer ({names}), got {path}, which has none; leave it null")
    layout = found[0]
    prefix = layout.prefix.format(layers=target.num_layers)
    sizes = layer_sizes(target) | {"rms_norm_eps": float(getattr(target.config, "rms_norm_eps", 1e-6))}
    tap = target.num_layers + layout.normed
    config = OwnMtpConfig(taps=(tap,), layout=layout.name, layer=_layer_config(target), **head_sizes(target, draft_vocab_size), **sizes)
    head = OwnMtp(config)
    _load(head, layout, prefix, tensors, target)
    return head.to(target.device).bind(target)


def _load(head: OwnMtp, layout: Layout, prefix: str, tensors: _Checkpoint, target: Target) -> None:
    below = [name.removeprefix(prefix) for name in tensors.files if name.startswith(prefix)]
    if any(name.endswith("weight_scale_inv") for name in below):
        raise UserError(
            f"drafter.init: wanted an MTP layer in floating point, got one in 8 bits ({prefix}*); convert the checkpoint to bfloat16 first"
        )
    parts = {part + ".weight" for part in layout.parts} | set(layout.copies)
    own = {name.removeprefix(layout.layer): name for name in below if name not in parts and name.startswith(layout.layer)}
    model = _one_layer_model(head.config.layer)
    weights = {f"model.layers.0.{name}": tensors.read(prefix + stored).float() for name, stored in own.items()}
    weights |= {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    loaded, info = _quietly_loaded(type(model), model.config, weights)
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *(str(key) for key in info.get("mismatched_keys", []))]
    if wrong:
        raise UserError(
            f"drafter.init: wanted an MTP layer like the target's last layer, got one with other tensors ({', '.join(sorted(wrong)[:3])})"
        )
    head.layer.load_state_dict(loaded.get_decoder().layers[0].state_dict())
    with torch.no_grad():
        for ours, theirs in zip(_PARTS, layout.parts, strict=True):
            value = tensors.read(f"{prefix}{theirs}.weight").float()
            if ours == "eh_proj.weight" and not layout.embedding_first:
                value = torch.cat(value.chunk(2, dim=1)[::-1], dim=1)
            head.get_parameter(ours).copy_(value)
    for name, whole in zip(layout.copies, (target.embeddings.weight, target.lm_head.weight), strict=False):
        if name in below and not torch.equal(tensors.read(prefix + name).to(target.dtype), whole.detach().cpu()):  # type: ignore[operator]
            raise UserError(f"drafter.init: wanted an MTP layer that shares the target's embeddings and output rows, got {prefix}{name} of its own")


def _quietly_loaded(kind: Any, config: Any, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """transformers' own loading, which knows how each family's tensors are stored; what it would say of missing ones is for us to say."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        model, info = kind.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True, ignore_mismatched_sizes=True)
    finally:
        logger.setLevel(before)
    return model, info


class _Checkpoint:
    """Tensors of a model's safetensors, by name."""

    def __init__(self, path: str, revision: str | None) -> None:
        def find(name: str) -> str | None:
            found: str | None = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
            return found

        index, single = find("model.safetensors.index.json"), find("model.safetensors")
        self.files: dict[str, str] = {}
        if index is not None:
            with open(index, encoding="utf-8") as handle:
                parts = json.load(handle)["weight_map"]
            places = {part: find(part) for part in set(parts.values())}
            self.files = {name: str(places[part]) for name, part in parts.items()}
        elif single is not None:
            with safe_open(single, framework="pt") as handle:
                self.files = dict.fromkeys(handle.keys(), single)
        else:
            raise UserError(f"drafter.init: wanted a target with safetensors, got {path}, which has none")

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        if name not in self.files:
            raise UserError(f"drafter.init: wanted {name} in the target's checkpoint, got none")
        with safe_open(self.files[name], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor


def refuse_settings(settings: dict[str, Any], known: Sequence[str] = ("draft_vocab_size",)) -> None:
    """Raise UserError for a setting of the recipe that the target's own layer decides."""
    for name, value in settings.items():
        if value is not None and name not in known:
            raise UserError(f"drafter.{name}: wanted null, as the target's own MTP layer has its sizes, got {value}")
