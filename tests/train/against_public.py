"""Speed and memory of EAGLE-3's training step beside a public trainer's, which lives in an environment of its own: one JSON object as the last line.

    python -m venv /tmp/public && /tmp/public/bin/pip install speculators       or: specforge
    python tests/train/against_public.py /tmp/public/bin/python --trainer speculators --dtype float32

Both run in turns, each turn in a new process, on one thread, the same sizes, random weights and features: forward, backward and AdamW of the drafter,
which gets the target's taps and last hidden states, and forms what it is judged by from the latter and the target's output layer:
  draftsmith   the logits of the draft's vocabulary; places whose greedy choice that lacks carry no loss, and the choices are given, as they are from
               a sequence's second epoch on; with --first-epoch it forms them from the logits of the whole vocabulary
  speculators  the logits of the draft's vocabulary; it knows no such places
  specforge    the logits of the whole vocabulary and then of the draft's (`compact_teacher`); it tells every step's acceptance besides
The public trainers run as their own code says for a machine without a GPU: losses written out, as their fused ones are Triton's, and the attention
that was the fastest here. The best turn of every side counts. Keys: `tokens_per_cpu_s`, `peak_rss_above_bare_gib` of each side, `speed_ratio`,
`memory_ratio` (ours over theirs).

Dims: T sequence, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], torch.Tensor]  # forward pass: the loss
SIZES = {"seq": 1024, "hidden": 512, "vocab": 32000, "draft-vocab": 8000, "steps": 3}


def _config(options: argparse.Namespace) -> Any:
    """The draft's one layer, of `draftsmith.train.bench`'s proportions."""
    heads = max(1, options.hidden // 128)
    llama = importlib.import_module("transformers").LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=2 * options.seq,
        rms_norm_eps=1e-5,
        pad_token_id=0,
    )
    llama.draft_vocab_size = options.draft_vocab
    return llama


def speculators(options: argparse.Namespace, data: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.nn.Module, Step]:
    """(the model, a forward pass)."""
    package = importlib.import_module("speculators.models.eagle3")
    losses = importlib.import_module("speculators.losses").resolve_loss_config("kl_div", "eager")
    llama = _config(options)
    llama._attn_implementation = options.attention
    config = package.Eagle3SpeculatorConfig(
        transformer_layer_config=llama, draft_vocab_size=options.draft_vocab, eagle_aux_hidden_state_layer_ids=[2, 16, 29]
    )
    model = package.Eagle3DraftModel(config).to(dtype)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(data["rows_VH"])
        for head in (model.lm_head, model.verifier_lm_head):
            head.weight.copy_(data["rows_VH"][data["known_D"]]).requires_grad_(head is model.lm_head)
        model.t2d.zero_()[data["known_D"]] = True
        model.d2t.copy_(data["known_D"] - torch.arange(options.draft_vocab))
    one = torch.ones_like(data["ids_1T"])

    def forward() -> torch.Tensor:
        _, loss, _ = model(
            hidden_states=data["taps_1TF"],
            input_ids=data["ids_1T"],
            document_ids=one,
            loss_mask=one.bool(),
            verifier_last_hidden_states=data["hidden_1TH"],
            ttt_steps=options.steps,
            loss_config=losses,
        )
        return loss  # type: ignore[no-any-return]

    return model, forward


def specforge(options: argparse.Namespace, data: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.nn.Module, Step]:
    """(the model, a forward pass)."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    module: Any = importlib.import_module("specforge.algorithms.eagle3.model")
    written_out = importlib.import_module("specforge.core.loss")._compute_loss
    module.LogSoftmaxLoss = argparse.Namespace(apply=written_out)  # the same loss without Triton: its own tests' reference
    draft = (
        importlib.import_module("specforge.modeling.draft.llama3_eagle").LlamaForCausalLMEagle3(_config(options), attention_backend="sdpa").to(dtype)
    )
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(data["rows_VH"]).requires_grad_(False)
        draft.lm_head.weight.copy_(data["rows_VH"][data["known_D"]])
        draft.t2d.zero_()[data["known_D"]] = True
        draft.d2t.copy_(data["known_D"] - torch.arange(options.draft_vocab))
    model = module.OnlineEagle3Model(draft, length=options.steps)
    one = torch.ones_like(data["ids_1T"])

    def forward() -> torch.Tensor:
        losses, *_ = model(
            input_ids=data["ids_1T"],
            attention_mask=one,
            target=None,
            loss_mask=one.unsqueeze(-1),
            hidden_states=data["taps_1TF"],
            target_hidden_for_compact=data["hidden_1TH"],
            target_head_weight=data["rows_VH"],
        )
        total: torch.Tensor = sum(0.8**k * loss for k, loss in enumerate(losses))
        return total

    return model, forward


def work(options: argparse.Namespace) -> dict[str, float]:
    """One turn of the public trainer, in its own interpreter."""
    warnings.simplefilter("ignore")
    make = {"speculators": speculators, "specforge": specforge}[options.trainer]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    importlib.import_module({"speculators": "speculators.models.eagle3", "specforge": "specforge.algorithms.eagle3.model"}[options.trainer])
    bare, dtype = _resident("VmRSS"), getattr(torch, options.dtype)
    rows_VH = torch.randn(options.vocab, options.hidden, dtype=dtype) * options.hidden**-0.5
    known_D = torch.randperm(options.vocab)[: options.draft_vocab].sort().values
    ids_1T = known_D[torch.randint(options.draft_vocab, (1, options.seq))]
    data = {
        "rows_VH": rows_VH,
        "known_D": known_D,
        "ids_1T": ids_1T,
        "taps_1TF": torch.randn(1, options.seq, 3 * options.hidden, dtype=dtype),
        "hidden_1TH": torch.randn(1, options.seq, options.hidden, dtype=dtype) + 8 * rows_VH[ids_1T.roll(-1, 1)],
    }
    model, forward = make(options, data, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    busy = []
    for _ in range(options.repeats + 1):
        began = time.process_time()
        loss = forward()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        busy.append(time.process_time() - began)
    return {
        "tokens_per_cpu_s": round(options.seq / min(busy[1:]), 2),
        "peak_rss_above_bare_gib": round((_resident("VmHWM") - bare) / 2**30, 3),
        "parameters": sum(p.numel() for p in trained),
        "last_loss": round(float(loss.detach()), 4),
    }


def _resident(field: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or the most so far (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def run(command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints last."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command[:3])} failed: {done.stderr[-2000:]}")
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", nargs="?", default=sys.executable, help="the interpreter of the environment that the trainer is installed in")
    parser.add_argument("--trainer", choices=("speculators", "specforge"), default="speculators")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--attention", default="eager", help="of speculators: eager, or sdpa, which is a little slower and needs less memory")
    parser.add_argument("--turns", type=int, default=3, help="processes of each side")
    parser.add_argument("--repeats", type=int, default=3, help="timed training steps of a turn")
    parser.add_argument("--first-epoch", action="store_true", help="of draftsmith: form the target's greedy choices in every step")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options)))
        return
    shared = [f"--dtype={options.dtype}", f"--repeats={options.repeats}", *(f"--{n}={getattr(options, n.replace('-', '_'))}" for n in SIZES)]
    ours, theirs = [], []
    for _ in range(options.turns):
        theirs.append(run([options.python, __file__, "--worker", f"--trainer={options.trainer}", f"--attention={options.attention}", *shared]))
        mine = [sys.executable, "-m", "draftsmith.train.bench", "--method=eagle3", "--device=cpu", *shared]
        ours.append(run(mine + ["--first-epoch"] * options.first_epoch))
    best = {name: max(side, key=lambda turn: turn["tokens_per_cpu_s"]) for name, side in (("draftsmith", ours), (options.trainer, theirs))}
    kept = ("tokens_per_cpu_s", "peak_rss_above_bare_gib", "parameters", "last_loss")
    figures: dict[str, Any] = {name: {key: turn[key] for key in kept} for name, turn in best.items()}
    own, other = figures["draftsmith"], figures[options.trainer]
    figures["speed_ratio"] = round(own["tokens_per_cpu_s"] / other["tokens_per_cpu_s"], 2)
    figures["speed_ratios"] = [round(a["tokens_per_cpu_s"] / b["tokens_per_cpu_s"], 2) for a, b in zip(ours, theirs, strict=True)]
    figures["memory_ratio"] = round(own["peak_rss_above_bare_gib"] / other["peak_rss_above_bare_gib"], 2)
    print(json.dumps(figures | {key: value for key, value in vars(options).items() if key not in ("python", "worker")}))


if __name__ == "__main__":
    main()
