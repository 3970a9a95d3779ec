"""Write an export: refuse what the engine would not load or not compute, write, check what was written, and only then let it appear.

source = source_of(drafter, contract, target)
export(source, "vllm", Path("exported"))
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ... import UserError
from ...decode.target import Target
from ..cross_tokenizer import CrossTokenizer
from ..draft_model import DraftModel
from ..head import Head, HeadConfig
from ..own_mtp import OwnMtp
from ..pard import Pard
from ..standalone import Standalone
from ..tuning import read_tuning as read_tuned
from . import ENGINES, llamacpp
from .common import DRAFT_MODEL, PARD, Engine, Layout, Loader, Source, TargetFacts, Tuning, save_model
from .conformance import VLLM_PATH_WORDS, Exported, failed, misleading_word

BUILTIN = "builtin:"


def engine_of(format_name: str) -> Engine:
    """Raises UserError for a format that is none."""
    if format_name not in ENGINES:
        raise UserError(f"format: wanted one of {', '.join(ENGINES)}, got {format_name}")
    return ENGINES[format_name]


def loader_of(method: str, format_name: str) -> Loader:
    """Raises UserError, naming the formats there are for the method, if the engine has none for it."""
    engine = engine_of(format_name)
    if method not in engine.loaders:
        others = ", ".join(name for name, other in ENGINES.items() if method in other.loaders) or "none"
        why = engine.why_not.get(method, "it has no loader for it")
        raise UserError(f"export {format_name}: {engine.title} cannot load {method} drafters ({why}); formats for it: {others}")
    return engine.loaders[method]


def check_export(method: str, config: Any, facts: TargetFacts, format_name: str, place: Path | None = None) -> None:
    """Raise UserError if the engine would not load such a drafter, would not compute it, or would be misled by the place of its folder."""
    loader = loader_of(method, format_name)
    reason = loader.refuse(config, facts)
    if reason is not None:
        taking = [name for name, other in ENGINES.items() if method in other.loaders and other.loaders[method].refuse(config, facts) is None]
        raise UserError(f"export {format_name}: {ENGINES[format_name].title} {reason}; formats for it as it is: {', '.join(taking) or 'none'}")
    if format_name == "vllm" and place is not None:
        vllm_method = {"eagle1": "eagle", "p_eagle": "eagle3"}.get(method, method)
        word = misleading_word(place.resolve(), vllm_method)
        if word is not None:
            raise UserError(
                f"export vllm: wanted a folder whose path does not hold {word!r}, from which vLLM takes the method {VLLM_PATH_WORDS[word]}, "
                f"got {place.resolve()}; give another folder"
            )


def source_of(
    drafter: Any, contract: dict[str, Any], target: Target, *, tuning: Tuning | None = None, name: str | None = None, dtype: torch.dtype | None = None
) -> Source:
    """What is exported. name: the target's, for people and engines. Raises UserError for drafters that are no model, such as prompt lookup."""
    facts = TargetFacts.of(target, name)
    if isinstance(drafter, DraftModel):
        drafter = drafter.standalone()
    if isinstance(drafter, OwnMtp):
        raise UserError("export: wanted an MTP head of ours, got one that starts from the target's own layer, which no format takes back yet")
    if isinstance(drafter, Head):
        return Source(drafter.method, target, facts, contract, tuning or Tuning(min(5, drafter.longest or 5)), head=drafter, dtype=dtype)
    if isinstance(drafter, Standalone | CrossTokenizer):
        shares = isinstance(drafter, Standalone)
        mask, longest = (drafter.mask_token_id, drafter.block_size) if isinstance(drafter, Pard) else (None, None)
        tuning = tuning or Tuning(min(5, longest or 5))
        method = DRAFT_MODEL if mask is None else PARD
        return Source(method, target, facts, contract, tuning, draft=drafter.draft, shares_tokenizer=shares, mask_token_id=mask, dtype=dtype)
    method = getattr(drafter, "method", type(drafter).__name__)
    raise UserError(f"export: wanted a trained head or a draft model, got {method}, which engines have of their own or not at all")


def export(source: Source, format_name: str, folder: Path, *, convert: bool = True) -> list[str]:
    """Write the folder, whole or not at all. Returns sentences for the user. convert: for llama.cpp, GGUF too, where its converter is installed.

    Raises UserError if the engine would not load it as it is meant.
    """
    loader = loader_of(source.method, format_name)
    check_export(source.method, source.head.sizes if source.head else None, source.facts, format_name, folder)
    if source.head is not None and source.head.sizes.draft_vocab_size < source.head.sizes.target_vocab_size:
        ids = source.head.draft_ids
        if int(ids.min()) < 0 or int(ids.max()) >= source.facts.vocab_size or bool((ids[1:] <= ids[:-1]).any()):
            raise UserError("export: wanted d2t as offsets to ascending target ids, got others; the checkpoint is damaged")
    old = folder.with_name(folder.name + ".old")
    check_place(folder)
    if folder.exists():
        check_place(old)  # where the older export goes until this one is in its place; one that was cut off in between is still there
    tuned = "adapter" in source.contract and folder / "target"
    if tuned:
        source = dataclasses.replace(source, facts=dataclasses.replace(source.facts, name=str(tuned.resolve())))
    layout = loader.layout(source)
    draft = folder.with_name(folder.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    if tuned:
        save_model(source.target.model, draft / "target", source.cast)
        if source.target.tokenizer is not None:
            source.target.tokenizer.save_pretrained(draft / "target")
        layout.notes.append("The target was trained together with the drafter: serve the one in ./target, whose output is not the original's.")
    if layout.model is not None:
        layout.model(draft)
    if layout.config is not None:
        save_file(layout.tensors, draft / layout.weights, metadata={"format": "pt"})
        (draft / "config.json").write_text(json.dumps(layout.config, indent=2) + "\n")
    for name, tensor in layout.files.items():
        torch.save(tensor, draft / name)
    (draft / "contract.json").write_text(json.dumps(contract_of(source, format_name, layout, folder), indent=2) + "\n")
    (draft / "README.md").write_text(readme(source, format_name, layout, folder))
    wrong = failed(Exported.read(draft, folder), loader.rules)
    if wrong:
        shutil.rmtree(draft)
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"export {format_name}: wanted a folder as {ENGINES[format_name].title} reads it, got: {'; '.join(wrong[:3])}{more}")
    sync(draft.rglob("*"))
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return [*layout.notes, *(to_gguf(source, folder) if format_name == "llamacpp" and convert else [])]


def check_place(folder: Path) -> None:
    """Raise UserError if something else than an older export lies there: it would be lost."""
    if not folder.exists():
        return
    contract = folder / "contract.json"
    old = contract.is_file() and "export" in read_json(contract)
    if not old and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out: wanted a new folder, an empty one or an older export to replace, got {folder}, which holds something else")


def to_gguf(source: Source, folder: Path, python: str | None = None) -> list[str]:
    """llama.cpp's own file of a written folder, where its converter is installed, which `python` runs. Returns a sentence.

    Raises UserError if it fails.
    """
    wants_target = source.method != DRAFT_MODEL and Path(source.target.name).is_dir()
    return [llamacpp.convert(folder, source.target.name if wants_target else None, python)]


def problems(folder: Path) -> list[str]:
    """What is wrong with an exported folder, by the rules of its format. Raises UserError if it is none."""
    exported = Exported.read(folder)
    return failed(exported, loader_of(exported.about["method"], exported.about["format"]).rules)


def sync(paths: Iterable[Path]) -> None:
    """On the disk, before the folder gets its name."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())


def draft_tokens(source: Source, layout: Layout) -> int:
    """Draft tokens a round: as measured to be best, if the engine has a choice."""
    return layout.tokens or source.tuning.tokens


def command_of(source: Source, layout: Layout, folder: Path) -> str:
    """The launch command, filled in."""
    tokens = draft_tokens(source, layout)
    return layout.launch.format(folder=folder.resolve(), target=source.facts.name, tokens=tokens, nodes=tokens + 1, block=tokens + 1)


def contract_of(source: Source, format_name: str, layout: Layout, folder: Path) -> dict[str, Any]:
    """The drafter's contract, and what the check and the import need."""
    about: dict[str, Any] = {
        "format": format_name,
        "method": source.method,
        "launch": command_of(source, layout, folder),
        "target": dataclasses.asdict(source.facts),
        "tokens": draft_tokens(source, layout),
    }
    if source.head is not None:
        config: HeadConfig = source.head.sizes
        about |= {"taps": list(config.taps), "native_config": {"method": source.method, **dataclasses.asdict(config)}}
        if hasattr(config, "mask_token_id"):
            about["mask_token_id"] = config.mask_token_id
    elif source.draft is not None and source.draft.tokenizer is None:
        about["no_tokenizer"] = True
    return {**source.contract, "export": about}


def licence(source: Source) -> str:
    """The contract's, else that of the target's card, else `unknown`: a drafter is made from its target, and from its data."""
    if isinstance(source.contract.get("license"), str):
        return str(source.contract["license"])
    card = Path(source.target.name) / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8", errors="replace").splitlines()[:40]:
            if line.startswith("license:"):
                return line.removeprefix("license:").strip()
    return "unknown"


def readme(source: Source, format_name: str, layout: Layout, folder: Path) -> str:
    """The card: what it is, the command, what was measured."""
    engine, tuning = ENGINES[format_name], source.tuning
    measured = "\n".join(f"- {line}" for line in tuning.lines) or "- nothing measured yet: `draftsmith eval`, `draftsmith tune`"
    notes = "".join(f"- {note}\n" for note in layout.notes)
    kept = f"license: {licence(source)}\nbase_model: {source.facts.name}\ntags: [speculative-decoding, {source.method}]"
    return (
        f"---\n{kept}\n---\n\n# {source.method} drafter for {source.facts.name}\n\n"
        f"Made by draftsmith for {engine.title}. It drafts for this target only: see `contract.json`.\n\n"
        f"## Launch\n\n    {command_of(source, layout, folder)}\n\n"
        f"Recommended draft tokens a round: {draft_tokens(source, layout)}.\n\n## Measured by draftsmith\n\n{measured}\n"
        + (f"\n## Notes\n\n{notes}" if notes else "")
    )


# What was measured


def read_tuning(drafter: Path) -> Tuning | None:
    """From tuning.json in the drafter's folder, else from the report of the run that it lies in; None if there is neither."""
    lines: list[str] = []
    tokens = None
    tuned = read_tuned(drafter)
    if tuned is not None:
        tokens = tuned.num_speculative_tokens
        lines += [
            f"tuned on {tuned.device}: a chain of {tokens}, or {json.dumps(tuned.decode)}",
            f"acceptance by depth and rank there, by temperature: {json.dumps(tuned.acceptance)}",
        ]
    report = drafter.parent / "eval" / "report.json"
    if report.is_file():
        values = read_json(report)
        tokens = tokens or values.get("drafter", {}).get("depth")
        shape = values.get("drafter", {})
        for row in values.get("results", []):
            if row.get("category") == "all":
                lines.append(
                    f"suite {row['suite']}, temperature {row['temperature']}, {shape.get('tree')} of {shape.get('nodes')} nodes, depth "
                    f"{shape.get('depth')}: tau {row['tau']:.2f}, accepted {row['acceptance_rate']:.1%} of drafted tokens"
                )
    if tokens is None:
        return None
    return Tuning(int(tokens), tuple(lines))


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError if it is damaged."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: wanted readable JSON, got a damaged file ({error}); delete it or measure again") from error
    return values
