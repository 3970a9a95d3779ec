"""What all engine formats share: what is exported, what a format makes of it, and the config.json keys that most engines read alike."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ... import UserError
from ...decode.target import Target
from ..head import Head, HeadConfig, LayerConfig
from .table import Renaming, Sizes, renamed, tensors

if TYPE_CHECKING:
    from .conformance import Rule

DRAFT_MODEL, PARD = "draft_model", "pard"


LAYER_KEYS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "attention_bias", "mlp_bias", "sliding_window")


def _layer_of(target: Target) -> dict[str, Any]:
    config = target.config
    heads = config.num_attention_heads
    values = {key: getattr(config, key, None) for key in LAYER_KEYS}
    values["head_dim"] = getattr(config, "head_dim", None) or target.hidden_size // heads
    values["rope_parameters"] = getattr(config, "rope_parameters", None)
    return values


@dataclass(frozen=True)
class TargetFacts:
    """What exporters and checks need to know of a target."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int | None
    architecture: str
    model_type: str
    scaled_embeddings: bool  # its embedding layer does more than look rows up
    layer: dict[str, Any] = field(default_factory=dict)  # of its decoder layers: LAYER_KEYS

    @classmethod
    def of(cls, target: Target, name: str | None = None) -> TargetFacts:
        """Those of a loaded target."""
        ids = torch.arange(min(3, target.vocab_size), device=target.device)
        weight = target.embeddings.weight
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            plain = torch.equal(target.embeddings(ids), weight[ids])
        return cls(
            name=name or target.name,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            max_positions=target.max_positions,
            architecture=(getattr(target.config, "architectures", None) or [type(target.model).__name__])[0],
            model_type=str(getattr(target.config, "model_type", "")),
            scaled_embeddings=not plain,
            layer=_layer_of(target),
        )


@dataclass(frozen=True)
class Tuning:
    """What was measured: draft tokens to ask an engine for, and lines for people."""

    tokens: int
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A drafter that is exported: a head, or a draft model. The target is loaded, since some engines want its embeddings or output rows too."""

    method: str
    target: Target
    facts: TargetFacts
    contract: dict[str, Any]
    tuning: Tuning
    head: Head | None = None
    draft: Target | None = None
    shares_tokenizer: bool = True
    mask_token_id: int | None = None  # of a draft model that drafts in parallel
    dtype: torch.dtype | None = None  # None: as the drafter has them

    @property
    def sizes(self) -> Sizes:
        """The head's."""
        assert self.head is not None
        return Sizes.of_head(self.head.sizes)

    @property
    def config(self) -> Any:
        """The head's."""
        assert self.head is not None
        return self.head.sizes

    @property
    def cut(self) -> bool:
        """Whether it drafts from a part of the target's vocabulary."""
        return self.head is not None and self.head.sizes.draft_vocab_size < self.head.sizes.target_vocab_size

    def cast(self, tensor: Tensor) -> Tensor:
        """On the CPU, in the dtype of the export, storage of its own."""
        tensor = tensor.detach().cpu()
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        return tensor.clone().contiguous()

    @property
    def dtype_name(self) -> str:
        """As config.json has it."""
        floats = next(self.head.parameters()).dtype if self.head is not None else torch.float32
        return str(self.dtype or floats).removeprefix("torch.")

    def tensors(self, renaming: Renaming = ()) -> dict[str, Tensor]:
        """The head's own tensors under an engine's names."""
        assert self.head is not None
        state = self.head.state_dict()
        return {renamed(name, renaming): self.cast(state[name]) for name in tensors(self.method, self.sizes)}

    def maps(self) -> dict[str, Tensor]:
        """d2t and t2d."""
        assert self.head is not None
        return {"d2t": self.cast(self.head.d2t), "t2d": self.cast(self.head.t2d)}

    def embeddings(self) -> Tensor:
        """[T, H] what the target's embedding layer gives for every token."""
        with torch.no_grad():
            return self.cast(self.target.embeddings(torch.arange(self.facts.vocab_size, device=self.target.device)))

    def output_rows(self) -> Tensor:
        """[V, H] the target's output rows of the draft vocabulary."""
        assert self.head is not None
        rows = self.target.lm_head.weight
        assert isinstance(rows, Tensor)
        return self.cast(rows[self.head.draft_ids.to(rows.device)])

    def uncut(self, rows: Tensor) -> Tensor:
        """[V, ...] rows of an output layer -> [T, ...]: tokens outside the draft vocabulary get the mean of the rows.

        Their logit is then the mean of the others', which is below the largest: the engine's best token stays ours, without a map of the vocabulary.
        """
        assert self.head is not None
        whole = rows.float().mean(0).to(rows.dtype).expand(self.facts.vocab_size, *rows.shape[1:]).clone()
        whole[self.head.draft_ids.cpu()] = rows
        return whole


@dataclass
class Layout:
    """What a format writes. launch: the command, with {folder}, {target} and {tokens} to be filled in. model: writes a whole model itself.

    tokens: draft tokens a round, if the engine drafts so many whatever it is asked for.
    """

    launch: str
    config: dict[str, Any] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: str = "model.safetensors"
    notes: list[str] = field(default_factory=list)
    files: dict[str, Tensor] = field(default_factory=dict)  # further tensors, each pickled to a file of this name
    model: Callable[[Path], None] | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Loader:
    """How an engine loads a method. refuse: why it would not load, or not compute, this one (None: it does). rules: of a written folder."""

    layout: Callable[[Source], Layout]
    rules: Sequence[Rule]
    refuse: Callable[[Any, TargetFacts], str | None] = lambda config, facts: None


@dataclass(frozen=True)
class Engine:
    """An export format. why_not: what to say of methods that it does not load."""

    name: str
    title: str
    loaders: dict[str, Loader]
    why_not: dict[str, str] = field(default_factory=dict)


def first_refusal(*checks: Callable[[Any, TargetFacts], str | None]) -> Callable[[Any, TargetFacts], str | None]:
    """All of these, in order."""
    return lambda config, facts: next((reason for check in checks if (reason := check(config, facts)) is not None), None)


def raw_taps(config: HeadConfig, facts: TargetFacts) -> str | None:
    """Engines capture outputs of layers, neither the embeddings nor what follows the final norm."""
    if config.taps[0] < 1 or config.taps[-1] > facts.num_layers:
        return f"wanted taps in 1 .. {facts.num_layers} (outputs of layers), got {list(config.taps)}; engines capture nothing else"
    return None


def shared_embeddings(config: HeadConfig, facts: TargetFacts) -> str | None:
    """The engine looks up rows of the target's table, and nothing more."""
    return f"the embedding layer of {facts.name} scales its rows, which this engine's drafter does not" if facts.scaled_embeddings else None


def three_taps_one_layer(config: Any, facts: TargetFacts) -> str | None:
    """For engines that have EAGLE-3 in its first form only."""
    if len(config.taps) != 3:
        return f"wanted three taps, got {list(config.taps)}; train with drafter.taps=[a, b, c]"
    return one_plain_layer(config, facts)


def one_plain_layer(config: Any, facts: TargetFacts) -> str | None:
    """One decoder layer, without EAGLE-3.1's norms."""
    if config.num_layers > 1:
        return f"wanted one decoder layer, got {config.num_layers}; train with drafter.num_layers=1"
    if config.norm_features:
        return "does not compute EAGLE-3.1's norms; train with drafter.norm_features=false"
    return None


def whole_vocabulary(config: HeadConfig, facts: TargetFacts) -> str | None:
    """For engines without a map from draft ids."""
    if config.draft_vocab_size < config.target_vocab_size:
        return f"has no draft vocabulary for this method, got {config.draft_vocab_size} of {config.target_vocab_size}; train without draft_vocab_size"
    return None


def rope(theta: float) -> dict[str, Any]:
    """Old and new keys: engines read one or the other."""
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def layer_config(source: Source, model_type: str = "llama") -> dict[str, Any]:
    """The keys of a decoder of Llama's kind, all that engines would else fill with defaults of their own."""
    config: LayerConfig = source.config
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": getattr(config, "num_layers", 1),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **rope(config.rope_theta),
        "max_position_embeddings": max(config.max_positions, source.facts.max_positions or 0),
        "vocab_size": config.target_vocab_size,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": source.dtype_name,
        "torch_dtype": source.dtype_name,
    }


def widened_note(source: Source) -> list[str]:
    """Said where an engine drafts from the whole vocabulary with a head that was trained on a part of it."""
    if not source.cut:
        return []
    return [
        f"The head was trained to draft from {source.config.draft_vocab_size} of {source.config.target_vocab_size} tokens. This engine uses all rows "
        "of the target's output layer, so that it may draft the others too, and now and then drafts another token than draftsmith does."
    ]


def widened(head: Head) -> Head:
    """The same head with the target's whole vocabulary: what an engine drafts with that has no draft vocabulary. For heads without output rows."""
    config = dataclasses.replace(head.sizes, draft_vocab_size=head.sizes.target_vocab_size)
    made = type(head)(config)
    state = {name: tensor for name, tensor in head.state_dict().items() if name not in ("d2t", "t2d")}
    made.load_state_dict(state, strict=False)
    first = next(head.parameters())
    return made.to(device=first.device, dtype=first.dtype).eval().bind(head.target)


# Heads that lie in the target's own folder


def target_like_layer(config: Any, facts: TargetFacts) -> str | None:
    """The engine builds the head's layer from the target's config.json: it must be of the same kind and size."""
    ours = {
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
    }
    for key, value in ours.items():
        theirs = facts.layer.get(key)
        if theirs is not None and theirs != value:
            return f"builds the head's layer by the target's {key} {theirs}, the head has {value}"
    rope = facts.layer.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or rope.get("rope_theta", config.rope_theta) != config.rope_theta:
        return f"builds the head's layer by the target's rope {rope}, the head has plain rotary positions of theta {config.rope_theta}"
    return None


def save_model(model: Any, folder: Path, cast: Callable[[Tensor], Tensor]) -> None:
    """As transformers saves it, from tensors of their own: those of a loaded target may be parts of joined matrices."""
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a tied table by its first name only
    state = {name: tensor for name, tensor in model.state_dict().items() if name in once}
    model.save_pretrained(folder, state_dict={name: cast(tensor) for name, tensor in state.items()})


def save_target(source: Source, folder: Path, more: dict[str, Tensor], keys: dict[str, Any], without: Sequence[str] = ()) -> None:
    """The target with its tokenizer, and behind its weights a file with more of them. keys, without: what config.json gets and loses."""
    model = source.target.model
    if source.target.tokenizer is not None:
        source.target.tokenizer.save_pretrained(folder)
    save_model(model, folder, source.cast)
    shards = sorted(folder.glob("*.safetensors"))
    names = [f"model-{index + 1:05}-of-{len(shards) + 1:05}.safetensors" for index in range(len(shards) + 1)]
    placed: dict[str, str] = {}
    total = 0
    for path, name in zip(shards, names, strict=False):
        path.rename(folder / name)
        with safe_open(folder / name, framework="pt") as handle:
            placed |= {tensor: name for tensor in handle.keys()}  # noqa: SIM118  # it is no mapping
        total += (folder / name).stat().st_size
    save_file(more, folder / names[-1], metadata={"format": "pt"})
    placed |= {tensor: names[-1] for tensor in more}
    index = {"metadata": {"total_size": total + (folder / names[-1]).stat().st_size}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values |= legacy_keys(values) | keys
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in without}, indent=2) + "\n")


# Draft models


def save_draft(source: Source, folder: Path, vocab_size: int | None = None) -> None:
    """The draft model with its tokenizer. vocab_size: rows of its tables after padding or cutting (None: as they are)."""
    assert source.draft is not None
    model, draft = source.draft.model, source.draft
    if vocab_size is not None and vocab_size != draft.vocab_size:
        model = resized(model, vocab_size)
    if draft.tokenizer is not None:
        draft.tokenizer.save_pretrained(folder)
    save_model(model, folder, source.cast)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    if source.dtype is not None:
        values["dtype"] = source.dtype_name
    if source.mask_token_id is not None:
        values["pard_token"] = source.mask_token_id  # by this key engines know a parallel draft
    values |= legacy_keys(values)
    path.write_text(json.dumps(values, indent=2) + "\n")


def legacy_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Older names of what transformers writes since version 5, for engines and converters that read those."""
    parameters = values.get("rope_parameters") or {}
    keys: dict[str, Any] = {}
    if "rope_theta" in parameters:
        keys["rope_theta"] = parameters["rope_theta"]
        kind = parameters.get("rope_type", "default")
        keys["rope_scaling"] = None if kind == "default" else {k: v for k, v in parameters.items() if k != "rope_theta"}
    if "dtype" in values:
        keys["torch_dtype"] = values["dtype"]
    return keys


def resized(model: Any, vocab_size: int) -> Any:
    """A copy whose tables have so many rows: further ones are the mean of the others, so that they are never the best; fewer cut padding off."""
    model = copy.deepcopy(model)
    tables = {"in": model.get_input_embeddings(), "out": model.get_output_embeddings()}
    tied = tables["in"].weight is tables["out"].weight
    for name, table in tables.items():
        if name == "out" and tied:
            tables["out"].weight = tables["in"].weight
            continue
        rows = table.weight.data
        if len(rows) < vocab_size:
            more = rows.float().mean(0).to(rows.dtype).expand(vocab_size - len(rows), -1)
            rows = torch.cat([rows, more])
        table.weight = nn.Parameter(rows[:vocab_size].clone(), requires_grad=False)
    if tied:
        tables["out"].weight = tables["in"].weight
    if getattr(tables["out"], "bias", None) is not None:
        bias = tables["out"].bias.data
        more = bias.min().expand(max(0, vocab_size - len(bias)))
        tables["out"].bias = nn.Parameter(torch.cat([bias, more])[:vocab_size].clone(), requires_grad=False)
    tables["in"].num_embeddings = tables["out"].out_features = vocab_size
    model.config.vocab_size = vocab_size
    return model


def check_vocabulary(source: Source) -> None:
    """Raise UserError if a draft model would lose tokens that its tokenizer has."""
    assert source.draft is not None
    tokens = len(source.draft.tokenizer) if source.draft.tokenizer is not None else 0
    if tokens > source.facts.vocab_size:
        raise UserError(f"export: wanted a draft model with at most the target's {source.facts.vocab_size} tokens, got a tokenizer with {tokens}")
