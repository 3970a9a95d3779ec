"""Drafters of others, and our own exports, as drafters here: `draftsmith import FOLDER --target T --out DRAFTER`.

Read are the layouts of the EAGLE repository and SpecForge (EAGLE-1 and 3), speculators (EAGLE-3, P-EAGLE, DFlash, DSpark), vLLM (P-EAGLE, DFlash,
DSpark, MTP inside a MiMo target) and Medusa's first release (its, vLLM's and TGI's files), MLP speculators and Muse Glimmer's DFlash. What a head
of ours does not compute is refused: norm_before_residual, biases, scaled rotary positions and so on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ... import UserError, __version__
from ...decode.target import Target
from ..dflash import DFlashConfig
from ..dspark import DSparkConfig
from ..eagle1 import Eagle1Config
from ..eagle3 import Eagle3Config, default_taps
from ..head import Head, HeadConfig
from ..medusa import MedusaConfig
from ..mlp_speculator import MLPSpeculatorConfig
from ..mtp import MtpConfig
from ..p_eagle import PEagleConfig
from ..registry import METHODS
from .table import MIMO, MUSE, SPECULATOR, SPECULATORS, Renaming, Sizes, medusa_names, renamed, tensors

EAGLE_ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")


def import_drafter(folder: Path, target: Target, taps: list[int] | None = None) -> tuple[Head, dict[str, Any]]:
    """(head bound to the target, contract). taps: canonical k, for EAGLE-3 folders that do not say which layers they read (None: the reference's).

    Raises UserError for what is no such folder, does not fit the target, or computes something that our heads do not.
    """
    config, weights = read_config(folder), read_weights(folder)
    method = method_of(config, weights, folder)
    sizes, head = sized(method, config, weights, target, taps, folder)
    state = native_state(method, config, weights, Sizes.of_head(sizes), folder)
    state |= vocabulary(weights, sizes, folder)
    head.load_state_dict(state)
    check_tables(weights, target, folder)
    contract = {
        "target": {"name": target.name, "fingerprint": target.fingerprint()},
        "taps": list(head.taps),
        "imported": {"folder": str(folder), "method": method, "architectures": config.get("architectures")},
        "versions": {"draftsmith": __version__, "torch": str(torch.__version__)},
    }
    return head.to(device=target.device).eval().bind(target), contract


def sized(
    method: str, config: dict[str, Any], weights: Mapping[str, Tensor], target: Target, taps: list[int] | None, folder: Path
) -> tuple[HeadConfig, Head]:
    """A head of the sizes that config.json tells. Raises UserError if it tells none, or nonsense."""
    try:
        sizes = _SIZES[method](Layer(config, target, taps, weights))
        return sizes, METHODS[method][0](sizes)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"import {folder}: wanted a config.json that tells {error.args[0]} of the {method} head, got one without it") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"import {folder}: wanted a config.json with the sizes of a {method} head, got one that cannot be used ({error})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises UserError if there is none, or it is damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"import {folder}: wanted a drafter's folder with config.json, got {'a folder without it' if folder.is_dir() else 'no folder'}"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise UserError(f"import {folder}: wanted a mapping in config.json, got a {type(values).__name__}")
        return values
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"import {folder}: wanted a readable config.json, got a damaged one ({error})") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors, from safetensors or, in older repositories, from pickles of nothing but tensors."""
    state: dict[str, Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            state |= load_file(path)
        for path in [] if state else sorted([*folder.glob("*.bin"), *folder.glob("medusa_lm_head.pt")]):
            state |= torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise UserError(f"import {folder}: wanted readable weights, got damaged ones ({' '.join(str(error).split())[:200]})") from error
    except Exception as error:  # unpickling raises whatever it likes
        raise UserError(f"import {folder}: wanted weights that hold tensors only, got others ({type(error).__name__})") from error
    strange = next((name for name, tensor in state.items() if not isinstance(tensor, Tensor)), None)
    if strange is not None:
        raise UserError(f"import {folder}: wanted weights that hold tensors only, got {strange} of type {type(state[strange]).__name__}")
    if not state:
        raise UserError(f"import {folder}: wanted *.safetensors or *.bin beside config.json, got neither")
    return state


def method_of(config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> str:
    """By what the weights hold; only then by names, which people change."""
    kind = str(config.get("speculators_model_type", ""))
    if any("markov_head" in name for name in weights):
        return "dspark"
    if any(name.endswith("hidden_norm.weight") and "layer" not in name for name in weights) or any("output_norm_enc" in name for name in weights):
        return "dflash"
    if any(name.startswith("speculator.emb.") for name in weights):
        return "mlp_speculator"
    if any("mtp_layers.0.input_proj" in name for name in weights):
        return "mtp"
    if any("hidden_norm" in name for name in weights):
        return "p_eagle" if "mask_hidden" in weights else "eagle3"
    if any(medusa_name(name)[0].isdigit() or medusa_name(name).startswith("blocks.") for name in weights):
        return "medusa"
    if "fc.weight" in weights or "model.fc.weight" in weights:
        return "eagle1"
    raise UserError(
        f"import {folder}: wanted a head in a layout of the EAGLE repository, SpecForge, speculators, vLLM, TGI or Medusa, got architectures "
        f"{config.get('architectures')} {kind}; a draft model needs no import: give its folder to eval"
    )


def medusa_name(name: str) -> str:
    """Without the prefix that some files have."""
    return name.removeprefix("medusa_heads.").removeprefix("medusa_head.")


class Layer:
    """A foreign config, read for a target. Raises UserError for what our heads do not compute."""

    def __init__(self, config: dict[str, Any], target: Target, taps: list[int] | None, weights: Mapping[str, Tensor]) -> None:
        self.config, self.target, self.given, self.weights = config, target, taps, weights
        self.decoder: dict[str, Any] = config.get("transformer_layer_config") or config
        self.speculators = "speculators_model_type" in config
        for key, wanted in (("norm_before_residual", False), ("norm_before_fc", False), ("attention_bias", False), ("mlp_bias", False)):
            value = self.config.get(key, self.decoder.get(key))
            if value not in (wanted, None):
                raise UserError(f"import: wanted a head with {key} {str(wanted).lower()}, got {value}; our heads do not compute it")
        if self.speculators and config["speculators_model_type"] in ("eagle3", "peagle") and "norm_before_residual" not in config:
            raise UserError("import: wanted norm_before_residual written out in config.json, as readers of this format differ about its default")

    def base(self, taps: tuple[int, ...]) -> dict[str, Any]:
        """The fields of a HeadConfig."""
        target = self.target
        hidden = self.decoder.get("hidden_size", target.hidden_size)
        wide = self.config.get("target_hidden_size") or hidden
        if hidden != target.hidden_size or wide != target.hidden_size:
            raise UserError(f"import: wanted a head of the target's hidden size {target.hidden_size}, got {hidden} (target_hidden_size {wide})")
        vocab = self.decoder.get("vocab_size", target.vocab_size)
        if vocab != target.vocab_size:
            raise UserError(f"import: wanted a head for the target's vocabulary of {target.vocab_size}, got {vocab}; is it for another target?")
        d2t = self.weights.get("d2t")
        return {
            "hidden_size": hidden,
            "taps": taps,
            "target_vocab_size": vocab,
            "draft_vocab_size": vocab if d2t is None else int(d2t.numel()),
            "target_num_layers": target.num_layers,
        }

    def layer(self, taps: tuple[int, ...]) -> dict[str, Any]:
        """Those of a LayerConfig."""
        d = self.decoder
        rope = d.get("rope_parameters") or {}
        scaling = d.get("rope_scaling")
        if rope.get("rope_type", "default") != "default" or scaling:
            raise UserError(f"import: wanted plain rotary positions, got {scaling or rope}; our heads do not scale them")
        if d.get("hidden_act", "silu") != "silu":
            raise UserError(f"import: wanted hidden_act silu, got {d['hidden_act']}")
        heads = int(d["num_attention_heads"])
        return self.base(taps) | {
            "intermediate_size": int(d["intermediate_size"]),
            "num_heads": heads,
            "num_kv_heads": int(d.get("num_key_value_heads") or heads),
            "head_dim": int(d.get("head_dim") or d["hidden_size"] // heads),
            "rms_norm_eps": float(d.get("rms_norm_eps", 1e-6)),
            "rope_theta": float(rope.get("rope_theta") or d.get("rope_theta") or 10000.0),
            "max_positions": int(d.get("max_position_embeddings", 2048)),
        }

    @property
    def final(self) -> tuple[int, ...]:
        """After the final norm."""
        return (self.target.num_layers + 1,)

    def eagle3_taps(self) -> tuple[int, ...]:
        """Top level is k, nested is k - 1; if both are missing, the reference's."""
        nested = self.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        if self.config.get("eagle_aux_hidden_state_layer_ids"):
            found = list(self.config["eagle_aux_hidden_state_layer_ids"])
        else:
            found = [k + 1 for k in nested] if nested else list(default_taps(self.target.num_layers))
        return tuple(self.given or found)

    def block_taps(self) -> tuple[int, ...]:
        """DFlash's: k in the speculators format, k - 1 elsewhere."""
        if self.config.get("aux_hidden_state_layer_ids"):
            found = list(self.config["aux_hidden_state_layer_ids"])
        else:
            ids = self.config.get("dflash_config", {}).get("target_layer_ids") or self.config.get("target_layer_ids") or []
            found = [k + 1 for k in ids]
        taps = tuple(self.given or found)
        if not taps:
            raise UserError("import: wanted a config.json that tells which layers the head reads, got none; give --taps")
        return taps

    def mask(self) -> int:
        """The token that stands for what is to be drafted."""
        places = (self.config.get("dflash_config", {}), self.config)
        for key in ("mask_token_id", "pard_token", "ptd_token_id"):
            for place in places:
                if place.get(key) is not None:
                    return int(place[key])
        raise UserError("import: wanted mask_token_id in config.json, got none")

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.decoder.get("num_hidden_layers", 1))


def _eagle1(read: Layer) -> HeadConfig:
    if read.layers != 1:
        raise UserError(f"import: wanted an EAGLE-1 head of one layer, got {read.layers}")
    bias = next((tensor for name, tensor in read.weights.items() if name.endswith("fc.bias")), None)
    return Eagle1Config(**read.layer(read.final), fc_bias=bias is not None and bool(bias.any()))


def _eagle3(read: Layer) -> HeadConfig:
    norms = bool(read.config.get("fc_norm", False))
    if norms != bool(read.config.get("norm_output", False)):
        raise UserError("import: wanted fc_norm and norm_output both or neither (EAGLE-3.1), got one; our heads do not compute that")
    return Eagle3Config(**read.layer(read.eagle3_taps()), num_layers=read.layers, norm_features=norms)


def _p_eagle(read: Layer) -> HeadConfig:
    tokens = _proposed(read.config) or int(read.config.get("block_size", 8))
    return PEagleConfig(**read.layer(read.eagle3_taps()), num_layers=read.layers, block_size=max(2, tokens), mask_token_id=read.mask())


def _proposed(config: Mapping[str, Any]) -> int:
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens", 0))


def _blocks(read: Layer) -> dict[str, Any]:
    for key in ("layer_types",):
        kinds = set(read.decoder.get(key) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise UserError(f"import: wanted full attention in all layers, got {', '.join(sorted(kinds))}")
    return read.layer(read.block_taps()) | {
        "num_layers": read.layers,
        "block_size": int(read.config.get("block_size", 8)),
        "mask_token_id": read.mask(),
    }


def _dflash(read: Layer) -> HeadConfig:
    return DFlashConfig(**_blocks(read))


def _dspark(read: Layer) -> HeadConfig:
    for key, wanted in (("markov_head_type", "vanilla"), ("sample_from_anchor", True), ("confidence_head_with_markov", True)):
        if read.config.get(key, wanted) != wanted:
            raise UserError(f"import: wanted a DSpark head with {key} {wanted}, got {read.config[key]}; ours computes no other")
    return DSparkConfig(**_blocks(read), markov_rank=int(read.config["markov_rank"]))


def _medusa(read: Layer) -> HeadConfig:
    names = {medusa_name(name) for name in read.weights}
    if any(name.startswith("blocks.") for name in names):
        heads = 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blocks."))
        layers = 1 + max(int(name.split(".")[3]) for name in names if name.startswith("blocks."))
    else:
        heads = 1 + max(int(name.split(".")[0]) for name in names if name[0].isdigit())
        layers = 1 + max((int(name.split(".")[1]) for name in names if ".linear." in name), default=-1)
    base = read.base(read.final)
    if (token_map := read.weights.get("token_map")) is not None:
        base["draft_vocab_size"] = int(token_map.numel())
    return MedusaConfig(**base, heads=heads, num_layers=layers)


def _mlp_speculator(read: Layer) -> HeadConfig:
    config, base = read.config, read.base(read.final)
    if config.get("scale_input"):
        raise UserError("import: wanted an MLP speculator without scale_input, got one with it; our heads do not compute it")
    inner = int(config.get("inner_dim") or config["emb_dim"])
    return MLPSpeculatorConfig(**base, heads=int(config["n_predict"]), inner_size=inner, tie_weights=bool(config.get("tie_weights", False)))


def _mtp(read: Layer) -> HeadConfig:
    read.decoder = {"head_dim": read.target.hidden_size // int(read.decoder["num_attention_heads"]), **read.decoder}
    return MtpConfig(**read.layer((read.target.num_layers,)), raw_feature=True)


_SIZES = {
    "dflash": _dflash,
    "dspark": _dspark,
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": _mtp,
    "p_eagle": _p_eagle,
}


def native_state(method: str, config: Mapping[str, Any], weights: dict[str, Tensor], sizes: Sizes, folder: Path) -> dict[str, Tensor]:
    """Our names for their tensors. Raises UserError if one is missing or has another shape, or if there are tensors that we would leave out."""
    wanted = tensors(method, sizes)
    names = _names(method, wanted, weights, sizes)
    state, wrong = {}, []
    for ours, theirs in names.items():
        tensor = weights.get(theirs)
        if tensor is None or (tuple(tensor.shape) != wanted[ours].shape and tensor.numel() != torch.Size(wanted[ours].shape).numel()):
            wrong.append(f"{theirs} {'missing' if tensor is None else list(tensor.shape)}, wanted {list(wanted[ours].shape)}")
        else:
            state[ours] = tensor.view(wanted[ours].shape).float()
    shared = {
        "d2t",
        "t2d",
        "token_map",
        "embed_tokens.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }
    left = [
        name for name in weights if name not in names.values() and name not in shared and not _of_target(name, method) and not _zero(name, weights)
    ]
    if wrong or left:
        said = "; ".join([*wrong[:3], *(f"{name} unknown" for name in left[:3])])
        raise UserError(f"import {folder}: wanted the tensors of a {method} head, got {said}")
    if method == "mtp":
        state["eh_proj.weight"] = torch.cat(state["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    return state


def _of_target(name: str, method: str) -> bool:
    """A tensor of the target's, in whose folder an MTP head lies."""
    return method == "mtp" and "mtp_layers" not in name


def _zero(name: str, weights: Mapping[str, Tensor]) -> bool:
    """A bias that says nothing, and rotary tables."""
    return name.endswith("rotary_emb.inv_freq") or (name.endswith(".bias") and not bool(weights[name].any()))


def _names(method: str, wanted: Mapping[str, Any], weights: Mapping[str, Tensor], sizes: Sizes) -> dict[str, str]:
    """{our name: theirs}."""
    if method == "medusa":
        original = medusa_names(sizes)
        native = any(medusa_name(name).startswith("blocks.") for name in weights)
        plain = {name: name.replace(".linear.", ".") if native else original[name] for name in wanted}
        found = {medusa_name(name): name for name in weights}
        return {ours: found.get(theirs, theirs) for ours, theirs in plain.items()}
    renaming: Renaming = {"mlp_speculator": SPECULATOR, "mtp": MIMO}.get(method, ())
    if method == "dflash" and "encoder.fc.weight" in weights:
        renaming = MUSE
    if method in ("eagle3", "p_eagle") and not any("midlayer." in name for name in weights):
        renaming = SPECULATORS
    names = {name: renamed(name, renaming) for name in wanted}
    prefixed = "model.fc.weight" in weights
    return {ours: "model." + theirs if prefixed and "model." + theirs in weights else theirs for ours, theirs in names.items()}


def vocabulary(weights: Mapping[str, Tensor], sizes: HeadConfig, folder: Path) -> dict[str, Tensor]:
    """d2t and t2d. Raises UserError for maps that are no offsets to ascending ids."""
    d2t = torch.zeros(sizes.draft_vocab_size, dtype=torch.int64)
    if "d2t" in weights:
        d2t = weights["d2t"].to(torch.int64)
    elif "token_map" in weights:
        d2t = weights["token_map"].to(torch.int64) - torch.arange(sizes.draft_vocab_size)
    ids = torch.arange(sizes.draft_vocab_size) + d2t
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids.min()) < 0 or int(ids.max()) >= sizes.target_vocab_size:
        raise UserError(f"import {folder}: wanted d2t as offsets to ascending target ids, got others (absolute ids?)")
    t2d = torch.zeros(sizes.target_vocab_size, dtype=torch.bool)
    t2d[ids] = True
    if "t2d" in weights and not torch.equal(weights["t2d"].bool(), t2d):
        raise UserError(f"import {folder}: wanted d2t and t2d to tell the same tokens, got different ones; d2t may hold absolute ids")
    return {"d2t": d2t, "t2d": t2d}


def check_tables(weights: Mapping[str, Tensor], target: Target, folder: Path) -> None:
    """Our heads use the target's embeddings: a table of the head's own must be the same, up to the rounding of half precision."""
    table = weights.get("embed_tokens.weight", weights.get("model.embed_tokens.weight"))
    with torch.no_grad():
        theirs: Tensor = target.embeddings(torch.arange(target.vocab_size, device=target.device))
    if table is not None and (table.shape != theirs.shape or not torch.allclose(table.float(), theirs.cpu().float(), rtol=2e-2, atol=1e-3)):
        raise UserError(
            f"import {folder}: wanted the target's embeddings, got others; is it for another target, or trained with embeddings of its own?"
        )
