"""Train a small causal LM from scratch on the embedded code corpus: the target that the quickstart drafts for.

    draftsmith train quickstart/target

One loop, read from top to bottom: data, model, optimizers, steps with a periodic held-out loss, save. It exists so that the embedded weights
can be made again by anyone; real targets come from elsewhere.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..recipes.corpus import CodeWindow, SourceFile, source_files, windows

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
SPLIT_PATTERN = r"\n+[ \t]*| ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]+|[ \t]+|\s+"


def train_tokenizer(texts: Iterator[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
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


def encode_window(tokenizer: PreTrainedTokenizerFast, window: CodeWindow, length: int) -> list[int]:
    """Token ids of one window as a chat turn: the prompt from the user, the continuation from the assistant. EOS only where the file ends."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": window.prompt}], tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += tokenizer(window.continuation, add_special_tokens=False)["input_ids"]
    if window.ends_file:
        ids.append(tokenizer.eos_token_id)
    return ids[: length + 1]


class _Corpus:
    """Random [batch, length + 1] blocks: half chat windows, half a continuous stream of files joined by EOS."""

    def __init__(self, files: list[SourceFile], tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> None:
        self.length, self.pad = length, tokenizer.pad_token_id
        self.random = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        for file in files:
            ids += tokenizer(file.text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        self.stream = torch.tensor(ids)
        chats = []
        for file in files:
            for prompt_chars in (120, 240, 480):  # prompts of several lengths
                chars = length * 4  # more characters than tokens: the ids are cut to length
                for window in windows(file, prompt_chars=prompt_chars, total_chars=chars, stride_chars=chars // 2 + 7 * prompt_chars):
                    chats.append(encode_window(tokenizer, window, length))
        self.chats = chats

    def batch(self, size: int) -> torch.Tensor:
        """[size, length + 1] ids, padded with the pad id."""
        out = torch.full((size, self.length + 1), self.pad)
        for row in range(size):
            if row % 2 == 0:
                chat = self.chats[int(torch.randint(len(self.chats), (1,), generator=self.random))]
                out[row, : len(chat)] = torch.tensor(chat)
            else:
                start = int(torch.randint(len(self.stream) - self.length - 1, (1,), generator=self.random))
                out[row] = self.stream[start : start + self.length + 1]
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


def _optimizers(model: torch.nn.Module, recipe: TargetRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n or "lm_head" in n]
    muon = torch.optim.Muon(matrices, lr=recipe.train.lr, weight_decay=recipe.train.weight_decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=recipe.train.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def schedule(step: int, steps: int, warmup: int, decay_share: float) -> float:
    """Warm-up, constant, then linear decay to 5 % over the last `decay_share` of the steps."""
    if step < warmup:
        return (step + 1) / warmup
    start = steps * (1 - decay_share)
    return 1.0 if step < start else max(0.05, 1 - 0.95 * (step - start) / (steps - start))


def _loss(model: LlamaForCausalLM, ids: torch.Tensor, pad: int, autocast: bool) -> torch.Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == pad, -100)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, corpus: _Corpus, batches: int, size: int, autocast: bool) -> float:
    """Mean cross-entropy in nats per token over fixed held-out blocks."""
    corpus.random.manual_seed(0)  # the same blocks every time
    model.eval()
    total = sum(float(_loss(model, corpus.batch(size), corpus.pad, autocast)) for _ in range(batches))
    model.train()
    return total / batches


def train_language_model(recipe: TargetRecipe, out: Path, log: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train tokenizer and model by the recipe; write a Hugging Face folder to `out/model`. Returns the final figures (losses in nats per token)."""
    accelerator = Accelerator(mixed_precision=recipe.train.mixed_precision)
    torch.manual_seed(recipe.train.seed)
    train_files, dev_files = source_files("train"), source_files("dev")
    length, train = recipe.train.sequence_length, recipe.train
    tokenizer = train_tokenizer((f.text for f in train_files), recipe.model.vocab_size, recipe.model.max_position_embeddings)
    corpus = _Corpus(train_files, tokenizer, length, train.seed * 1000 + accelerator.process_index)
    held_out = _Corpus(dev_files, tokenizer, length, 0)
    bare = build_model(recipe, tokenizer).to(accelerator.device)
    optimizers = _optimizers(bare, recipe)
    model = accelerator.prepare(bare)
    model.train()
    processes, autocast = accelerator.num_processes, train.mixed_precision == "bf16"
    micro_batches = train.batch_size // (processes * train.micro_batch_size)
    if micro_batches * processes * train.micro_batch_size != train.batch_size:
        raise ValueError(
            f"train.batch_size {train.batch_size} is not a multiple of {processes} processes x train.micro_batch_size {train.micro_batch_size}"
        )
    began, tokens = time.monotonic(), 0
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in bare.parameters()), "corpus_tokens": len(corpus.stream), "processes": processes}
    for step in range(train.steps + 1):
        last_step = step == train.steps
        if accelerator.is_main_process and (last_step or (step and step % train.eval_every == 0)):
            loss_value = held_out_loss(bare, held_out, 8, 8, autocast)
            figures |= {"step": step, "tokens": tokens, "held_out_loss": loss_value, "seconds": time.monotonic() - began}
            log(dict(figures))
            save(bare, tokenizer, figures, out / "model")
        if last_step:
            break
        factor = schedule(step, train.steps, train.warmup_steps, train.decay_share)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = train.lr * factor
        total = 0.0
        for micro in range(micro_batches):
            ids = corpus.batch(train.micro_batch_size).to(accelerator.device)
            with accelerator.no_sync(model) if micro < micro_batches - 1 else nullcontext():
                loss = _loss(model, ids, corpus.pad, autocast) / micro_batches
                accelerator.backward(loss)
            total += loss.item()
        if not math.isfinite(total):
            raise FloatingPointError(f"loss is {total} at step {step}; stopped before the optimizer step")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += train.batch_size * length
        if accelerator.is_main_process and step % 10 == 0:
            log({"step": step, "loss": total, "tokens_per_s": tokens / (time.monotonic() - began)})
    accelerator.end_training()
    return figures


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, figures: dict[str, Any], folder: Path) -> None:
    """Write the model (bfloat16), its tokenizer and the figures of its training."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
