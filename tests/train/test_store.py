"""Stores of features: what is read is what was computed, whatever happened to the writer, and only for the target, template and data it is of."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.train.features import Features
from draftsmith.train.objectives.common import Batch
from draftsmith.train.store import FLOAT8, Saved, Store, StoredFeatures, digest_of, is_written, plan_shards, write_store, writing

from ..heads.tiny import tiny_target

LAYERS = (1, 3, 5)  # 5: after the final norm, of 4 layers
SHARD = 16_000  # bytes: two or three sequences


def sequences(count: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 97, (7 + 4 * (i % 5),), generator=generator).tolist() for i in range(count)]


def saved(dtype: str = "float32", layers: tuple[int, ...] = LAYERS, topk: int | None = None) -> Saved:
    return Saved(layers=layers, dtype=dtype, hidden_size=32, topk=topk)


def packed(texts: list[list[int]], rows: list[list[int]]) -> Batch:
    """Rows of several sequences each, then padding."""
    longest = 2 + max(sum(len(texts[i]) for i in row) for row in rows)
    ids, position, document = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64), None
    document = torch.full_like(ids, -1)
    for r, row in enumerate(rows):
        start = 0
        for d, i in enumerate(row):
            here = slice(start, start + len(texts[i]))
            ids[r, here], position[r, here], document[r, here] = torch.tensor(texts[i]), torch.arange(len(texts[i])), d
            start += len(texts[i])
    return Batch(ids, document >= 0, position, document)


def reader(folder: Path, target: Target, texts: list[list[int]], **changes: Any) -> StoredFeatures:
    settings = {"layers": LAYERS, "settings": {"seed": 0}, "logits": "hidden"} | changes
    return StoredFeatures(Store(folder), target, sequences=texts, **settings)


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".safetensors" or path.name == "index.jsonl"}


def test_what_is_read_is_what_was_computed(tmp_path: Path) -> None:
    """float32, in packed rows of another order than they were written in; and the bytes a token are those of the plan."""
    target, texts = tiny_target(), sequences()
    store = write_store(target, texts, tmp_path, saved(), {"seed": 0}, shard_bytes=SHARD)
    assert store.complete and len(shards_of(tmp_path)) > 3 and store.verify() == []
    target.set_taps((1, 3))
    batch = packed(texts, [[8, 0, 3], [4, 4], [2]])
    want, got = Features(target).of(batch), reader(tmp_path, target, texts).of(batch)
    real = batch.document_BT >= 0
    assert want.taps_BNF is not None and got.taps_BNF is not None and got.topk is None
    torch.testing.assert_close(got.hidden_BNH[real], want.hidden_BNH[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.taps_BNF[real], want.taps_BNF[real], atol=1e-5, rtol=1e-5)
    assert not got.hidden_BNH[~real].any()
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size / sum(map(len, texts)) == pytest.approx(saved().bytes_per_token, rel=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8"])
def test_smaller_types_are_as_exact_as_they_say(tmp_path: Path, dtype: str) -> None:
    target, texts = tiny_target(), sequences(4)
    kept = saved(dtype, topk=5)
    store = write_store(target, texts, tmp_path, kept, {})
    target.set_taps(LAYERS)
    plain = Features(target).of(packed(texts, [[2]]))
    assert plain.taps_BNF is not None
    length = len(texts[2])
    parts = store.read(digest_of(texts[2]))
    assert parts["layer_001"].dtype == (FLOAT8 if dtype == "float8" else getattr(torch, dtype))
    for index, layer in enumerate(LAYERS):
        want = plain.taps_BNF[0, :length, 32 * index : 32 * index + 32]
        share = {"bfloat16": 2**-8, "float16": 2**-10, "float8": 2**-4}[dtype]
        floor = 2**-18 * want.abs().amax(-1, keepdim=True)
        error = (kept.decode(parts, layer).float() - want).abs()
        assert (error <= 1.01 * share * want.abs() + floor + 1e-6).all()
    log_probs = target.logits(plain.hidden_BNH[0, :length]).log_softmax(-1).topk(5)
    assert torch.equal(parts["topk.ids"].long(), log_probs.indices)
    torch.testing.assert_close(parts["topk.log_probs"].float(), log_probs.values, atol=5e-3, rtol=2e-3)
    size = (tmp_path / "shard-00000.safetensors").stat().st_size - 2000
    assert 0.9 * size < kept.bytes_per_token * sum(map(len, texts)) < 1.1 * size + 2000


def test_a_store_of_top_k_alone_needs_no_hidden_states(tmp_path: Path) -> None:
    target, texts = tiny_target(), sequences()
    write_store(target, texts, tmp_path, saved(layers=(), topk=6), {"seed": 0})
    target.set_taps(())
    batch = packed(texts, [[1], [3]])
    step = reader(tmp_path, target, texts, layers=(), logits="topk").of(batch)
    assert step.hidden_BNH.shape[-1] == 0 and step.topk is not None
    real = batch.document_BT >= 0
    target.set_taps(())
    logits = target.logits(Features(target).of(batch).hidden_BNH)
    want = logits.log_softmax(-1).topk(6).values
    torch.testing.assert_close(step.topk.logits[real], want[real], atol=5e-3, rtol=2e-3)
    torch.testing.assert_close(step.topk.missing[real], 1 - want.exp().sum(-1)[real], atol=5e-3, rtol=0)
    with pytest.raises(UserError, match=r"features.logits: wanted topk, as the store .* holds no last hidden states \(layer 5\), got hidden"):
        reader(tmp_path, target, texts, layers=())


def test_shards_are_planned_alike_and_hold_whole_sequences() -> None:
    assert plan_shards([4, 4, 4, 20, 1], 10, 90) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    assert plan_shards([], 10, 90) == []


@pytest.mark.parametrize("shard", [0, 2])
def test_a_flipped_byte_is_found_and_named(tmp_path: Path, shard: int) -> None:
    target, texts = tiny_target(), sequences()
    store = write_store(target, texts, tmp_path, saved(), {"seed": 0}, shard_bytes=SHARD)
    path = store.path(shard)
    name, entry = next((name, entry) for name, entry in store.entries.items() if entry.shard == shard and entry.start > 0)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    begin = header + json.loads(content[8:header])["layer_003"]["data_offsets"][0]
    content[begin + (entry.start + 2) * 32 * 4 + 17] ^= 4
    path.write_bytes(content)
    assert Store(tmp_path).verify() == [f"{path.name}: sequence {entry.number} is not what was written"]
    with pytest.raises(UserError, match=rf"{path.name}: sequence {entry.number} is not what was written; delete this file"):
        Store(tmp_path).read(name)
    good = shards_of(tmp_path)
    path.unlink()
    assert write_store(target, texts, tmp_path, saved(), {"seed": 0}, shard_bytes=SHARD).verify() == []
    content[begin + (entry.start + 2) * 32 * 4 + 17] ^= 4
    assert shards_of(tmp_path) == good | {path.name: bytes(content)}
    path.write_bytes(content[:-9])
    assert Store(tmp_path).verify() == [f"{path.name}: {len(content) - 9} bytes, wanted {len(content)}"]


def test_a_torn_line_of_the_index_is_written_anew(tmp_path: Path) -> None:
    write_store(tiny_target(), sequences(), tmp_path, saved(), {}, shard_bytes=SHARD)
    whole = shards_of(tmp_path)
    index = tmp_path / "index.jsonl"
    index.write_bytes(whole["index.jsonl"][: 20 - len(whole["index.jsonl"].splitlines(keepends=True)[-1])])
    write_store(tiny_target(), sequences(), tmp_path, saved(), {}, shard_bytes=SHARD)
    assert shards_of(tmp_path) == whole


def test_a_damaged_index_is_found(tmp_path: Path) -> None:
    write_store(tiny_target(), sequences(), tmp_path, saved(), {}, shard_bytes=SHARD)
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"number": 1,', b'"number": 2,', 1))
    with pytest.raises(UserError, match=r"index.jsonl at byte \d+ is damaged"):
        Store(tmp_path)


def test_other_targets_templates_data_and_taps_are_refused(tmp_path: Path) -> None:
    target, texts = tiny_target(), sequences()
    write_store(target, texts, tmp_path, saved(), {"seed": 0})
    reader(tmp_path, target, texts)
    with pytest.raises(UserError, match=r"wanted a store of this target.*target.checkpoint \S+, not \S+; target.fingerprint.weights"):
        reader(tmp_path, tiny_target(seed=1), texts)
    with pytest.raises(UserError, match=r"data.digest \S+, not \S+; data.settings.seed 1, not 0"):
        reader(tmp_path, target, [*texts[1:], texts[0]], settings={"seed": 1})
    with pytest.raises(UserError, match=r"drafter.taps: wanted layers that the store \S+ holds \(1, 3, 5\), got 2, 4"):
        reader(tmp_path, target, texts, layers=(2, 3, 4, 5))
    with pytest.raises(UserError, match=r"features.logits: wanted hidden, as the store .* holds no top-k logits, got topk"):
        reader(tmp_path, target, texts, logits="topk")
    with pytest.raises(UserError, match=r"wanted a new folder, got .*, a store of something else \(saved.dtype bfloat16, not float32\)"):
        write_store(target, texts, tmp_path, saved("bfloat16"), {"seed": 0})
    with pytest.raises(UserError, match=r"got \S+ without store.json; make it with: draftsmith data features RECIPE"):
        Store(tmp_path / "none")


def test_a_store_is_read_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader starts with a part of the index, one line of it half written, and waits for what the writer has not got to."""
    monkeypatch.setattr("draftsmith.train.store._POLL_SECONDS", 0.01)
    target, texts = tiny_target(), sequences()
    write_store(target, texts, tmp_path, saved(), {"seed": 0}, shard_bytes=SHARD)
    complete = (tmp_path / "index.jsonl").read_bytes()
    lines = complete.splitlines(keepends=True)
    (tmp_path / "index.jsonl").write_bytes(lines[0] + lines[1][:30])
    with pytest.raises(UserError, match=rf"wanted all sequences, got \d of {len(texts)} in"):
        reader(tmp_path, target, texts)
    with writing(tmp_path):
        assert is_written(tmp_path)
        with pytest.raises(UserError, match="no other process writes"), writing(tmp_path):
            pass
        features = reader(tmp_path, target, texts)
        before = len(features.store.entries)
        target.set_taps((1, 3))
        thread = threading.Timer(0.2, lambda: (tmp_path / "index.jsonl").write_bytes(complete))
        thread.start()
        step = features.of(packed(texts, [[8]]))
        thread.join()
        assert before < len(texts) == len(features.store.entries) and step.hidden_BNH.any()
    assert not is_written(tmp_path)


def test_a_killed_writer_goes_on_and_nothing_is_lost_doubled_or_changed() -> None:
    """A few kills; `python tests/train/kills.py 20` makes as many as are asked for."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("kills.py")), "6"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["at_work"] >= 1 and out["shards"] > 20
