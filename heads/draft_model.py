"""A draft model in training: any causal LM as a drafter that objectives train, saved as a plain Hugging Face folder with a contract beside it.

    draft = DraftModel.of(model, tokenizer, target)      a model with the target's tokenizer; full weights are trained
    draft.adapt(rank=16)                                 LoRA instead; merged wherever the draft leaves this class
    draft.snapshot()                                     what it is now, merged, for decoding: a copy, which training does not change

With a block_size it is trained to draft in parallel (PARD, 2504.18583): mask tokens behind a text stand for the tokens to come, and one pass
predicts them all. `heads/pard.py` decodes with it.

Dims: B batch, T sequence, M mask entries, X = T + M, H hidden, V tokens that draft and target share.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import UserError
from ..decode.growth import Kind
from ..decode.proposer import Proposer
from ..decode.target import Target, additive, attention_windows, windowed
from .dflash import mask_token
from .head import Head, HeadConfig
from .pard import Pard
from .standalone import Standalone, compare_tokenizers

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}  # a recipe's names, and those of a transformers configuration
_SCALINGS = ("logits_scaling", "logit_scale", "final_logit_softcapping")


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(HeadConfig):
    """model: the draft's transformers configuration. draft_vocab_size: tokens that both models have, the first ones of each table.

    block_size: tokens that one pass drafts with mask_token_id behind the text. None: one token a pass.
    """

    model: dict[str, Any]
    block_size: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 2:
            raise UserError(f"drafter.block_size: wanted null, or at least 2 tokens, got {self.block_size}")
        if self.block_size is None and self.mask_token_id is not None:
            raise UserError(f"drafter.mask_token_id: wanted null, as no drafter.block_size is given, got {self.mask_token_id}")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.draft_vocab_size:
            raise UserError(f"drafter.mask_token_id: wanted 0 .. {self.draft_vocab_size - 1} (the draft's vocabulary), got {self.mask_token_id}")

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        block_size: int | None = None,
        mask_token_id: int | None = None,
    ) -> DraftModelConfig:
        """A model of the target's family and of these sizes, the target's own where none is given, to be initialised at random."""
        given = {"num_layers": num_layers, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        config = resized(target.config, {**given, "num_heads": num_heads, "num_kv_heads": num_kv_heads})
        return cls.of(config, target.vocab_size, target, block_size, mask_token_id)

    @classmethod
    def of(cls, config: Any, rows: int, target: Target, block_size: int | None = None, mask_token_id: int | None = None) -> DraftModelConfig:
        """For a model with this transformers configuration, whose table has `rows` tokens."""
        if block_size is not None and mask_token_id is None:
            mask_token_id = mask_token(target)
        return cls(
            hidden_size=int(config.hidden_size),
            taps=(),
            target_vocab_size=target.vocab_size,
            draft_vocab_size=min(rows, target.vocab_size),
            target_num_layers=target.num_layers,
            model=config.to_dict(),
            block_size=block_size,
            mask_token_id=mask_token_id,
        )


def resized(config: Any, sizes: dict[str, int | None]) -> Any:
    """A copy of a transformers configuration with these sizes, named as in recipes. Raises UserError for sizes that do not go together."""
    made = copy.deepcopy(config)
    for name, value in sizes.items():
        if value is None:
            continue
        if getattr(made, SIZES[name], None) is None:
            raise UserError(f"drafter.{name}: wanted null, as a {made.model_type} model has no such size, got {value}")
        if name == "hidden_size" and getattr(made, "head_dim", None) is None:  # it would else follow from the hidden size
            made.head_dim = made.hidden_size // made.num_attention_heads
        setattr(made, SIZES[name], value)
    heads, groups = made.num_attention_heads, getattr(made, "num_key_value_heads", None) or made.num_attention_heads
    if heads % groups:
        raise UserError(f"drafter.num_heads: wanted a multiple of the {groups} key heads, got {heads}; set drafter.num_kv_heads too")
    if getattr(made, "layer_types", None):
        made.layer_types = made.layer_types[: made.num_hidden_layers]
    return made


def check_start(init: str, target: str, revision: str | None = None) -> None:
    """Raise UserError unless the model to start from has the target's tokenizer. Reads both tokenizers, and no weights."""
    loaded = []
    for key, name, revised in (("drafter.init", init, None), ("target", target, revision)):
        try:
            loaded.append(AutoTokenizer.from_pretrained(name, revision=revised))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            text = " ".join(str(error).split())[:300]
            raise UserError(f"{key} {name}: its tokenizer cannot be loaded ({text}); give a causal LM's folder or hub name") from error
    compare_tokenizers(loaded[0], loaded[1], init, target)


class DraftModel(Head):
    """The draft. `model` is the transformers model, adapted if `adapt` was called; it is never handed out, only copies of it are."""

    method = "draft_model"
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(config)
        self.config, self.tokenizer = config, tokenizer
        self.t2d[config.draft_vocab_size :] = False
        self.model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model)) if model is None else model
        self.model.requires_grad_(True)
        text = self.model.config.get_text_config(decoder=True)
        self._windows = attention_windows(text, "the draft")
        self._adapted = False
        head = self.model.get_output_embeddings()
        scalings = [name for name in _SCALINGS if getattr(text, name, None) not in (None, 1.0)]
        if head is None or getattr(head, "bias", None) is not None or scalings:
            found = scalings[0] if scalings else "an output layer with a bias" if head is not None else "no output layer"
            raise UserError(f"drafter.init: wanted a causal LM whose logits are its output layer's products, got one with {found}; use another")

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        target: Target,
        *,
        block_size: int | None = None,
        mask_token_id: int | None = None,
    ) -> DraftModel:
        """A given model as the target's draft. Raises UserError if its tokens are not the target's."""
        if tokenizer is not None and target.tokenizer is not None:
            compare_tokenizers(tokenizer, target.tokenizer, str(getattr(model.config, "_name_or_path", "")), target.name)
        rows = int(model.get_input_embeddings().weight.shape[0])
        config = DraftModelConfig.of(model.config.get_text_config(decoder=True), rows, target, block_size, mask_token_id)
        return cls(config, model, tokenizer).to(target.device).bind(target)

    def adapt(self, rank: int, alpha: int | None = None) -> DraftModel:
        """Train LoRA adapters (2106.09685) of all linear layers but the output layer instead of the weights; a mask token's embedding too.

        alpha: their scale is alpha / rank; None: alpha is twice the rank. Returns self.
        """
        from peft import LoraConfig, get_peft_model

        extra: dict[str, Any] = {}
        if self.config.mask_token_id is not None:
            name = next(name for name, module in self.model.named_modules() if module is self.model.get_input_embeddings())
            extra["trainable_token_indices"] = {name.rpartition(".")[2]: [self.config.mask_token_id]}
        settings = LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear", task_type="CAUSAL_LM", **extra)
        with warnings.catch_warnings():  # peft 0.21 asks transformers 5.23 by the old name
            warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
            self.model, self._adapted = get_peft_model(self.model, settings), True
        return self

    @property
    def longest(self) -> int | None:
        """Tokens that one pass drafts; None if it drafts one at a time, as many as are wanted."""
        return self.config.block_size

    @property
    def causal_lm(self) -> Any:
        """The transformers model, adapters in place."""
        return self.model.get_base_model() if self._adapted else self.model

    def output_rows(self) -> Tensor:
        """[V, H] the output layer's rows of the tokens that both models have."""
        rows: Tensor = self.causal_lm.get_output_embeddings().weight
        return rows if len(rows) == self.config.draft_vocab_size else rows[: self.config.draft_vocab_size]

    def training_outputs(
        self, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, anchor_BM: Tensor | None = None, depth_BM: Tensor | None = None
    ) -> Tensor:
        """[B, X, H] last hidden states of the texts, which attend within their documents, and of mask entries, if there are any.

        Mask entry m stands for the depth-th token after the one in column `anchor`; it sees the text up to that column, the anchor's entries of
        smaller depth, and itself. anchor -1: no entry. As for the text, depth d predicts the token that follows its own place.
        """
        causal = torch.ones(ids_BT.shape[1], ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device).tril()
        allowed = causal & (document_BT.unsqueeze(1) == document_BT.unsqueeze(2))
        if anchor_BM is not None and depth_BM is not None:
            assert self.config.mask_token_id is not None
            allowed = _with_masks(allowed, anchor_BM, depth_BM)
            position_BT = torch.cat([position_BT, position_BT.gather(1, anchor_BM.clamp(min=0)) + depth_BM], dim=1)
            ids_BT = torch.cat([ids_BT, torch.full_like(anchor_BM, self.config.mask_token_id)], dim=1)
        masks = {kind: additive(mask, self.output_rows().dtype) for kind, mask in windowed(self._windows, allowed, position_BT, position_BT).items()}
        out: Tensor = self.causal_lm.get_decoder()(
            input_ids=ids_BT,
            position_ids=position_BT,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=False,
        ).last_hidden_state
        return out

    @torch.no_grad()
    def merged(self) -> PreTrainedModel:
        """A copy of the model as it is now, adapters merged."""
        model = copy.deepcopy(self.model)
        return (model.merge_and_unload() if self._adapted else model).requires_grad_(False).eval()

    def snapshot(self) -> Target:
        """A copy of it as it is now, in the target's dtype, for decoding."""
        return Target(self.merged().to(self.target.dtype), self.tokenizer or self.target.tokenizer, self.method)

    def standalone(self) -> Standalone:
        """A snapshot as a drafter."""
        size, mask = self.config.block_size, self.config.mask_token_id
        made = Standalone(self.snapshot()) if size is None or mask is None else Pard(self.snapshot(), mask, size)
        return made.bind(self.target)

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> Proposer:
        """A proposer with a snapshot: see `Standalone`, `Pard`."""
        return self.standalone().proposer(tree=tree, depth=depth, topk=topk, nodes=nodes, kind=kind)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write model and tokenizer as transformers reads them, in the target's dtype. Returns what the contract says of the draft."""
        model = self.merged().to(self.target.dtype)
        tokenizer = self.tokenizer or self.target.tokenizer
        if self.config.block_size is not None:
            model.config.pard_token = self.config.mask_token_id  # by this key serving engines know a parallel draft
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return {"method": self.method, "block_size": self.config.block_size, "mask_token_id": self.config.mask_token_id}


def _with_masks(allowed_BTT: Tensor, anchor_BM: Tensor, depth_BM: Tensor) -> Tensor:
    """[B, X, X] what a text's places and its mask entries see."""
    batch, total, entries = *allowed_BTT.shape[:2], anchor_BM.shape[1]
    real_BM1 = (anchor_BM >= 0).unsqueeze(2)
    text_BMT = allowed_BTT.gather(1, anchor_BM.clamp(min=0).unsqueeze(2).expand(-1, -1, total)) & real_BM1
    same_BMM = (anchor_BM.unsqueeze(2) == anchor_BM.unsqueeze(1)) & (depth_BM.unsqueeze(1) <= depth_BM.unsqueeze(2)) & real_BM1
    own_BMM = same_BMM | torch.eye(entries, dtype=torch.bool, device=anchor_BM.device)
    none_BTM = torch.zeros(batch, total, entries, dtype=torch.bool, device=anchor_BM.device)
    return torch.cat([torch.cat([allowed_BTT, none_BTM], dim=2), torch.cat([text_BMT, own_BMM], dim=2)], dim=1)
