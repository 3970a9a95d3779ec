"""Speed and memory of a drafter's training step (forward, backward, optimizer) on random weights and features: JSON as the last line.

    python -m draftsmith.train.bench --method eagle3 --seq 1024 --hidden 512 --vocab 32000 --draft-vocab 8000 --steps 3 --dtype float32
    python -m draftsmith.train.bench --seq 2048 --hidden 4096 --vocab 128256 --draft-vocab 32000 --steps 3 --dtype bfloat16 --repeats 1

What the target would compute in its layers is given; the logits that the drafter is judged by are formed from its last hidden states and a random
lm_head, as in training, and are counted. Its greedy choices, which tell what lies outside the draft vocabulary, are given too, as they are from a
sequence's second epoch on (`train.keep_features_gib`); with --first-epoch they are formed from the logits of the whole vocabulary, and that is
counted. Sizes that are not given have the proportions of Llama-3.1-8B.

Keys of the JSON: `tokens_per_s` (of the fastest repeat: what else runs slows the others), `tokens_per_s_median`, `tokens_per_cpu_s` (by processor
time); `peak_rss_gib`, of the whole process, `peak_rss_above_bare_gib`, less what it held when everything was imported and nothing made, on a GPU
`peak_gpu_gib`; `last_loss`; and the settings.

Dims: B batch, T sequence, H hidden, F taps * H.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import UserError, __version__
from ..decode.target import Step, Target
from ..heads.registry import METHODS, new_head
from .objectives import OBJECTIVES
from .objectives.common import Batch, greedy_choices

_LAYERS = 32


class RandomTarget(Target):
    """What training reads of a target, without its layers: sizes, random embeddings and a random lm_head (the same matrix)."""

    def __init__(self, *, hidden: int, vocab: int, intermediate: int, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.tokenizer = "random", None
        self.config = SimpleNamespace(
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            pad_token_id=None,
        )
        self.vocab_size, self.hidden_size, self.num_layers, self.max_positions = vocab, hidden, _LAYERS, None
        self.dtype, self.device, self.taps = dtype, device, ()
        embeddings = nn.Embedding(vocab, hidden, dtype=dtype, device=device).requires_grad_(False)
        embeddings.weight.mul_(hidden**-0.5)
        lm_head = nn.Linear(hidden, vocab, bias=False, dtype=dtype, device="meta")
        lm_head.weight = embeddings.weight
        self.embeddings, self.lm_head = embeddings, lm_head

    def set_taps(self, taps: Sequence[int]) -> None:
        """Nothing to capture."""
        self.taps = tuple(taps)


def features(target: Target, ids_BT: Tensor, taps: int) -> Step:
    """Random features whose likeliest next token is `ids_BT`'s: then nearly all choices lie in a draft vocabulary that the ids are drawn from."""
    shape = (*ids_BT.shape, target.hidden_size)
    noise, read = (torch.randn(*shape[:-1], width, dtype=target.dtype, device=target.device) for width in (shape[-1], taps * shape[-1]))
    return Step(noise + 8 * target.embeddings(ids_BT), read)


def resident(peak: bool) -> int:
    """Bytes of this process in memory: now, or the most so far."""
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux: only the peak is known
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the module's docstring. Raises UserError for sizes that do not fit together."""
    bare = resident(peak=False)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    torch.manual_seed(0)
    target = RandomTarget(
        hidden=options.hidden,
        vocab=options.vocab,
        intermediate=options.intermediate,
        heads=options.heads,
        kv_heads=options.kv_heads,
        dtype=dtype,
        device=device,
    )
    settings = {"draft_vocab_size": options.draft_vocab}
    before, given = torch.get_default_dtype(), torch.device(device)
    torch.set_default_dtype(dtype)  # else a large head would be made in float32 first
    try:
        with given:
            drafter = new_head(options.method, target, settings)
    finally:
        torch.set_default_dtype(before)
    known = torch.randperm(options.vocab, device=device)[: options.draft_vocab]
    drafter.set_draft_vocabulary(known, target)
    objective = OBJECTIVES[options.method].of({"steps": options.steps, "chunk_tokens": options.chunk_tokens, "loss": options.loss})
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    shape = (options.batch, options.seq)
    ids = known[torch.randint(options.draft_vocab, shape, device=device)]
    position = torch.arange(options.seq, device=device).expand(shape)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), position, torch.zeros_like(ids))
    given_step = features(target, ids.roll(-1, 1), len(drafter.taps))
    if not options.first_epoch:
        given_step.best_BN = greedy_choices(target, given_step.hidden_BNH.flatten(0, 1)).view(ids.shape)
    seconds, busy, loss = [], [], torch.zeros(())
    for _ in range(options.repeats + options.warmup):
        _synchronise(device)
        began, busy_before = time.perf_counter(), time.process_time()
        loss, _metrics = objective(drafter, drafter, target, batch, given_step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _synchronise(device)
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - busy_before)
    timed = sorted(seconds[options.warmup :])
    peak, gib = resident(peak=True), 2**30
    figures = {
        "tokens_per_s": round(ids.numel() / timed[0], 2),
        "tokens_per_s_median": round(ids.numel() / timed[len(timed) // 2], 2),
        "tokens_per_cpu_s": round(ids.numel() / min(busy[options.warmup :]), 2),
        "peak_rss_gib": round(peak / gib, 3),
        "peak_rss_above_bare_gib": round((peak - bare) / gib, 3),
        "last_loss": round(float(loss.detach()), 4),
    }
    if device.type == "cuda":
        figures["peak_gpu_gib"] = round(torch.cuda.max_memory_allocated(device) / gib, 3)
    return figures | {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        **vars(options),
        "threads": torch.get_num_threads(),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": str(torch.__version__),
        "draftsmith": __version__,
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The settings with defaults resolved. Raises UserError for bad ones."""
    parser = _Parser(prog="python -m draftsmith.train.bench", description="Speed and memory of a training step on random weights.")
    parser.add_argument("--method", default="eagle3", choices=sorted(METHODS.keys() & OBJECTIVES.keys() - {"draft_model"}))
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000, help="the target's vocabulary")
    parser.add_argument("--draft-vocab", type=int, help="default: the whole vocabulary")
    parser.add_argument("--intermediate", type=int, help="inner size of the head's MLP; default: 3.5 hidden")
    parser.add_argument("--heads", type=int, help="default: hidden / 128, at least one")
    parser.add_argument("--kv-heads", type=int, help="default: a quarter of the heads, at least one")
    parser.add_argument("--steps", type=int, help="unrolled steps; default: the objective's own")
    parser.add_argument("--loss", help="default: the objective's own")
    parser.add_argument("--chunk-tokens", type=int, help="places whose logits are held at once; default: the objective's own")
    parser.add_argument("--first-epoch", action="store_true", help="form the target's greedy choices in every step")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5, help="timed training steps")
    parser.add_argument("--warmup", type=int, default=1, help="training steps before them")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        least = 0 if name == "warmup" else 1
        if type(value) is int and value < least:
            raise UserError(f"--{name.replace('_', '-')}: wanted at least {least}, got {value}")
    options.draft_vocab = options.draft_vocab or options.vocab
    options.intermediate = options.intermediate or options.hidden * 7 // 2
    options.heads = options.heads or max(1, options.hidden // 128)
    options.kv_heads = options.kv_heads or max(1, options.heads // 4)
    if options.hidden % options.heads:
        raise UserError(f"--heads: wanted a divisor of --hidden {options.hidden}, got {options.heads}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: wanted cpu, as this machine has no CUDA, got cuda")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (2: bad flags)."""
    try:
        result = bench(parse(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
