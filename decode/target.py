"""The target: any Hugging Face causal LM that takes a 4-D attention mask, wrapped for tree decoding and for feature extraction.

Training and decoding read features through this one class, so that a layer index or a norm cannot differ between them.

Canonical tap index k, as in Hugging Face's `output_hidden_states`: 0 is the embedding, k = 1 .. L is the output of the k-th block (for k = L: before
the final norm), and k = L + 1 is the last hidden state after it, which lm_head reads. Exporters convert to each engine's convention at the edge.

Dims: B batch, T sequence, N tree nodes, L cache slots, H hidden, F = taps * H, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import UserError
from .cache import TreeCache
from .fused import fuse
from .halves import linear
from .proposer import Extent
from .tree import DraftTree

PREFILL_CHUNK = 1024  # bounds the prefill mask to [B, 1, 1024, L]
_VOLATILE_CONFIG_KEYS = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "_attn_implementation", "architectures"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TopK:
    """The K likeliest tokens of places [...]: ids [..., K], likeliest first, their logits, and the log-sum-exp of all V logits [...]."""

    ids: Tensor
    logits: Tensor
    logsumexp: Tensor

    @classmethod
    def of(cls, logits: Tensor, count: int) -> TopK:
        """Of logits [..., V]."""
        best = logits.topk(min(count, logits.shape[-1]), dim=-1)
        return cls(best.indices, best.values, logits.logsumexp(-1))

    def flat(self, place_N: Tensor) -> TopK:
        """Of these places, numbered along all dimensions."""
        ids, logits = (part.flatten(0, -2)[place_N] for part in (self.ids, self.logits))
        return TopK(ids, logits, self.logsumexp.flatten()[place_N])

    @property
    def missing(self) -> Tensor:
        """[...] the probability of all other tokens."""
        return -torch.expm1((self.logits.float().logsumexp(-1) - self.logsumexp.float()).clamp(max=0))

    def probs(self, ids_V: Tensor | None, vocab_size: int) -> Tensor:
        """[N, V] float32, of places [N]: the distribution over `ids_V` (ascending; None: all tokens) of those that are kept, renormalised.

        Other tokens have probability 0; rows of which no kept token is in `ids_V` are all 0.
        """
        column, inside = self.ids, torch.ones_like(self.ids, dtype=torch.bool)
        if ids_V is not None:
            vocab_size = len(ids_V)
            column = torch.searchsorted(ids_V, self.ids.contiguous()).clamp(max=vocab_size - 1)
            inside = ids_V[column] == self.ids
        weight_NK = self.logits.float().masked_fill(~inside, -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.zeros(len(column), vocab_size, device=weight_NK.device).scatter_add_(1, column, weight_NK)


@dataclass
class Step:
    """One forward pass: hidden_BNH after the final norm, taps_BNF the tapped layers side by side in ascending order (None without taps).

    topk: what was saved of the target's distributions in place of hidden_BNH, which may then have width 0 (only in training).
    best_BN: the likeliest next tokens, if they were kept (only in training).
    """

    hidden_BNH: Tensor
    taps_BNF: Tensor | None
    topk: TopK | None = None
    best_BN: Tensor | None = None


class Target:
    """A frozen causal LM with its tokenizer, its cache, and hooks on the tapped layers."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or str(getattr(model.config, "_name_or_path", ""))
        self.config: Any = model.config.get_text_config(decoder=True)
        self.decoder: nn.Module = model.get_decoder()
        head = model.get_output_embeddings()
        if head is None:
            raise UserError(f"target {self.name}: wanted a causal LM with an output head, got {type(model).__name__}")
        self.lm_head: nn.Module = head
        self.embeddings: nn.Module = model.get_input_embeddings()
        self.vocab_size = int(head.weight.shape[0])
        self.hidden_size = int(self.config.hidden_size)
        self.layers = self._find_layers()
        self.num_layers = len(self.layers)
        self.device = head.weight.device
        self.dtype = head.weight.dtype
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self._windows = attention_windows(self.config, f"target {self.name}")
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.taps: tuple[int, ...] = ()
        self._cache: TreeCache | None = None
        self._open = torch.empty(0)  # a mask that forbids nothing
        self._fused = fuse(list(self.layers), str(getattr(model.config, "_attn_implementation", "")))
        self.identity: dict[str, str] | None = None  # the fingerprint, once the weights are no longer the original's
        self.bound = False  # whether a head was made or loaded for these weights
        self._check_logits()

    # -- loading ---------------------------------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, path: str, *, dtype: str = "auto", device: str = "auto", attn_implementation: str | None = None, revision: str | None = None
    ) -> Target:
        """Load a folder or a hub name. dtype auto: float32 on CPU, bfloat16 on CUDA. Raises UserError if it cannot be a target."""
        model, tokenizer, _ = read_model(path, dtype=dtype, device=device, attn_implementation=attn_implementation, revision=revision)
        return cls(model, tokenizer, path)

    def compile(self) -> None:
        """From now on run the layers' parts through `torch.compile`. Raises UserError for a model without fused layers, or without a compiler."""
        if self._fused is None:
            raise UserError(
                f"target.compile: wanted a model of the Llama, Mistral, Qwen2 or Qwen3 kind, unquantised and with sdpa attention, got {self.name} "
                f"({type(self.model).__name__}, {getattr(self.model.config, '_attn_implementation', None)}); leave it out"
            )
        self._fused.compile(self.device)

    def _find_layers(self) -> nn.ModuleList:
        wanted = int(self.config.num_hidden_layers)
        lists = [m for m in self.decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
        if not lists:
            raise UserError(
                f"target {self.name}: found no list of {wanted} decoder layers in {type(self.decoder).__name__}; this architecture is not supported"
            )
        return lists[0]

    def _check_logits(self) -> None:
        """Compare `logits` with the model's own on a probe: an architecture that post-processes them in a way unknown here must not pass."""
        ids = torch.arange(1, 5, device=self.device).unsqueeze(0) % self.vocab_size
        with torch.no_grad():
            want = self.model(input_ids=ids, use_cache=False).logits.float()
            got = self.logits(self.decoder(input_ids=ids, use_cache=False).last_hidden_state).float()
        gap = float((want - got).abs().max())
        if not gap <= 1e-3 + 0.02 * float(want.abs().max()) * (self.dtype != torch.float32):
            raise UserError(
                f"target {self.name}: its logits differ by {gap:.3g} from lm_head of its last hidden state; this architecture is not supported"
            )

    # -- taps ------------------------------------------------------------------------------------------------------------------------------

    def set_taps(self, taps: Sequence[int]) -> None:
        """Capture the outputs of these layers (canonical k, see the module's docstring) in every forward pass from now on."""
        bad = [k for k in taps if not 0 <= k <= self.num_layers + 1]
        if bad or list(taps) != sorted(set(taps)):
            raise UserError(f"taps: wanted ascending layer indices in 0 .. {self.num_layers + 1}, got {list(taps)}")
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._captured = [], {}
        for k in taps:
            if k > self.num_layers:
                continue
            module = self.layers[k - 1] if k else self.embeddings
            self._hooks.append(module.register_forward_hook(self._capture(k)))
        self.taps = tuple(taps)

    def _capture(self, k: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[k] = output[0] if isinstance(output, tuple) else output

        return hook

    # -- forward passes --------------------------------------------------------------------------------------------------------------------

    def _forward(self, ids_BN: Tensor, position_BN: Tensor, allowed: dict[str, Tensor], cache: TreeCache | None) -> Step:
        return self._run(ids_BN, position_BN, {kind: additive(mask_BNL, self.dtype) for kind, mask_BNL in allowed.items()}, cache)

    def _run(self, ids_BN: Tensor, position_BN: Tensor, masks: dict[str, Tensor], cache: TreeCache | None) -> Step:
        if self.max_positions is not None:
            # Nodes past the last position can never be emitted (the engine stops before), but learned position tables would be overrun.
            position_BN = position_BN.clamp(max=self.max_positions - 1)
        with self._fused.active() if self._fused else contextlib.nullcontext():
            out = self.decoder(
                input_ids=ids_BN,
                position_ids=position_BN,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                past_key_values=cache,
                use_cache=cache is not None,
            )
        self._captured[self.num_layers + 1] = out.last_hidden_state
        taps_BNF = torch.cat([self._captured[k] for k in self.taps], dim=-1) if self.taps else None
        self._captured.clear()
        return Step(out.last_hidden_state, taps_BNF)

    def _windowed(self, allowed_BNL: Tensor, query_BN: Tensor, key_BL: Tensor) -> dict[str, Tensor]:
        return windowed(self._windows, allowed_BNL, query_BN, key_BL)

    def logits(self, hidden: Tensor, ids_V: Tensor | None = None) -> Tensor:
        """[..., V] logits of last hidden states [..., H], with the family's own scaling (Gemma's soft cap, Granite's and Cohere's factors).

        ids_V: only of these tokens, which costs as much less as they are fewer. None: of all.
        """
        return self.reader(ids_V)(hidden)

    def reader(self, ids_V: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """`logits` of these tokens as a function of hidden states: what it needs of the output layer is gathered once."""
        products = self._products(ids_V)

        def read(hidden: Tensor) -> Tensor:
            logits = products(hidden)
            if (scaling := getattr(self.config, "logits_scaling", None)) is not None:
                logits = logits / scaling
            if (scale := getattr(self.config, "logit_scale", None)) is not None:
                logits = logits * scale
            if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
                logits = torch.tanh(logits / cap) * cap
            return logits

        return read

    def _products(self, ids_V: Tensor | None) -> Callable[[Tensor], Tensor]:
        if ids_V is not None and len(ids_V) < self.vocab_size and type(self.lm_head) is nn.Linear:
            rows_VH, bias = self.lm_head.weight[ids_V], None if self.lm_head.bias is None else self.lm_head.bias[ids_V]
            return lambda hidden: linear(hidden, rows_VH) if bias is None else linear(hidden, rows_VH) + bias
        plain = type(self.lm_head) is nn.Linear and self.lm_head.bias is None

        def whole(hidden: Tensor) -> Tensor:
            logits: Tensor = linear(hidden, self.lm_head.get_parameter("weight")) if plain else self.lm_head(hidden)
            return logits if ids_V is None else logits[..., ids_V]

        return whole

    def features(self, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, *, gradient: bool = False) -> Step:
        """One causal pass without a cache. Tokens attend within their own document (ids >= 0; -1 is padding) only."""
        causal = torch.ones(ids_BT.shape[1], ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device).tril()
        allowed_BTT = causal & (document_BT.unsqueeze(1) == document_BT.unsqueeze(2))
        with torch.set_grad_enabled(gradient):
            return self._forward(ids_BT, position_BT, self._windowed(allowed_BTT, position_BT, position_BT), None)

    def allocate(self, batch: int, capacity: int) -> None:
        """Make (or reuse) a cache of `batch` rows and at least `capacity` slots. Old content is not cleared, and never read."""
        if self._cache is None or self._cache.batch != batch or self._cache.capacity < capacity:
            self._cache = TreeCache(self.num_layers, batch, capacity)

    def prefill(self, ids_BT: Tensor, length_B: Tensor) -> Step:
        """Fill slots 0 .. T-1 with right-padded prompts. Returns every position's features; those at or past a row's length are garbage."""
        assert self._cache is not None, "allocate() comes first"
        batch, total = ids_BT.shape
        slot = torch.arange(total, device=ids_BT.device)
        steps = []
        for start in range(0, total, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, total)
            slots_BN = slot[start:stop].expand(batch, -1)
            self._cache.place(slots_BN, stop, start)
            allowed_BNL = (slot[:stop] <= slot[start:stop].unsqueeze(1)).expand(batch, -1, -1)
            masks = self._windowed(allowed_BNL, slots_BN, slot[:stop].expand(batch, -1))
            steps.append(self._forward(ids_BT[:, start:stop], slots_BN, masks, self._cache))
        taps = [s.taps_BNF for s in steps if s.taps_BNF is not None]
        return Step(torch.cat([s.hidden_BNH for s in steps], 1), torch.cat(taps, 1) if taps else None)

    def tensors(self) -> list[Tensor]:
        """What is kept between calls: the cache's storage."""
        return [] if self._cache is None else self._cache.tensors()

    def verify(self, tree: DraftTree, length_B: Tensor, extent: Extent) -> Step:
        """One forward pass over the tree's N nodes, root at position `length`. Does not change what is committed. extent: of length_B."""
        visible = extent.longest + tree.num_nodes
        if tree.num_nodes == 1 and extent.exact:  # plain decoding: everything that is visible may be seen, so no mask is made anew
            return self._step(tree.tokens_BN, length_B.unsqueeze(1), visible)
        slots_BN = length_B.unsqueeze(1) + torch.arange(tree.num_nodes, device=length_B.device)
        position_BN = length_B.unsqueeze(1) + tree.depth_BN
        allowed_BNL, key_BL = tree_mask(tree, length_B, slots_BN, position_BN, visible)
        return self.extend(tree.tokens_BN, position_BN, slots_BN, allowed_BNL, key_BL, extent.longest if extent.exact else None)

    def _step(self, ids_B1: Tensor, position_B1: Tensor, visible: int) -> Step:
        """`verify` of one node a row, all rows of the same length."""
        assert self._cache is not None, "allocate() comes first"
        self._cache.place(position_B1, visible, visible - 1)
        if self._open.shape[-1] < visible or self._open.shape[0] != ids_B1.shape[0]:
            self._open = torch.zeros(ids_B1.shape[0], 1, 1, self._cache.capacity, dtype=self.dtype, device=self.device)
        masks = {}
        for kind, window in self._windows.items():
            masks[kind] = self._open[..., :visible]
            if window is not None and visible > window:
                far_L = torch.arange(visible, device=self.device) < visible - window
                masks[kind] = masks[kind].masked_fill(far_L, torch.finfo(self.dtype).min)
        return self._run(ids_B1, position_B1, masks, self._cache)

    def extend(self, ids_BN: Tensor, position_BN: Tensor, slots_BN: Tensor, allowed_BNL: Tensor, key_BL: Tensor, start: int | None = None) -> Step:
        """One forward pass over any tokens: K/V go to `slots`; each token sees the slots that `allowed` marks, within the model's window.

        key_BL: each slot's position. start: set if every row writes slots start .. start + N - 1.
        """
        assert self._cache is not None, "allocate() comes first"
        self._cache.place(slots_BN, allowed_BNL.shape[-1], start)
        return self._forward(ids_BN, position_BN, self._windowed(allowed_BNL, position_BN, key_BL), self._cache)

    def commit(self, tree: DraftTree, path_BP: Tensor, length_B: Tensor) -> None:
        """Keep the path's K/V: node path[i] moves to slot length + i. A chain's nodes lie there already."""
        if tree.is_chain:
            return
        assert self._cache is not None
        target_BP = length_B.unsqueeze(1) + torch.arange(path_BP.shape[1], device=path_BP.device)
        self._cache.move(length_B.unsqueeze(1) + path_BP, target_BP)

    def move_layers(self, device: torch.device) -> None:
        """Move the decoder layers; the rest stays. Elsewhere than on the target's device they wait: logits can be computed then, features cannot."""
        if all(p.device == device for p in self.layers.parameters()):
            return
        for layer in self.layers:
            vars(layer).pop("forward", None)  # fused layers hold the weights themselves
        self._fused, self._cache = None, None
        self.layers.to(device)
        if device == self.device:
            self._fused = fuse(list(self.layers), str(getattr(self.model.config, "_attn_implementation", "")))

    def shard_layers(self, mesh: Any) -> None:
        """Keep this process's part of each decoder layer only; a layer is gathered while it runs. The rest stays whole.

        mesh: a device mesh. From now on all its processes ask for `features` together, and for nothing else that runs the layers.
        """
        from torch.distributed.fsdp import fully_shard

        self.identity = self.fingerprint()
        for layer in self.layers:
            vars(layer).pop("forward", None)  # fused layers hold the weights themselves
            for parameter in layer.parameters():
                parameter.data = parameter.data.contiguous()  # and have laid them side by side
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self._fused, self._cache = None, None

    # -- identity --------------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def adapting(self, adapter: str) -> Iterator[None]:
        """Weights may change inside, by what the short hash `adapter` names. From then on the fingerprint is the original's with that added."""
        identity = {**self.fingerprint(), "adapter": adapter}
        yield
        self.identity = identity
        for layer in self.layers:
            vars(layer).pop("forward", None)  # fused layers may hold copies of the old weights
        compiled = self._fused is not None and self._fused.compiled
        self._fused = fuse(list(self.layers), str(getattr(self.model.config, "_attn_implementation", "")))
        if compiled:
            self.compile()

    def fingerprint(self) -> dict[str, str]:
        """{"tokenizer", "config", "weights"}: short hashes by which a drafter recognises its target, whatever dtype it is loaded in.

        "adapter" beside them: these are the original's, and such an adapter was merged into its weights since.
        """
        if self.identity is not None:
            return dict(self.identity)
        weights = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16).view(torch.int16).cpu()
            weights.update(name.encode() + sample.numpy().tobytes())
        return {"weights": weights.hexdigest()[:16], **surroundings(self.config, self.tokenizer)}


def surroundings(config: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """What a fingerprint says of all but the weights."""
    kept = {k: v for k, v in config.to_diff_dict().items() if k not in _VOLATILE_CONFIG_KEYS}
    prints = {"config": _digest(json.dumps(kept, sort_keys=True, default=str))}
    if tokenizer is not None:
        vocab = json.dumps(sorted(tokenizer.get_vocab().items())) + str(tokenizer.chat_template)
        prints["tokenizer"] = _digest(vocab)
    return prints


def check_folder(path: str) -> None:
    """Raise UserError for what is there and is no model's folder, or has no tokenizer. Reads no weights."""
    folder = Path(path)
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(f"target {path}: wanted a model folder with config.json, got {'a file' if folder.is_file() else 'a folder without it'}")
    if folder.is_dir() and not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    ):
        raise UserError(f"target {path}: wanted a tokenizer beside the model, got none; save it there with tokenizer.save_pretrained")


def read_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str | None = None,
    revision: str | None = None,
    asked: Callable[[Any], Any] = lambda config: config,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Any]:
    """(model, tokenizer, configuration) of a folder or a hub name; see `Target.load`. asked: the configuration that the model is to have instead."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"target.device: wanted {device}, got a machine without CUDA; use device=cpu")
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    if dtype not in _DTYPES:
        raise UserError(f"target.dtype: wanted one of {', '.join(_DTYPES)} or auto, got {dtype}")
    check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            config=asked(config),
            dtype=_DTYPES[dtype],
            revision=revision,
            output_loading_info=True,
            **({"attn_implementation": attn_implementation} if attn_implementation else {}),
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # missing folder, damaged file, unknown architecture
        raise UserError(f"target {path}: cannot be loaded ({' '.join(str(error).split())[:300]}); give a model folder or a hub name") from error
    missing = sorted(loading["missing_keys"])  # transformers fills them with random numbers, and goes on
    if missing:
        raise UserError(
            f"target {path}: wanted all weights in its checkpoint, got none of {', '.join(missing[:3])}; if they are tied to others, "
            "config.json has to say tie_word_embeddings"
        )
    return model.to(device), tokenizer, config


def tree_mask(tree: DraftTree, length_B: Tensor, slots_BN: Tensor, position_BN: Tensor, visible: int) -> tuple[Tensor, Tensor]:
    """(allowed [B, N, L] bool, key positions [B, L]): every node sees its row's committed slots and its own ancestors, nothing else."""
    batch, nodes = tree.tokens_BN.shape
    slot_L = torch.arange(visible, device=length_B.device)
    committed_BL = slot_L < length_B.unsqueeze(1)
    allowed_BNL = committed_BL.unsqueeze(1).repeat(1, nodes, 1)
    allowed_BNL.scatter_(2, slots_BN.unsqueeze(1).expand(batch, nodes, nodes), tree.ancestors_BNN)
    key_BL = slot_L.repeat(batch, 1).scatter_(1, slots_BN, position_BN)
    return allowed_BNL, key_BL


def attention_windows(config: Any, name: str) -> dict[str, int | None]:
    """{mask kind: window in positions, None = full} of a decoder. One entry: the model takes one mask; more: a dict of masks by kind.

    Raises UserError for layers of other kinds, in the name of the model.
    """
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    window = getattr(config, "sliding_window", None)
    unknown = [k for k in kinds if k not in ("full_attention", "sliding_attention")]
    if unknown or getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{name}: has layers of kind {', '.join(unknown) or 'encoder-decoder'}; "
            "wanted attention layers whose cache can be cut back (full or sliding)"
        )
    if not getattr(config, "num_attention_heads", None):
        raise UserError(f"{name}: has no attention heads; wanted attention layers whose cache can be cut back (full or sliding)")
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"{name}: has multi-head latent attention, whose keys and values are of different widths; wanted plain attention layers")
    if not kinds:
        return {"full_attention": window if getattr(config, "use_sliding_window", True) else None}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def windowed(windows: dict[str, int | None], allowed_BNL: Tensor, query_BN: Tensor, key_BL: Tensor) -> dict[str, Tensor]:
    """Cut each mask kind's window: a query sees keys less than `window` *positions* back, however they are stored."""
    masks = {}
    for kind, window in windows.items():
        near = None if window is None else query_BN.unsqueeze(-1) - key_BL.unsqueeze(1) < window
        masks[kind] = allowed_BNL if near is None else allowed_BNL & near
    return masks


def additive(allowed_BNL: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, L] what is added to attention scores: 0 where a token may be seen, else the dtype's least number."""
    mask = torch.zeros(allowed_BNL.shape, dtype=dtype, device=allowed_BNL.device)
    return mask.masked_fill_(~allowed_BNL, torch.finfo(dtype).min).unsqueeze(1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
