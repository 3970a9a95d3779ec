"""What all trained heads share: sizes that follow the target, the target's own embeddings and output layer, and a draft vocabulary.

A new method is one file here (config, module, proposer), one objective in `train/objectives/`, one entry in each of their registries, and a recipe.

Dims: H hidden, V draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .. import UserError
from ..decode.proposer import Proposer
from ..decode.target import Target


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """taps: the target's layers that the head reads (canonical k, see `decode/target.py`), ascending. The output layer has draft_vocab_size rows.

    Raises UserError for taps that the target does not have, and for a draft vocabulary that is larger than the target's.
    """

    hidden_size: int
    taps: tuple[int, ...]
    target_vocab_size: int
    draft_vocab_size: int
    target_num_layers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))  # a list, if it comes from a file
        last = self.target_num_layers + 1
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or not 0 <= self.taps[0] <= self.taps[-1] <= last:
            raise UserError(f"drafter.taps: wanted ascending layers in 0 .. {last} (the target's; {last} is its final norm), got {list(self.taps)}")
        if not 1 <= self.draft_vocab_size <= self.target_vocab_size:
            raise UserError(f"drafter.draft_vocab_size: wanted 1 .. {self.target_vocab_size} (the target's vocabulary), got {self.draft_vocab_size}")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """A head with a decoder layer of Llama's kind."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise UserError(
                f"drafter.num_heads: wanted a multiple of num_kv_heads {self.num_kv_heads} and an even head_dim, "
                f"got {self.num_heads} and {self.head_dim}"
            )


def head_sizes(target: Target, draft_vocab_size: int | None = None) -> dict[str, Any]:
    """The fields of a HeadConfig but `taps`, as they follow from the target."""
    return {
        "hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size or target.vocab_size,
        "target_num_layers": target.num_layers,
    }


def layer_sizes(
    target: Target, intermediate_size: int | None = None, num_heads: int | None = None, num_kv_heads: int | None = None
) -> dict[str, Any]:
    """The fields that a LayerConfig adds: the target's own where none is given."""
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    heads = num_heads or config.num_attention_heads
    return {
        "intermediate_size": intermediate_size or getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
        "num_heads": heads,
        "num_kv_heads": num_kv_heads or (heads if num_heads else getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-5),
        "rope_theta": float(theta or getattr(config, "rope_theta", None) or 10000.0),
        "max_positions": target.max_positions or 2048,
    }


def draft_shape(vocabulary: int, tree: str, depth: int, topk: int, nodes: int) -> dict[str, int]:
    """What proposers take of these settings: a chain has no branches. Raises UserError for more children than there are tokens to draft."""
    if tree == "chain":
        return {"depth": depth, "topk": 1, "nodes": depth}
    if not 1 <= topk <= vocabulary:
        raise UserError(f"decode.topk: wanted 1 .. {vocabulary} (the tokens that the drafter can draft), got {topk}")
    return {"depth": depth, "topk": topk, "nodes": nodes}


def scaled_rows(target: Target, ids_V: Tensor | None = None) -> Tensor:
    """[V, H] the target's output rows (of these tokens), with the family's factor on logits."""
    rows = target.lm_head.weight
    assert isinstance(rows, Tensor)
    rows = rows if ids_V is None else rows[ids_V.to(rows.device)]
    scaling, scale = getattr(target.config, "logits_scaling", None), getattr(target.config, "logit_scale", None)
    rows = rows if scaling is None else rows / scaling
    return rows if scale is None else rows * scale


class Head(nn.Module, ABC):
    """A drafter that reads the target's features. What it shares with the target is frozen and not saved: `bind` attaches it."""

    method: ClassVar[str]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.sizes = config
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.target_vocab_size, dtype=torch.bool))
        self.d2t: Tensor
        self.t2d: Tensor
        self._target: list[Target] = []  # in a list, so that nothing of it is a submodule: never trained, never saved

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers that it reads."""
        return self.sizes.taps

    @property
    def longest(self) -> int | None:
        """The most tokens in a row that it can draft. None: any."""
        return None

    @property
    def target(self) -> Target:
        """The target that it is bound to."""
        assert self._target, "bind(target) comes first"
        return self._target[0]

    def bind(self, target: Target) -> Self:
        """Use the target's embeddings and output layer. Returns self."""
        self._target = [target]
        target.bound = True
        return self

    def set_draft_vocabulary(self, ids: Tensor, target: Target | None = None) -> None:
        """Choose the draft vocabulary: distinct target ids [V]. With a target, output layers of its own start from the target's rows."""
        ids = ids.sort().values.to(self.d2t.device)
        if ids.numel() != self.sizes.draft_vocab_size or torch.unique(ids).numel() != ids.numel():
            raise UserError(f"draft vocabulary: wanted {self.sizes.draft_vocab_size} distinct ids, got {torch.unique(ids).numel()} of {ids.numel()}")
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True
        if target is not None and self.output_layers():
            with torch.no_grad():
                rows = scaled_rows(target, ids)
                for layer in self.output_layers():
                    layer.weight.copy_(rows)

    def output_layers(self) -> list[nn.Linear]:
        """Its own layers from hidden states to the draft vocabulary; none if it uses the target's."""
        return []

    @property
    def draft_ids(self) -> Tensor:
        """[V] target id of each draft id, ascending."""
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings in the head's dtype; no gradient."""
        with torch.no_grad():
            out: Tensor = self.target.embeddings(ids)
        return out.to(next(self.parameters()).dtype)

    @abstractmethod
    def training_outputs(self, *args: Any) -> Any:
        """What the objective of the method asks for."""

    def forward(self, *args: Any) -> Any:
        """`training_outputs`, where wrappers for several processes expect it."""
        return self.training_outputs(*args)

    @abstractmethod
    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16) -> Proposer:
        """A proposer of chains or trees."""
