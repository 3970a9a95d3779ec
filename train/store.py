"""The target's features of all training sequences, computed once and kept in files, so that training does without the target's layers.

    draftsmith data features RECIPE                           write it, or go on where it was interrupted
    draftsmith data features RECIPE --verify                  compare every byte with what was written
    draftsmith train RECIPE features.source=store             train from it: only the target's embeddings and output layer are loaded

A folder of
    store.json                  what it was made from: target, template, data, layers, dtype
    index.jsonl                 a line for every finished shard: its hash, and of each sequence its number, length and checksum
    shard-00000.safetensors     features of whole sequences, one after the other: layer_002 [tokens, H], .., ids [tokens]
A shard appears whole, then its line does: whatever is killed, what the index names is there. Shards hold the same sequences, computed in the same
batches, however often the writer is interrupted, so that they are the same to the last byte. Readers follow the index while it grows.

Sequences are found by their tokens, not by their number: how training orders, packs or repeats them makes no difference.

Dims: B batch, T tokens of a sequence, L layers, H hidden, F = L * H, C chunk, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .. import UserError
from ..decode.light import LightTarget, checkpoint_print
from ..decode.prompts import template_variables
from ..decode.target import Step, Target, TopK
from ..heads.blocks import Documents
from .objectives.common import Batch

SCHEMA = 1
FLOAT8 = torch.float8_e4m3fn
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8": FLOAT8}
_FLOAT8_MAX = 448.0
_BATCH_TOKENS = 8192  # padded tokens of a pass over the target
_LOGIT_PLACES = 1024  # places whose logits are held at once
_OPEN_SHARDS = 64
_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What is kept of each token: hidden states of `layers` (canonical k, see `decode/target.py`), ascending, and `topk` log-probabilities.

    float8: e4m3fn, with a float32 scale for each token and layer that brings its largest value to 448; values are then off by up to 1/16 of
    themselves, or 2^-18 of the largest one. Log-probabilities are float16, or float32 if that is the dtype.
    """

    layers: tuple[int, ...]
    dtype: str
    hidden_size: int
    topk: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Of a shard, beside its header."""
        scale = 4 if self.dtype == "float8" else 0
        return 4 + len(self.layers) * (self.hidden_size * _DTYPES[self.dtype].itemsize + scale) + (self.topk or 0) * (4 + self._wide.itemsize)

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.float16

    def encode(self, ids_T: Tensor, layers_TLH: Tensor, logits: Iterable[Tensor]) -> dict[str, Tensor]:
        """The tensors of a sequence; logits: the target's, some places at a time, read only if they are asked for."""
        parts = {"ids": ids_T.to(torch.int32)}
        for k, hidden_TH in zip(self.layers, layers_TLH.unbind(1), strict=True):
            if self.dtype == "float8":
                scale_T = hidden_TH.float().abs().amax(-1).clamp(min=1e-30) / _FLOAT8_MAX
                parts[f"layer_{k:03d}.scale"] = scale_T
                hidden_TH = (hidden_TH.float() / scale_T.unsqueeze(-1)).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
            parts[f"layer_{k:03d}"] = hidden_TH.to(_DTYPES[self.dtype])
        if self.topk is not None:
            best = [TopK.of(logits_CV.float(), self.topk) for logits_CV in logits]
            parts["topk.ids"] = torch.cat([part.ids for part in best]).to(torch.int32)
            parts["topk.log_probs"] = torch.cat([part.logits - part.logsumexp.unsqueeze(-1) for part in best]).to(self._wide)
        return {name: part.contiguous().cpu() for name, part in parts.items()}

    def decode(self, parts: dict[str, Tensor], layer: int) -> Tensor:
        """[T, H] of a layer."""
        hidden_TH = parts[f"layer_{layer:03d}"]
        return hidden_TH.float() * parts[f"layer_{layer:03d}.scale"].unsqueeze(-1) if self.dtype == "float8" else hidden_TH


def digest_of(ids: Sequence[int]) -> str:
    """The name of a sequence: a hash of its tokens."""
    return hashlib.blake2b(torch.tensor(ids, dtype=torch.int32).numpy().tobytes(), digest_size=12).hexdigest()


def describe(target: Target, sequences: Sequence[Sequence[int]], settings: dict[str, Any]) -> dict[str, Any]:
    """What features depend on. settings: those that the sequences come from, to say which of them differ."""
    names = list(dict.fromkeys(map(digest_of, sequences)))
    tokenizer = target.tokenizer
    template = "none" if tokenizer is None else f"{tokenizer.chat_template} {json.dumps(template_variables(tokenizer), sort_keys=True)}"
    return {
        "target": {
            "name": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "checkpoint": checkpoint_print(target),
            "fingerprint": target.fingerprint(),
        },
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        "data": {
            "sequences": len(names),
            "tokens": sum(map(len, sequences)),
            "digest": hashlib.sha256("".join(names).encode()).hexdigest()[:16],
            "settings": {name: str(value) for name, value in settings.items()},
        },
    }


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """["data.settings.seed 1, not 0", ..]: in what two descriptions differ. Settings count only where they made the data differ."""
    left, right = _leaves(ours), _leaves(theirs)
    if left.get("data.digest") == right.get("data.digest"):
        left, right = ({k: v for k, v in leaves.items() if not k.startswith("data.settings.")} for leaves in (left, right))
    names = [name for name in dict.fromkeys([*left, *right]) if name != "target.name" and left.get(name) != right.get(name)]
    return [f"{name} {left.get(name, 'none')}, not {right.get(name, 'none')}" for name in names]


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


# -- writing -------------------------------------------------------------------------------------------------------------------------------


def plan_shards(lengths: Sequence[int], bytes_per_token: int, shard_bytes: int) -> list[range]:
    """The sequences of each shard: as many as fit into shard_bytes, at least one."""
    shards, start, size = [], 0, 0
    for number, length in enumerate(lengths):
        if number > start and size + length * bytes_per_token > shard_bytes:
            shards.append(range(start, number))
            start, size = number, 0
        size += length * bytes_per_token
    return [*shards, range(start, len(lengths))] if len(lengths) > start else shards


def write_store(
    target: Target,
    sequences: Sequence[Sequence[int]],
    folder: Path,
    saved: Saved,
    settings: dict[str, Any],
    *,
    shard_bytes: int = 2**28,
    progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Store:
    """Write the features of all sequences, or those that are missing. progress(sequences done, all, tokens computed).

    Equal sequences are kept once. Raises UserError if the folder holds a store of something else, if another process writes to it, or if the disk
    cannot hold it.
    """
    distinct = list({digest_of(ids): list(ids) for ids in sequences}.values())
    about = describe(target, sequences, settings) | {"schema": SCHEMA, "saved": dataclasses.asdict(saved), "shard_bytes": shard_bytes}
    about = json.loads(json.dumps(about))
    with writing(folder):
        if (folder / "store.json").is_file():
            store = Store(folder)
            differing = differences(about, store.about)
            if differing:
                raise UserError(f"features.folder: wanted a new folder, got {folder}, a store of something else ({'; '.join(differing)})")
        else:
            _write_whole(folder / "store.json", (json.dumps(about, indent=2) + "\n").encode())
            store = Store(folder)
        store.cut()
        shards = plan_shards([len(ids) for ids in distinct], saved.bytes_per_token, shard_bytes)
        missing = [number for number in range(len(shards)) if not store.holds(number)]
        _check_room(folder, sum(len(distinct[i]) for number in missing for i in shards[number]) * saved.bytes_per_token)
        target.set_taps(saved.layers)
        done, tokens = len(distinct) - sum(len(shards[number]) for number in missing), 0
        progress(done, len(distinct), tokens)
        for number in missing:
            parts: list[dict[str, Tensor]] = []
            for rows in _batches([distinct[i] for i in shards[number]]):
                parts += _computed(target, rows, saved)
                tokens += sum(map(len, rows))
                progress(done + len(parts), len(distinct), tokens)
            try:
                store.add(number, parts, shards[number])
            except OSError as error:
                raise UserError(f"features.folder: {folder} cannot be written ({error.strerror}); make room, then give the same command") from error
            done += len(parts)
    return store


def _check_room(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise UserError(
            f"features.folder: wanted {wanted / 2**30:.2f} GiB free in {folder}, got {free / 2**30:.2f}; use features.source=online (or ring), "
            "features.dtype=float8, features.logits=topk, fewer data.num_prompts, or another features.folder"
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the folder for writing; a process that is killed lets go of it. Raises UserError if another one writes there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "writer.lock").open("w")
    except OSError as error:
        raise UserError(f"features.folder: wanted a folder that can be written, got {folder} ({error.strerror}); give another") from error
    with handle:
        for _ in range(20):  # a reader that asks `is_written` holds it for a moment
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        else:
            raise UserError(f"features.folder: wanted a folder to which no other process writes, got {folder}; wait for it, or end it")
        yield


def is_written(folder: Path) -> bool:
    """Whether a process writes there now."""
    if not (folder / "writer.lock").is_file():
        return False
    with (folder / "writer.lock").open("r") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _batches(sequences: list[list[int]]) -> Iterator[list[list[int]]]:
    """In order, as many as fit into a pass."""
    rows: list[list[int]] = []
    for ids in sequences:
        if rows and max(len(ids), *map(len, rows)) * (len(rows) + 1) > _BATCH_TOKENS:
            yield rows
            rows = []
        rows.append(ids)
    if rows:
        yield rows


def _computed(target: Target, rows: list[list[int]], saved: Saved) -> list[dict[str, Tensor]]:
    longest = max(map(len, rows))
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    document_BT = torch.full_like(ids_BT, -1)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        document_BT[row, : len(ids)] = 0
    ids_BT, document_BT = ids_BT.to(target.device), document_BT.to(target.device)
    step = target.features(ids_BT, torch.arange(longest, device=target.device).expand_as(ids_BT), document_BT)
    taps_BTF = step.hidden_BNH[..., :0] if step.taps_BNF is None else step.taps_BNF
    layers_BTLH = taps_BTF.view(*ids_BT.shape, len(saved.layers), saved.hidden_size)
    parts = []
    for row, ids in enumerate(rows):
        hidden_TH = step.hidden_BNH[row, : len(ids)]
        logits = (target.logits(hidden_CH) for hidden_CH in torch.split(hidden_TH, _LOGIT_PLACES))
        parts.append(saved.encode(ids_BT[row, : len(ids)], layers_BTLH[row, : len(ids)], logits))
    return parts


def _write_whole(path: Path, content: bytes) -> None:
    draft = path.with_name(path.name + ".partial")
    with draft.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    draft.rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(parts: dict[str, Tensor]) -> str:
    value = 0
    for name in sorted(parts):
        value = zlib.crc32(parts[name].contiguous().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


# -- reading -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A sequence: in which shard, from which of its rows, how many."""

    shard: int
    number: int
    start: int
    tokens: int
    checksum: str


class Store:
    """A store's index, which may grow, and its shards, mapped into memory as they are read. Raises UserError for a folder that is none."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.about: dict[str, Any] = json.loads((self.folder / "store.json").read_text(encoding="utf-8"))
            values = self.about["saved"]
            self.saved = Saved(**{**values, "layers": tuple(values["layers"])})
            self.sequences = int(self.about["data"]["sequences"])
        except FileNotFoundError as error:
            raise UserError(
                f"features.folder: wanted a store of features, got {self.folder} without store.json; make it with: draftsmith data features RECIPE"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"features.folder: {self.folder / 'store.json'} is damaged ({error}); delete the folder and make the store anew"
            ) from error
        if self.about.get("schema") != SCHEMA:
            raise UserError(f"features.folder: wanted a store of schema {SCHEMA}, got {self.about.get('schema')} in {self.folder}; make it anew")
        self.entries: dict[str, Entry] = {}
        self._shards: dict[int, dict[str, Any]] = {}
        self._offset = 0
        self._open: dict[int, Any] = {}
        self._checked: set[str] = set()
        self.refresh()

    def refresh(self) -> int:
        """Take in what was added since. Returns how many sequences there are now. Raises UserError for a damaged index."""
        path = self.folder / "index.jsonl"
        if path.is_file():
            with path.open("rb") as handle:
                handle.seek(self._offset)
                for line in handle.read().splitlines(keepends=True):
                    if not line.endswith(b"\n"):
                        break  # being written, or torn by a crash
                    self._take(line)
                    self._offset += len(line)
        return len(self.entries)

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            shard = entry["shard"]
            if entry["check"] != zlib.crc32(json.dumps(shard).encode()):
                raise ValueError("its checksum is another")
        except (ValueError, KeyError, TypeError) as error:
            where = f"{self.folder / 'index.jsonl'} at byte {self._offset}"
            raise UserError(f"features.folder: {where} is damaged ({error}); delete the file, and write the store again") from error
        self._shards[shard["number"]] = shard
        start = 0
        for name, number, tokens, checksum in shard["sequences"]:
            self.entries[name] = Entry(shard["number"], number, start, tokens, checksum)
            start += tokens

    @property
    def complete(self) -> bool:
        """Whether all sequences are there."""
        return len(self.entries) == self.sequences

    def path(self, shard: int) -> Path:
        """A shard's file."""
        return self.folder / f"shard-{shard:05d}.safetensors"

    def holds(self, shard: int) -> bool:
        """Whether a shard is in the index, and its file there in its length."""
        path = self.path(shard)
        return shard in self._shards and path.is_file() and path.stat().st_size == self._shards[shard]["bytes"]

    def cut(self) -> None:
        """Drop a torn last line, so that lines can be added. For the writer only."""
        path = self.folder / "index.jsonl"
        if path.is_file() and path.stat().st_size > self._offset:
            os.truncate(path, self._offset)

    def add(self, shard: int, parts: list[dict[str, Tensor]], numbers: Sequence[int]) -> None:
        """Write a shard of whole sequences, then its line of the index."""
        path = self.path(shard)
        content = save({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        size, hashed = len(content), hashlib.sha256(content).hexdigest()
        _write_whole(path, content)
        named = [(digest_of(part["ids"].tolist()), number, len(part["ids"]), _checksum(part)) for part, number in zip(parts, numbers, strict=True)]
        entry = {"number": shard, "bytes": size, "sha256": hashed, "sequences": named}
        if shard in self._shards and json.loads(json.dumps(entry)) == self._shards[shard]:
            return  # the file had been lost; the index knows it
        line = json.dumps({"check": zlib.crc32(json.dumps(entry).encode()), "shard": entry}) + "\n"
        with (self.folder / "index.jsonl").open("ab", buffering=0) as handle:
            handle.write(line.encode())
            os.fsync(handle.fileno())
        self.refresh()

    def read(self, name: str) -> dict[str, Tensor]:
        """The tensors of a sequence, its rows only. Raises UserError if they are not what was written, naming shard and sequence."""
        entry = self.entries[name]
        try:
            parts = self._rows(entry)
        except (OSError, SafetensorError) as error:
            raise self._damaged(entry, f"cannot be read ({error})") from error
        if name not in self._checked:
            if _checksum(parts) != entry.checksum:
                raise self._damaged(entry, f"sequence {entry.number} is not what was written")
            self._checked.add(name)
        return parts

    def _rows(self, entry: Entry) -> dict[str, Tensor]:
        if entry.shard not in self._open:
            if len(self._open) >= _OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            self._open[entry.shard] = safe_open(self.path(entry.shard), "pt")
        handle = self._open[entry.shard]
        return {key: handle.get_slice(key)[entry.start : entry.start + entry.tokens] for key in handle.keys()}  # noqa: SIM118

    def _damaged(self, entry: Entry, what: str) -> UserError:
        return UserError(f"features.folder: {self.path(entry.shard)}: {what}; delete this file, then: draftsmith data features RECIPE")

    def verify(self, progress: Callable[[int, int], None] = lambda *_: None) -> list[str]:
        """Compare every byte with what was written. Returns what is wrong, a line a shard, with its sequences. progress(shards done, all)."""
        wrong = []
        for done, (number, shard) in enumerate(sorted(self._shards.items()), 1):
            path = self.path(number)
            if not path.is_file():
                wrong.append(f"{path.name}: missing")
            elif path.stat().st_size != shard["bytes"]:
                wrong.append(f"{path.name}: {path.stat().st_size} bytes, wanted {shard['bytes']}")
            elif _sha256(path) != shard["sha256"]:
                named = [str(e.number) for e in self.entries.values() if e.shard == number and not self._intact(e)]
                where = f"sequence {', '.join(named)}" if named else "its header"
                wrong.append(f"{path.name}: {where} is not what was written")
            progress(done, len(self._shards))
        return wrong

    def _intact(self, entry: Entry) -> bool:
        try:
            return _checksum(self._rows(entry)) == entry.checksum
        except (OSError, SafetensorError):
            return False


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class StoredFeatures:
    """What training reads of a store. Raises UserError if it is of another target, template or data, or lacks a layer: it says what differs.

    layers: those that training reads, the last hidden states among them if it needs them. sequences, settings: as the store's writer got them.
    """

    def __init__(
        self, store: Store, target: Target, layers: Sequence[int], sequences: Sequence[Sequence[int]], settings: dict[str, Any], *, logits: str
    ) -> None:
        self.store, self.target = store, target
        theirs, saved = store.about, store.saved
        differing = differences(describe(target, sequences, settings), {key: theirs[key] for key in ("target", "template", "data")})
        differing = [text for text in differing if not text.startswith("target.dtype ")]  # it computed them; training need not
        if differing:
            raise UserError(f"features.folder: wanted a store of this target, template and data, got {store.folder} ({'; '.join(differing)})")
        last, kept = target.num_layers + 1, ", ".join(map(str, saved.layers)) or "none"
        lacking = sorted(set(layers) - set(saved.layers))
        if lacking:
            raise UserError(
                f"drafter.taps: wanted layers that the store {store.folder} holds ({kept}), got {', '.join(map(str, lacking))}; "
                "give another features.folder, or those taps"
            )
        if logits == "topk" and saved.topk is None:
            raise UserError(f"features.logits: wanted hidden, as the store {store.folder} holds no top-k logits, got topk")
        if logits == "hidden" and last not in saved.layers:
            raise UserError(f"features.logits: wanted topk, as the store {store.folder} holds no last hidden states (layer {last}), got hidden")
        self._topk, self._hidden = logits == "topk", last in saved.layers
        self._layers: tuple[int, ...] = ()
        if not store.complete and not is_written(store.folder):
            raise self._incomplete()

    def _incomplete(self) -> UserError:
        got = f"{len(self.store.entries)} of {self.store.sequences} in {self.store.folder}"
        return UserError(f"features.folder: wanted all sequences, got {got}; go on with: draftsmith data features RECIPE")

    def of(self, batch: Batch) -> Step:
        """The target's features of the batch, zeros at padded places. Waits for sequences that a writer is still to add."""
        saved, target, shape = self.store.saved, self.target, tuple(batch.ids_BT.shape)
        document_BT, ids_BT = batch.document_BT.cpu(), batch.ids_BT.cpu()
        taps = target.taps
        hidden_BTH = torch.zeros(*shape, saved.hidden_size if self._hidden else 0, dtype=target.dtype)
        taps_BTF = torch.zeros(*shape, len(taps) * saved.hidden_size, dtype=target.dtype)
        kept = saved.topk or 1
        topk = TopK(torch.zeros(*shape, kept, dtype=torch.int64), torch.zeros(*shape, kept), torch.zeros(shape))
        for row, start, stop in Documents(document_BT).spans:
            parts, here = self._parts(ids_BT[row, start:stop].tolist()), (row, slice(start, stop))
            if self._hidden:
                hidden_BTH[here] = saved.decode(parts, target.num_layers + 1).to(target.dtype)
            for index, k in enumerate(taps):
                taps_BTF[here][:, index * saved.hidden_size : (index + 1) * saved.hidden_size] = saved.decode(parts, k)
            if self._topk:
                topk.ids[here], topk.logits[here] = parts["topk.ids"].long(), parts["topk.log_probs"].float()
        device = target.device
        moved = TopK(topk.ids.to(device), topk.logits.to(device), topk.logsumexp.to(device)) if self._topk else None
        return Step(hidden_BTH.to(device), taps_BTF.to(device), moved)

    def close(self) -> None:
        """Nothing is held but mapped files."""

    def _parts(self, ids: list[int]) -> dict[str, Tensor]:
        name = digest_of(ids)
        while name not in self.store.entries:
            alive = is_written(self.store.folder)
            self.store.refresh()
            if name not in self.store.entries:
                if not alive:
                    raise self._incomplete()
                time.sleep(_POLL_SECONDS)
        return self.store.read(name)


def recognise(store: Store, target: LightTarget) -> None:
    """Let a target without layers pass for the one that the store is of. Raises UserError if it is another, saying in what."""
    theirs = store.about["target"]
    differing = target.recognise(theirs["fingerprint"], theirs["checkpoint"])
    if differing:
        raise UserError(
            f"features.folder: wanted a store of target {target.name}, got {store.folder}, one of {theirs['name']} ({'; '.join(differing)})"
        )
