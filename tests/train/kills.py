"""Kill the writer of a store of features at random moments, and compare what it leaves in the end with an undisturbed run: `kills.py 20`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from draftsmith.decode.target import Target
from draftsmith.train.store import Saved, Store, write_store
from transformers import AutoModelForCausalLM, LlamaConfig

SEQUENCES = 120


def write(target: Target, folder: Path) -> Store:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 97, (7 + 4 * (i % 5),), generator=generator).tolist() for i in range(SEQUENCES)]
    return write_store(target, texts, folder, Saved(layers=(1, 2, 5), dtype="float32", hidden_size=32, topk=4), {}, shard_bytes=12_000)


def killed(target: Target, folder: Path, seconds: float) -> bool:
    """Whether a writer was still at work after so long, and is no more."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        write(target, folder)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(kills: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = Target(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=97, **sizes)), None, "tiny")
    generator = torch.Generator().manual_seed(int(time.time()))
    with tempfile.TemporaryDirectory() as name:
        broken, whole = Path(name, "killed"), Path(name, "undisturbed")
        began = time.monotonic()
        write(target, whole)
        each, at_work = (time.monotonic() - began) / (kills / 2 + 1), 0
        for _ in range(kills):
            at_work += killed(target, broken, 2 * each * float(torch.rand((), generator=generator)))
        write(target, broken)
        files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (broken, whole)]
        assert files[0] == files[1], sorted(name for name in {*files[0], *files[1]} if files[0].get(name) != files[1].get(name))
        lines = [json.loads(line)["shard"]["sequences"] for line in (broken / "index.jsonl").read_text().splitlines()]
        assert [number for shard in lines for _, number, _, _ in shard] == list(range(SEQUENCES))
        store = Store(broken)
        assert store.complete and store.verify() == []
    print(json.dumps({"kills": kills, "at_work": at_work, "shards": len(lines), "sequences": SEQUENCES}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
