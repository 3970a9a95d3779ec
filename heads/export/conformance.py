"""Does a written folder hold what its engine needs? Engines load incomplete or mis-indexed checkpoints without a word, so this is found out here.

    problems(Exported.read(folder))      []: all is well

A rule reads the engine's config.json and the tensors, as the engine would, and yields a sentence for what is wrong. Each engine's file lists the
rules of its formats. What the drafter should be (taps, target) is read from contract.json, nothing else is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ... import UserError
from .table import Renaming, Sizes, Spec, renamed, tensors

Problems = Iterator[str]
Rule = Callable[["Exported"], Problems]
VLLM_PATH_WORDS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}  # in vLLM's order


@dataclass(frozen=True)
class Exported:
    """A written folder. about: contract.json's `export`: format, method, taps, target. place: where it will lie (it may be checked before that)."""

    folder: Path
    place: Path
    config: dict[str, Any]
    about: dict[str, Any]
    specs: dict[str, Spec]
    files: dict[str, Path]  # which file holds each tensor

    @classmethod
    def read(cls, folder: Path, place: Path | None = None) -> Exported:
        """Raises UserError if files are missing or damaged."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            about = json.loads((folder / "contract.json").read_text(encoding="utf-8"))["export"]
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise UserError(f"export {folder}: wanted a readable config.json and contract.json, got {error}; export again") from error
        specs, files = {}, {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118  # it is no mapping
                        part = handle.get_slice(name)
                        specs[name] = Spec(tuple(part.get_shape()), _KIND_OF_FILE.get(part.get_dtype(), part.get_dtype()))
                        files[name] = path
            except SafetensorError as error:
                raise UserError(f"export {folder}: wanted a readable {path.name}, got a damaged one ({error}); export again") from error
        return cls(folder, (place or folder).resolve(), config, about, specs, files)

    def tensor(self, name: str) -> Tensor:
        """One of the file's tensors."""
        with safe_open(self.files[name], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    @property
    def target(self) -> dict[str, Any]:
        """Facts of the target."""
        facts: dict[str, Any] = self.about["target"]
        return facts

    @property
    def taps(self) -> list[int]:
        """Canonical k."""
        return list(self.about["taps"])


_KIND_OF_FILE = {"F64": "float", "F32": "float", "F16": "float", "BF16": "float", "I64": "int64", "I32": "int32", "BOOL": "bool"}


def failed(exported: Exported, rules: Sequence[Rule]) -> list[str]:
    """Every sentence of every rule."""
    return [sentence for rule in rules for sentence in rule(exported)]


# Tensors


def config_sizes(exported: Exported) -> Sizes:
    """What a plain config.json says; an engine fills in what is missing with defaults, so that nothing may be."""
    config = exported.config
    return layer_sizes_of(config, config.get("draft_vocab_size", config.get("vocab_size", 0)), int(exported.target["vocab_size"]), config)


def layer_sizes_of(layer: dict[str, Any], vocab: int, target_vocab: int, extra: dict[str, Any]) -> Sizes:
    """layer: the decoder's keys; extra: where the others are."""
    width = layer.get("head_dim") or 0
    return Sizes(
        hidden=layer.get("hidden_size", 0),
        vocab=vocab,
        target_vocab=target_vocab,
        inner=layer.get("intermediate_size", 0),
        query=layer.get("num_attention_heads", 0) * width,
        key=layer.get("num_key_value_heads", 0) * width,
        head_dim=width,
        layers=layer.get("num_hidden_layers", 1),
        rank=extra.get("markov_rank", 0),
        fc_norm=bool(extra.get("fc_norm", False)),
        taps=len(_aux(extra)),
    )


def _aux(config: dict[str, Any]) -> Sequence[int]:
    nested = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    found = (
        config.get("eagle_aux_hidden_state_layer_ids")
        or config.get("aux_hidden_state_layer_ids")
        or config.get("target_layer_ids")
        or config.get("dflash_config", {}).get("target_layer_ids")
        or nested
        or [0]
    )
    return list(found)


def has_tensors(
    method: str,
    renaming: Renaming = (),
    sizes: Callable[[Exported], Sizes] = config_sizes,
    maps: str = "if cut",
    extra: Callable[[Sizes], dict[str, Spec]] = lambda sizes: {},
    names: Callable[[Sizes], dict[str, str]] | None = None,
    optional: Sequence[str] = (),
) -> Rule:
    """Exactly the tensors of the method, with their shapes and dtypes, all finite.

    maps: d2t and t2d are there "if cut" (only with a draft vocabulary that is a part of the target's), "always" or "never".
    """

    def rule(exported: Exported) -> Problems:
        s = sizes(exported)
        naming = names(s) if names else {}
        wanted = {naming.get(name) or renamed(name, renaming): spec for name, spec in tensors(method, s).items()} | extra(s)
        if maps == "always" or (maps == "if cut" and s.vocab < s.target_vocab):
            wanted |= {"d2t": Spec((s.vocab,), "int64"), "t2d": Spec((s.target_vocab,), "bool")}
        yield from compared(exported, wanted, {name: spec for name, spec in exported.specs.items() if name not in optional or name in wanted})

    return rule


def compared(exported: Exported, wanted: dict[str, Spec], got: dict[str, Spec]) -> Problems:
    """What is missing, what is too much, what has another shape or dtype, and what is not finite."""
    for name in sorted(wanted.keys() - got.keys()):
        yield f"tensor {name} is missing"
    for name in sorted(got.keys() - wanted.keys()):
        yield f"tensor {name} is not one that the engine knows"
    for name in sorted(wanted.keys() & got.keys()):
        if got[name] != wanted[name]:
            (shape, kind), (its_shape, its_kind) = wanted[name], got[name]
            yield f"tensor {name}: wanted {kind} {list(shape)}, got {its_kind} {list(its_shape)}"
        elif wanted[name].kind == "float" and not bool(torch.isfinite(exported.tensor(name)).all()):
            yield f"tensor {name} is not finite"


def indexed(exported: Exported) -> Problems:
    """With several files of weights, loaders read what the index names, and nothing else."""
    path = exported.folder / "model.safetensors.index.json"
    placed = json.loads(path.read_text())["weight_map"] if path.is_file() else {}
    for name, file in exported.files.items():
        if placed.get(name) != file.name:
            yield f"tensor {name}: wanted it in model.safetensors.index.json, got {placed.get(name, 'nothing')}"


def good_maps(exported: Exported) -> Problems:
    """d2t: int64 offsets to ascending target ids, which t2d marks and no others."""
    if "d2t" not in exported.specs:
        return
    d2t, vocab = exported.tensor("d2t"), int(exported.target["vocab_size"])
    if d2t.dtype != torch.int64:
        yield f"d2t: wanted int64, got {d2t.dtype}"
    ids = torch.arange(d2t.numel()) + d2t
    if bool((ids < 0).any()) or bool((ids >= vocab).any()):
        yield f"d2t: wanted offsets to target ids in 0 .. {vocab - 1}, got some outside; it may hold absolute ids"
    elif bool((ids[1:] <= ids[:-1]).any()):
        yield "d2t: wanted offsets to ascending target ids, got others"
    elif "t2d" in exported.specs and exported.specs["t2d"].kind == "bool":
        marks = torch.zeros(vocab, dtype=torch.bool)
        marks[ids] = True
        t2d = exported.tensor("t2d")
        if t2d.shape == marks.shape and not torch.equal(t2d, marks):
            yield "t2d: wanted the marks of the target ids of d2t, got others; d2t may hold absolute ids"


# config.json


def says(**wanted: Any) -> Rule:
    """Keys with these values, all written out."""

    def rule(exported: Exported) -> Problems:
        for key, value in wanted.items():
            if exported.config.get(key, "nothing") != value:
                yield f"config {key}: wanted {value}, got {exported.config.get(key, 'nothing')}"

    return rule


def lacks(*keys: str) -> Rule:
    """Keys that the engine would misread."""

    def rule(exported: Exported) -> Problems:
        for key in keys:
            if key in exported.config:
                yield f"config {key}: wanted no such key, got {exported.config[key]}"

    return rule


def has(*keys: str) -> Rule:
    """Keys that must be written out, whatever they say."""

    def rule(exported: Exported) -> Problems:
        for key in keys:
            if exported.config.get(key) is None:
                yield f"config {key}: wanted it written out, got nothing"

    return rule


def plain_decoder(exported: Exported) -> Problems:
    """What no engine may be left to guess: sizes, rotary positions by old and new keys, dtype, no biases, output layer of its own."""
    yield from decoder_keys(exported.config, exported.target)
    yield from has("torch_dtype", "rope_theta")(exported)


def decoder_keys(config: dict[str, Any], target: dict[str, Any]) -> Problems:
    """`plain_decoder` of a mapping."""
    sized = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    for key in (*sized, "rms_norm_eps", "max_position_embeddings", "vocab_size", "rope_parameters"):
        if config.get(key) is None:
            yield f"config {key}: wanted it written out, got nothing"
    parameters = config.get("rope_parameters") or {}
    if "rope_theta" in config and parameters and config["rope_theta"] != parameters.get("rope_theta"):
        yield f"config rope_theta: wanted {parameters.get('rope_theta')} as in rope_parameters, got {config['rope_theta']}"
    if parameters.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        yield f"config rope_parameters: wanted rope_type default, as heads are trained with, got {parameters} {config.get('rope_scaling', '')}"
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "bias"):
        if config.get(key):
            yield f"config {key}: wanted false, got {config[key]}; the engine would read tensors that are not there"
    if config.get("vocab_size") not in (None, target["vocab_size"]):
        yield f"config vocab_size: wanted the target's {target['vocab_size']} (padding rows included), got {config['vocab_size']}"
    places = target.get("max_positions")
    if places and (config.get("max_position_embeddings") or places) < places:
        yield f"config max_position_embeddings: wanted at least the target's {places}, got {config['max_position_embeddings']}"


def explicit_bias(exported: Exported) -> Problems:
    """`bias: true` makes Llama code read attention biases that are not there."""
    if exported.config.get("bias") is not False:
        yield f"config bias: wanted false, written out, got {exported.config.get('bias', 'nothing')}"


def mask_token(*path: str) -> Rule:
    """The token that stands for what is to be drafted is one of the vocabulary, at this place of config.json."""

    def rule(exported: Exported) -> Problems:
        value: Any = exported.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        vocab = exported.target["vocab_size"]
        if not isinstance(value, int) or not 0 <= value < vocab or value != exported.about.get("mask_token_id", value):
            wanted = exported.about.get("mask_token_id", f"a token in 0 .. {vocab - 1}")
            yield f"config {'.'.join(path)}: wanted {wanted}, got {value}"

    return rule


def layers_at(*path: str, offset: int) -> Rule:
    """The list of tapped layers, in the engine's counting (canonical k + offset)."""

    def rule(exported: Exported) -> Problems:
        value: Any = exported.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        wanted = [k + offset for k in exported.taps]
        if value != wanted:
            yield f"config {'.'.join(path)}: wanted {wanted} (taps {exported.taps} in this engine's counting), got {value}"

    return rule


def layers_exist(exported: Exported) -> Problems:
    """Outputs of layers, ascending (some engines sort them), none after the final norm."""
    last = exported.target["num_layers"]
    if exported.taps != sorted(set(exported.taps)) or exported.taps[0] < 1 or exported.taps[-1] > last:
        yield f"taps: wanted ascending layers in 1 .. {last}, got {exported.taps}"


def final_norm(exported: Exported) -> Problems:
    """The head reads the hidden state after the final norm, as the engine gives it."""
    wanted = [exported.target["num_layers"] + 1]
    if exported.taps != wanted:
        yield f"taps: wanted {wanted} (after the final norm), got {exported.taps}"


def same_hidden_size(exported: Exported) -> Problems:
    """The head shares the target's embeddings or output layer, so that its width is the target's."""
    layer = exported.config.get("transformer_layer_config", exported.config)
    if layer.get("hidden_size") != exported.target["hidden_size"]:
        yield f"config hidden_size: wanted the target's {exported.target['hidden_size']}, got {layer.get('hidden_size')}"


def path_without(method: str) -> Rule:
    """vLLM takes the method from words in the path of the folder, whatever the launch command says."""

    def rule(exported: Exported) -> Problems:
        if found := misleading_word(exported.place, method):
            yield f"path: wanted one without {found!r}, from which vLLM would take the method {VLLM_PATH_WORDS[found]}, got {exported.place}; move it"

    return rule


def misleading_word(place: Path, method: str) -> str | None:
    """The word in a path that misleads vLLM about a drafter of this method, if there is one."""
    return None if method in VLLM_PATH_WORDS.values() else next((word for word in VLLM_PATH_WORDS if word in str(place).lower()), None)


def file_named(name: str) -> Rule:
    """The engine looks for weights under this name only."""

    def rule(exported: Exported) -> Problems:
        if not (exported.folder / name).is_file():
            yield f"file {name} is missing"

    return rule


def uncut_vocabulary(exported: Exported) -> Problems:
    """No draft vocabulary."""
    vocab = exported.target["vocab_size"]
    if exported.config.get("draft_vocab_size", vocab) != vocab:
        yield f"config draft_vocab_size: wanted {vocab}, got {exported.config['draft_vocab_size']}; the engine has no map for this method"


# DFlash with the whole vocabulary: one form for several engines.
DFLASH_RULES: tuple[Rule, ...] = (
    plain_decoder,
    says(architectures=["DFlashDraftModel"], model_type="qwen3"),
    has("block_size"),
    layers_exist,
    layers_at("dflash_config", "target_layer_ids", offset=-1),
    mask_token("dflash_config", "mask_token_id"),
    has_tensors("dflash", maps="never"),
    uncut_vocabulary,
    same_hidden_size,
)


# Draft models


def draft_vocabulary(exported: Exported) -> Problems:
    """As many rows as the target, by config.json: some engines compare nothing else."""
    wanted = exported.target["vocab_size"]
    if exported.config.get("vocab_size") != wanted:
        yield f"config vocab_size: wanted the target's {wanted}, got {exported.config.get('vocab_size')}"
    for name, spec in exported.specs.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and spec.shape[0] != exported.config.get("vocab_size"):
            yield f"tensor {name}: wanted {exported.config.get('vocab_size')} rows as config.json says, got {spec.shape[0]}"


def tokenizer_beside(exported: Exported) -> Problems:
    """The engine reads the draft's own tokenizer."""
    if not exported.about.get("no_tokenizer") and not any((exported.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        yield "file tokenizer.json is missing; the engine wants the draft's tokenizer"


def weights_there(exported: Exported) -> Problems:
    """Any safetensors at all."""
    if not list(exported.folder.glob("*.safetensors")):
        yield "file model.safetensors is missing"
