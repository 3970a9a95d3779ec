"""Which drafters exist, and how they are stored: config.json + model.safetensors + contract.json."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from .. import UserError
from ..decode.free.datastore import load_datastore
from ..decode.free.hybrid import Hybrid
from ..decode.free.lookahead import Lookahead
from ..decode.free.lookup import PromptLookup
from ..decode.free.recycling import TokenRecycling
from ..decode.free.retrieval import Retrieval
from ..decode.free.suffix import SuffixAutomaton
from ..decode.proposer import Proposer
from ..decode.target import Target, read_model
from . import adapter as adapters
from .acceptance import AcceptancePredictor
from .cascade import Cascade, check_inner
from .cross_tokenizer import CrossTokenizer
from .dflash import DFlash, DFlashConfig
from .draft_model import DraftModel, DraftModelConfig
from .dspark import Calibration, DSpark, DSparkConfig
from .eagle1 import Eagle1, Eagle1Config
from .eagle3 import Eagle3, Eagle3Config
from .head import Head, HeadConfig
from .hydra import Hydra, HydraConfig
from .medusa import Medusa, MedusaConfig
from .mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from .mtp import Mtp, MtpConfig
from .own_mtp import OwnMtp, OwnMtpConfig
from .p_eagle import PEagle, PEagleConfig
from .pard import Pard
from .standalone import Standalone, compare_tokenizers, early_exit

METHODS: dict[str, tuple[type[Head], type[Any]]] = {
    "dflash": (DFlash, DFlashConfig),
    "draft_model": (DraftModel, DraftModelConfig),
    "dspark": (DSpark, DSparkConfig),
    "eagle1": (Eagle1, Eagle1Config),
    "eagle3": (Eagle3, Eagle3Config),
    "hydra": (Hydra, HydraConfig),
    "medusa": (Medusa, MedusaConfig),
    "mlp_speculator": (MLPSpeculator, MLPSpeculatorConfig),
    "p_eagle": (PEagle, PEagleConfig),
    "mtp": (Mtp, MtpConfig),
}
FILES = ("config.json", "model.safetensors", "contract.json")


class Drafter(Protocol):
    """Whatever can draft for a target: a head, a draft model, or one of the methods that need no training."""

    @property
    def method(self) -> str:
        """Its name in reports."""

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16) -> Proposer:
        """A proposer of chains ("chain") or trees ("dynamic")."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """Its parameters; none if it needs no training."""


@dataclass(frozen=True)
class Free:
    """A method that needs no training: its proposer is all there is."""

    method: str
    make: Callable[[str, int, int, int], Proposer]

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16) -> Proposer:
        """A proposer; methods that know only chains, or only trees, give those."""
        return self.make(tree, depth, topk, nodes)

    def parameters(self) -> Iterable[nn.Parameter]:
        """None."""
        return ()


FREE: dict[str, Callable[[str, int, int, int], Proposer]] = {
    "prompt_lookup": lambda tree, depth, topk, nodes: (
        PromptLookup(depth) if tree == "chain" else PromptLookup(depth, matches=topk, nodes=min(nodes, depth * topk))
    ),
    "suffix_automaton": lambda tree, depth, topk, nodes: SuffixAutomaton(depth, None if tree == "chain" else nodes),
    "lookahead": lambda tree, depth, topk, nodes: Lookahead(depth + 1, topk, nodes=min(nodes, depth * topk)),
    "token_recycling": lambda tree, depth, topk, nodes: TokenRecycling.sized(depth=depth, nodes=nodes, topk=topk),
}


@dataclass(frozen=True)
class Pair:
    """Two drafters whose trees are merged: see `Hybrid`."""

    first: Drafter
    second: Drafter

    @property
    def method(self) -> str:
        """Both names."""
        return f"hybrid:{self.first.method}+{self.second.method}"

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16) -> Hybrid:
        """A proposer of merged trees: each drafter gets the budget, and the merged tree has room for both."""
        first, second = (drafter.proposer(tree=tree, depth=depth, topk=topk, nodes=nodes) for drafter in (self.first, self.second))
        return Hybrid(first, second)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those of both, each once."""
        return {id(p): p for drafter in (self.first, self.second) for p in drafter.parameters()}.values()


def open_drafter(name: str | Path, target: Target, *, cross_tokenizer: bool = False) -> tuple[Drafter, dict[str, Any]]:
    """(drafter, contract) of a drafter's folder, of a causal LM (folder or hub name) that is to be the draft model, or of a method of `FREE`.

    retrieval:FOLDER drafts from a datastore. hybrid:A+B merges the trees of two drafters of any of these names (A holds no "+"; B may be a hybrid).
    cascade:INNER+DRAFT drafts with a causal LM, for which a method of `cascade.INNERS` drafts. early_exit:LAYERS drafts with these layers of the
    target itself, such as 0-3 or 0,1,4,5.
    cross_tokenizer: a causal LM may have another tokenizer than the target's (`CrossTokenizer`), but not in a cascade.
    Raises UserError for what is none of these, or does not belong to the target.
    """
    if str(name) in FREE:
        return Free(str(name), FREE[str(name)]), {}
    kind, _, rest = str(name).partition(":")
    if kind == "retrieval":
        return _open_retrieval(rest, target)
    if kind == "hybrid":
        return _open_hybrid(rest, target, cross_tokenizer)
    if kind == "cascade":
        return _open_cascade(rest, target)
    if kind == "early_exit":
        return early_exit(target, _layers(rest)), {"layers": _layers(rest)}
    folder = Path(name)
    if (folder / "contract.json").is_file():
        _refuse_export(folder)
        return _open_trained_draft(folder, target) if _is_model(folder) else load_drafter(folder, target)
    hub_name = not folder.exists() and str(name).count("/") == 1 and not str(name).startswith((".", "/", "~"))
    if not hub_name and not _is_model(folder):
        raise UserError(
            f"drafter {name}: wanted a drafter's folder ({', '.join(FILES)}), a causal LM's folder or hub name, one of {', '.join(FREE)}, "
            "retrieval:FOLDER, hybrid:A+B, cascade:INNER+DRAFT or early_exit:LAYERS; give a run's drafter/ folder"
        )
    if not cross_tokenizer:
        _check_tokenizer(str(name), target)
    draft = _load_beside(str(name), target)
    about: dict[str, Any] = {"name": str(name), "fingerprint": draft.fingerprint()}
    mask = getattr(draft.config, "pard_token", None)
    try:
        return (Standalone(draft) if mask is None else Pard(draft, int(mask))).bind(target), {"draft_model": about}
    except UserError:
        if not cross_tokenizer:
            raise
    crossing = CrossTokenizer(draft, target)
    return crossing, {"draft_model": about | {"shared_tokens": len(crossing.shared)}}


def open_others(names: Sequence[str], target: Target, *, cross_tokenizer: bool = False) -> dict[str, Drafter]:
    """Drafters to measure beside another, by name: those of `open_drafter`, and "free" for all of `FREE`. Raises UserError as that does."""
    expanded = dict.fromkeys(each for name in names for each in (FREE if name == "free" else [name]))
    return {name: open_drafter(name, target, cross_tokenizer=cross_tokenizer)[0] for name in expanded}


def _load_beside(name: str, target: Target) -> Target:
    """A draft model where the target is, and in its dtype."""
    return Target.load(name, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))


def _check_tokenizer(name: str, target: Target) -> None:
    """Raise UserError if a draft model's tokenizer is not the target's, before its weights are read. What cannot be read is left to the loader."""
    if target.tokenizer is None:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, RuntimeError):
        return
    compare_tokenizers(tokenizer, target.tokenizer, name, target.name)


def _open_trained_draft(folder: Path, target: Target) -> tuple[Drafter, dict[str, Any]]:
    """A draft model that was trained for this target."""
    contract = _read_contract(folder, target)
    draft, about = _load_beside(str(folder), target), contract.get("draft", {})
    made = Pard(draft, int(about["mask_token_id"]), int(about["block_size"])) if about.get("block_size") else Standalone(draft)
    predictor = AcceptancePredictor.load(folder, draft.hidden_size)
    made.predictor = None if predictor is None else predictor.to(draft.device)
    return made.bind(target), contract


def _layers(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise UserError(f"drafter early_exit:{text}: wanted layers such as early_exit:0-3 or early_exit:0,1,4,5 (counted from 0)")
    ends = [(first, last or first) for first, _, last in (part.partition("-") for part in text.split(","))]
    return [layer for first, last in ends for layer in range(int(first), int(last) + 1)]


def _is_model(folder: Path) -> bool:
    """Whether it holds a transformers model. Raises UserError if its config.json cannot be read."""
    if not (folder / "config.json").is_file():
        return False
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"drafter {folder}: wanted a readable config.json, got a damaged one ({error})") from error


def _open_retrieval(folder: str, target: Target) -> tuple[Drafter, dict[str, Any]]:
    if not folder:
        raise UserError(
            "drafter retrieval: wanted retrieval:FOLDER with a datastore's folder, got no folder; make one with draftsmith data datastore"
        )
    # A target without a tokenizer has no fingerprint, and matches no datastore.
    store = load_datastore(folder, target.fingerprint().get("tokenizer", "none"))
    about = {"folder": folder, "fingerprint": store.fingerprint, "documents": store.documents, "context": store.context}
    most = 64  # matches looked at, each of which gives at most `depth` nodes
    return Free("retrieval", lambda tree, depth, topk, nodes: Retrieval(store, depth, min(nodes, depth * most), matches=most)), {"datastore": about}


def _open_hybrid(names: str, target: Target, cross_tokenizer: bool) -> tuple[Drafter, dict[str, Any]]:
    first, _, second = names.partition("+")
    if not first or not second:
        raise UserError(f"drafter hybrid:{names}: wanted hybrid:A+B with two drafters, such as hybrid:suffix_automaton+runs/quickstart/drafter")
    (one, its), (other, theirs) = (open_drafter(name, target, cross_tokenizer=cross_tokenizer) for name in (first, second))
    return Pair(one, other), {"first": its, "second": theirs}


def _open_cascade(names: str, target: Target) -> tuple[Drafter, dict[str, Any]]:
    inner, _, name = names.partition("+")
    if not inner or not name:
        raise UserError(f"drafter cascade:{names}: wanted cascade:INNER+DRAFT, such as cascade:prompt_lookup+path/to/draft")
    check_inner(inner)  # before a model is loaded
    draft, contract = open_drafter(name, target)
    if not isinstance(draft, Standalone):
        raise UserError(f"drafter cascade:{names}: wanted a causal LM as its draft, got {draft.method}; give a model's folder or hub name")
    return Cascade(inner, draft), contract


def new_head(method: str, target: Target, settings: dict[str, Any]) -> Head:
    """An untrained head of a method for a target: see `head_config`."""
    config = head_config(method, target, settings)
    return METHODS[method][0](config).to(target.device).bind(target)


def head_config(method: str, target: Target, settings: dict[str, Any]) -> HeadConfig:
    """The sizes of a head for a target. settings: those of its `for_target`; None stands for what follows from the target.

    Raises UserError for an unknown method, and for a setting that the method does not have.
    """
    if method not in METHODS:
        raise UserError(f"drafter.method: wanted one of {', '.join(METHODS)}, got {method}")
    made: HeadConfig = METHODS[method][1].for_target(target, **known_settings(method, settings))
    return made


def known_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Those that are given. Raises UserError for one that the method does not have."""
    known = inspect.signature(METHODS[method][1].for_target).parameters
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in known:
            raise UserError(f"drafter.{name}: wanted null, as the method {method} has no such setting, got {given[name]}")
    return given


def save_drafter(drafter: Head, folder: Path, contract: dict[str, Any]) -> None:
    """Write the native folder; a draft model's is one of transformers. It appears whole or not at all: a sibling is written, synced and renamed.

    If an adapter of its target is being trained with it, that lies beside, and the contract names both.
    """
    draft = _partial(folder)
    draft.mkdir(parents=True)
    if isinstance(drafter, DraftModel):
        contract = {**contract, "draft": drafter.write(draft)}
    else:
        config = {"method": drafter.method, **dataclasses.asdict(drafter.sizes)}
        save_file({k: v.detach().contiguous().cpu() for k, v in drafter.state_dict().items()}, draft / "model.safetensors")
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if isinstance(drafter.target, adapters.TunableTarget):
        fingerprint = adapters.save(drafter.target, draft / adapters.FOLDER)
        contract = {**contract, "target": {**contract["target"], "fingerprint": fingerprint}, "adapter": adapters.FOLDER}
    (draft / "contract.json").write_text(json.dumps(contract, indent=2) + "\n")
    _appear(draft, folder)


def copy_drafter(source: Path, folder: Path) -> None:
    """Copy a saved drafter, its adapter too. The copy appears whole or not at all."""
    draft = _partial(folder)
    shutil.copytree(source, draft)
    _appear(draft, folder)


def _partial(folder: Path) -> Path:
    draft = folder.with_name(folder.name + ".partial")
    if draft.exists():
        shutil.rmtree(draft)
    return draft


def _appear(draft: Path, folder: Path) -> None:
    for path in draft.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        if old.exists():  # a replacement was cut off after its last renaming: `folder` is the newer one
            shutil.rmtree(old)
        folder.rename(old)
    draft.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def load_drafter(folder: str | Path, target: Target, *, dtype: torch.dtype | None = None) -> tuple[Head, dict[str, Any]]:
    """(drafter bound to its target, contract). Raises UserError for a folder that is none, is damaged, or belongs to another target.

    A drafter that was trained with an adapter of its target brings that along: it is merged into the target here, unless it was before.
    """
    folder = Path(folder)
    if (folder / "contract.json").is_file() and _is_model(folder):
        return _load_draft_model(folder, target, dtype or target.dtype)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"drafter {folder}: wanted a folder with {', '.join(FILES)}, got none of {', '.join(missing)}; give a run's drafter/ folder")
    try:
        values = json.loads((folder / "config.json").read_text())
        contract: dict[str, Any] = json.loads((folder / "contract.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        method = values.pop("method")
        if method not in METHODS:
            raise UserError(f"drafter {folder}: wanted method {', '.join(METHODS)}, got {method}")
        made, config = METHODS[method] if "layout" not in values else (OwnMtp, OwnMtpConfig)
        drafter = made(config(**values))
        missing = sorted(set(drafter.state_dict()) - set(tensors))
        if missing:
            raise UserError(f"drafter {folder}: wanted all tensors of its config.json, got none of {', '.join(missing[:3])}; use another checkpoint")
        drafter.load_state_dict(tensors)
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"drafter {folder}: damaged ({' '.join(str(error).split())[:200]}); use another checkpoint") from error
    _meet(folder, contract, target)
    if isinstance(drafter, DSpark) and "calibration" in contract:
        drafter.calibration = Calibration.of(contract["calibration"])
    return drafter.to(device=target.device, dtype=dtype or target.dtype).eval().bind(target), contract


def _load_draft_model(folder: Path, target: Target, dtype: torch.dtype) -> tuple[DraftModel, dict[str, Any]]:
    contract = _read_contract(folder, target)
    model, tokenizer, _ = read_model(str(folder), dtype=str(dtype).removeprefix("torch."), device="cpu")
    about = contract.get("draft", {})
    size, mask = about.get("block_size"), about.get("mask_token_id")
    return DraftModel.of(model, tokenizer, target, block_size=size, mask_token_id=mask).eval(), contract


def _read_contract(folder: Path, target: Target) -> dict[str, Any]:
    """The contract of a draft model's folder. Raises UserError if it is damaged, or of another target."""
    try:
        contract: dict[str, Any] = json.loads((folder / "contract.json").read_text(encoding="utf-8"))
        _meet(folder, contract, target)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"drafter {folder}: damaged ({' '.join(str(error).split())[:200]}); use another checkpoint") from error
    return contract


def _meet(folder: Path, contract: dict[str, Any], target: Target) -> None:
    """Merge the adapter that the drafter brings, if it does. Raises UserError if it belongs to another target."""
    differing = differences(contract, target)
    brings = "adapter" in contract and [(part, ours) for part, ours, _ in differing] == [("adapter", "none")]
    if differing and not brings:
        differs = [f"{part} {ours} is not {theirs}" for part, ours, theirs in differing]
        raise UserError(
            f"drafter {folder}: belongs to another target ({'; '.join(differs)}); wanted the one it was trained for: {contract['target']['name']}"
        )
    if brings:
        adapters.merge(target, folder / str(contract["adapter"]), contract["target"]["fingerprint"]["adapter"])


def tunes_target(name: str | Path) -> bool:
    """Whether a drafter of this name (see `open_drafter`) brings an adapter that changes the target."""
    kind, _, rest = str(name).partition(":")
    if kind == "hybrid":
        return any(map(tunes_target, rest.split("+")))
    try:
        return "adapter" in json.loads((Path(name) / "contract.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whatever it is, opening it tells
        return False


def _refuse_export(folder: Path) -> None:
    """Raise UserError for a head in an engine's format. A damaged contract is the loader's affair."""
    try:
        about = json.loads((folder / "contract.json").read_text(encoding="utf-8")).get("export", {})
    except (OSError, ValueError, AttributeError):
        return
    if "native_config" in about:
        raise UserError(f"drafter {folder}: wanted a drafter's folder, got one exported for {about['format']}; read it back with draftsmith import")


def contract_target(folder: str | Path) -> str | None:
    """The name of the target that a drafter's contract is with; None if it is no such folder."""
    path = Path(folder) / "contract.json"
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["target"]["name"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return None
    return str(name)


def differences(contract: dict[str, Any], target: Target) -> list[tuple[str, str, str]]:
    """[(part, this target's, the contract's)] of the fingerprints that differ."""
    theirs, ours = contract["target"]["fingerprint"], target.fingerprint()
    return [(part, ours.get(part, "none"), theirs.get(part, "none")) for part in sorted({*ours, *theirs}) if ours.get(part) != theirs.get(part)]
