"""Train a small causal LM from scratch on the embedded code corpus: the target that the quickstart drafts for.

    draftsmith train quickstart/target
    draftsmith train gpu-bench/target          a third of a billion parameters, for a GPU

One loop, read from top to bottom: data, model, optimizers, steps with a periodic held-out loss, save. It exists so that the embedded weights
can be made again by anyone, and so that a GPU can be measured without a download; real targets come from elsewhere. A run that was killed goes on
from its last checkpoint, which is written whenever the held-out loss is taken.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

from .. import UserError
from ..recipes.corpus import CodeWindow, SourceFile, installed_files, source_files, windows
from . import checkpoint
from .optimizers import muon_and_adamw

if TYPE_CHECKING:
    from ..recipes.schema import TargetRecipe

EOS, PAD, USER, ASSISTANT, SYSTEM = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"

# `generation` marks the assistant's spans, so that a loss mask can be read off the template.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% elif message['role'] == 'system' %}<|system|>{{ message['content'] }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Code-shaped pieces: a run of newlines with the indentation that follows, words with one leading space, single digits, punctuation, blanks.
TOKENIZER_CHARS = 2**25  # of the corpus, from its start: what the tokenizer is trained on

SPLIT_PATTERN = r"\n+[ \t]*| ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]+|[ \t]+|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the chat template above; lossless on any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode_windows(tokenizer: PreTrainedTokenizerFast, found: Sequence[CodeWindow], length: int) -> list[list[int]]:
    """Token ids of windows as chat turns: the prompt from the user, the continuation from the assistant. EOS only where the file ends."""
    if not found:
        return []
    texts = [str(tokenizer.apply_chat_template(_turn(window), tokenize=False, add_generation_prompt=True)) for window in found]
    ids = tokenizer(texts + [window.continuation for window in found], add_special_tokens=False)["input_ids"]
    rows = [prompt + continuation for prompt, continuation in zip(ids[: len(found)], ids[len(found) :], strict=True)]
    return [(row + [tokenizer.eos_token_id] * window.ends_file)[: length + 1] for row, window in zip(rows, found, strict=True)]


def _turn(window: CodeWindow) -> list[dict[str, str]]:
    return [{"role": "user", "content": window.prompt}]


class _Corpus:
    """Random [batch, length + 1] blocks: half chat windows, half a continuous stream of files joined by EOS."""

    def __init__(self, files: list[SourceFile], tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> None:
        self.tokenizer, self.length, self.pad = tokenizer, length, tokenizer.pad_token_id
        self.random = torch.Generator().manual_seed(seed)
        parts = []
        for start in range(0, len(files), 256):  # several at once are tokenised on all cores
            for ids in tokenizer([file.text for file in files[start : start + 256]], add_special_tokens=False)["input_ids"]:
                parts.append(torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32))
        self.stream = torch.cat(parts)
        self.chats: list[CodeWindow] = []
        for file in files:
            for prompt_chars in (120, 240, 480):  # prompts of several lengths
                chars = length * 4  # more characters than tokens: the ids are cut to length
                self.chats += windows(file, prompt_chars=prompt_chars, total_chars=chars, stride_chars=chars // 2 + 7 * prompt_chars)

    def batch(self, size: int) -> torch.Tensor:
        """[size, length + 1] ids, padded with the pad id."""
        out = torch.full((size, self.length + 1), self.pad)
        chosen = []
        for row in range(size):
            if row % 2 == 0:
                chosen.append(self.chats[int(torch.randint(len(self.chats), (1,), generator=self.random))])
            else:
                start = int(torch.randint(len(self.stream) - self.length - 1, (1,), generator=self.random))
                out[row] = self.stream[start : start + self.length + 1]
        for index, chat in enumerate(encode_windows(self.tokenizer, chosen, self.length)):
            out[2 * index, : len(chat)] = torch.tensor(chat)
        return out


def build_model(recipe: TargetRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama-shaped LM with tied embeddings, initialised for depth (residual projections scaled by 1/sqrt(2 layers))."""
    shape = recipe.model
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    scale = 1.0 / math.sqrt(2 * shape.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(scale)
    return model


class MultiTokenPrediction(nn.Module):
    """One sequential module of multi-token prediction (DeepSeek-V3, 2412.19437, eqs. 21-24): it trains the features, and is not part of the model.

    From the final feature of token t and the embedding of token t+1, one more layer predicts token t+2 through the model's own lm_head. The labels
    are the model's own distributions there (detached), which say more than the one token that came.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.norms = nn.ModuleList([nn.RMSNorm(width, config.rms_norm_eps) for _ in range(2)])
        self.project = nn.Linear(2 * width, width, bias=False)
        one = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})
        self.layer = LlamaModel(one)
        del self.layer.embed_tokens  # fed with embeddings

    def forward(self, model: LlamaForCausalLM, hidden_BTH: Tensor, logits_BTV: Tensor, ids_BT: Tensor, kept_BT: Tensor) -> Tensor:
        """Mean cross-entropy against the model's own distributions. logits_BTV: those of ids_BT; kept_BT: positions whose label is no padding."""
        embedded = model.get_input_embeddings()(ids_BT[:, 1:])
        joined = torch.cat([self.norms[0](hidden_BTH[:, :-1]), self.norms[1](embedded)], -1)
        out = self.layer(inputs_embeds=self.project(joined), use_cache=False).last_hidden_state
        log_q = model.lm_head(out).float().log_softmax(-1)
        losses = -(logits_BTV[:, 1:].detach().float().softmax(-1) * log_q).sum(-1)
        kept = kept_BT[:, 1:]
        mean: Tensor = (losses * kept).sum() / kept.sum().clamp(min=1)
        return mean


class _Training(nn.Module):
    """The model with its loss, as one module, so that wrappers for several processes see one forward pass."""

    def __init__(self, model: LlamaForCausalLM, recipe: TargetRecipe, pad: int) -> None:
        super().__init__()
        self.model, self.pad = model, pad
        self.mtp_weight, self.layer_drop = recipe.train.mtp_weight, recipe.train.layer_drop
        self.mtp = MultiTokenPrediction(model.config) if self.mtp_weight else None
        self.layers = list(model.model.layers)  # all of them, in a plain list
        self.autocast = recipe.train.mixed_precision == "bf16"

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(loss to minimise, next-token loss)."""
        inputs, labels = ids[:, :-1], ids[:, 1:]
        if self.training and self.layer_drop:
            # Stochastic depth (1603.09382), more of it deeper down. The draw is shared by all processes: torch's generator is seeded alike.
            last = len(self.layers) - 1
            kept = [layer for i, layer in enumerate(self.layers) if float(torch.rand(())) >= self.layer_drop * i / last]
            self.model.model.layers = nn.ModuleList(kept)
            self.model.model.config.num_hidden_layers = len(kept)
        try:
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
                hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
                logits = self.model.lm_head(hidden)
                next_token = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=self.pad)
                if self.mtp is None:
                    return next_token, next_token.detach()
                further = self.mtp(self.model, hidden, logits, inputs, labels != self.pad)
                return next_token + self.mtp_weight * further, next_token.detach()
        finally:
            self.model.model.layers = nn.ModuleList(self.layers)
            self.model.model.config.num_hidden_layers = len(self.layers)


def schedule(step: float, steps: int, warmup: int, decay_share: float) -> float:
    """Warm-up, constant, then linear decay to 5 % over the last `decay_share` of the steps."""
    if step < warmup:
        return (step + 1) / warmup
    start = steps * (1 - decay_share)
    return 1.0 if step < start else max(0.05, 1 - 0.95 * (step - start) / (steps - start))


@torch.no_grad()
def held_out_loss(model: _Training, corpus: _Corpus, batches: int, size: int) -> float:
    """Mean cross-entropy of the next token in nats over fixed held-out blocks."""
    corpus.random.manual_seed(0)  # the same blocks every time
    model.eval()
    total = sum(float(model(corpus.batch(size))[1]) for _ in range(batches))
    model.train()
    return total / batches


def corpus_files(recipe: TargetRecipe) -> list[SourceFile]:
    """What is trained on: the library's train split, and if the recipe says so, the installed packages' after it."""
    packages = installed_files(recipe.train.corpus_mib) if recipe.train.corpus == "installed" else []
    return [*source_files("train"), *packages]


def train_language_model(recipe: TargetRecipe, out: Path, log: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train tokenizer and model by the recipe; write a Hugging Face folder to `out/model`. Returns the final figures (losses in nats per token).

    Raises UserError if the batch cannot be split among the processes.
    """
    skips = [DistributedDataParallelKwargs(find_unused_parameters=True)] if recipe.train.layer_drop else []
    accelerator = Accelerator(mixed_precision=recipe.train.mixed_precision, kwargs_handlers=skips)
    length, train, processes = recipe.train.sequence_length, recipe.train, accelerator.num_processes
    micro_batches = train.batch_size // (processes * train.micro_batch_size)
    if micro_batches * processes * train.micro_batch_size != train.batch_size:
        raise UserError(f"train.batch_size: wanted a multiple of {processes} processes x train.micro_batch_size, got {train.batch_size}")
    torch.manual_seed(train.seed)
    files, dev_files = corpus_files(recipe), source_files("dev")
    tokenizer = train_tokenizer(_first(files, TOKENIZER_CHARS), recipe.model.vocab_size, recipe.model.max_position_embeddings)
    corpus = _Corpus(files, tokenizer, length, train.seed * 1000 + accelerator.process_index)
    held_out = _Corpus(dev_files, tokenizer, length, 0)
    bare = build_model(recipe, tokenizer).to(accelerator.device)
    training = _Training(bare, recipe, corpus.pad).to(accelerator.device)
    optimizers = muon_and_adamw(training, train.lr, (0.9, 0.95), train.weight_decay)
    found = checkpoint.read_newest(out / "checkpoints", log)
    start, tokens, before = 0, 0, 0.0
    if found is not None:
        start, tokens, before = _load(found, training, optimizers, corpus, accelerator.process_index)
    model = accelerator.prepare(training)
    model.train()
    began = time.monotonic()
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in bare.parameters()), "corpus_tokens": len(corpus.stream), "processes": processes}
    for step in range(start, train.steps + 1):
        seconds = before + time.monotonic() - began
        spent = 0.0 if train.max_hours is None else float(broadcast_object_list([seconds])[0]) / (3600 * train.max_hours)
        last_step = step == train.steps or spent >= 1
        if last_step or (step > start and step % train.eval_every == 0):
            draws = gather_object([corpus.random.get_state()])
            if accelerator.is_main_process:
                loss_value = held_out_loss(training, held_out, 8, 8)
                figures |= {"step": step, "tokens": tokens, "held_out_loss": loss_value, "seconds": seconds}
                log(dict(figures))
                if last_step:
                    save(bare, tokenizer, figures, out / "model")
                else:
                    checkpoint.write(out / "checkpoints", step, _state(training, optimizers, draws, (step, tokens, seconds)), keep=1)
        if last_step:
            break
        factor = schedule(max(step, spent * train.steps), train.steps, train.warmup_steps, train.decay_share)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = train.lr * factor
        total = 0.0
        for micro in range(micro_batches):
            ids = corpus.batch(train.micro_batch_size).to(accelerator.device)
            with accelerator.no_sync(model) if micro < micro_batches - 1 else nullcontext():
                loss, next_token = model(ids)
                accelerator.backward(loss / micro_batches)
            total += next_token.item() / micro_batches
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss is {loss.item()} at step {step}; stopped before the optimizer step")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += train.batch_size * length
        if accelerator.is_main_process and step % 10 == 0:
            log({"step": step, "loss": total, "tokens_per_s": tokens / (before + time.monotonic() - began)})
    accelerator.end_training()
    return figures


def _first(files: Sequence[SourceFile], most_chars: int) -> Iterable[str]:
    for file in files:
        if most_chars <= 0:
            return
        yield file.text
        most_chars -= len(file.text)


def _state(
    training: _Training, optimizers: Sequence[torch.optim.Optimizer], draws: list[Tensor], at: tuple[int, int, float]
) -> checkpoint.Checkpoint:
    """What a run goes on from. draws: the state of each process's corpus; at: step, tokens, seconds."""
    moments = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    named = dict(training.named_parameters())
    return checkpoint.Checkpoint(
        {name: p.detach().cpu() for name, p in named.items()},
        {name: {key: torch.as_tensor(value).cpu() for key, value in moments[p].items()} for name, p in named.items() if p in moments},
        {"at": at, "draws": draws, "layers": torch.get_rng_state()},
    )


@torch.no_grad()
def _load(
    found: checkpoint.Checkpoint, training: _Training, optimizers: Sequence[torch.optim.Optimizer], corpus: _Corpus, process: int
) -> tuple[int, int, float]:
    """Put a checkpoint's weights, moments and draws back. Returns (step, tokens, seconds)."""
    owner = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, p in training.named_parameters():
        p.copy_(found.model[name])
        for key, value in found.optimizer.get(name, {}).items():
            owner[p].state[p][key] = value.clone() if key == "step" else value.clone().to(p.device)  # a step counter stays on the host
    corpus.random.set_state(found.state["draws"][process])
    torch.set_rng_state(found.state["layers"])
    step, tokens, seconds = found.state["at"]
    return int(step), int(tokens), float(seconds)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, figures: dict[str, Any], folder: Path) -> None:
    """Write the model (bfloat16), its tokenizer and the figures of its training."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
