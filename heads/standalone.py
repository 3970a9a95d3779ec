"""Any causal LM with the target's tokenizer as a drafter (2211.17192): a smaller model of the family, an earlier checkpoint, a distilled draft.

It drafts with its own cache, as chain or dynamic tree, and needs nothing of the target but the accepted tokens. It can be used untrained.

Dims: B batch, M accepted columns, K nodes a level, H hidden, V draft vocabulary, L cache slots.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from .. import UserError
from ..decode.budget import cache_growth
from ..decode.growth import Grower, Kind
from ..decode.length import Predicted
from ..decode.proposer import Accepted
from ..decode.target import Target
from .acceptance import AcceptancePredictor
from .head import draft_shape


class Standalone:
    """A draft model. Like a head, it is bound to a target: the two must agree on what each token id means."""

    method = "draft_model"

    def __init__(self, draft: Target) -> None:
        self.draft = draft
        self.predictor: AcceptancePredictor | None = None  # of acceptance, if one was trained
        self.vocab_size = self.target_vocab_size = draft.vocab_size  # tokens that are drafted, and the target's

    def bind(self, target: Target) -> Standalone:
        """Check that the draft's tokens are the target's. Returns self. Raises UserError if they are not."""
        check_tokenizers(self.draft, target)
        self.vocab_size, self.target_vocab_size = min(self.draft.vocab_size, target.vocab_size), target.vocab_size
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """The draft's parameters."""
        yield from self.draft.model.parameters()

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> StandaloneProposer:
        """A proposer of chains, or of dynamic trees with `nodes` draft nodes. kind: see `Grower`."""
        return StandaloneProposer(self, **draft_shape(self.vocab_size, tree, depth, topk, nodes), kind=kind)


def early_exit(target: Target, layers: Sequence[int]) -> Standalone:
    """The target drafts for itself with some of its layers only (Draft & Verify, 2309.08168): no training, no memory but the draft's cache.

    layers: 0-based, ascending. The weights are the target's own tensors. Raises UserError if a layer does not exist, or for targets whose layers
    are of several shapes that the configuration does not list by layer.
    """
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < target.num_layers:
        raise UserError(f"early exit: wanted ascending layers in 0 .. {target.num_layers - 1}, got {list(layers)}")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    config._attn_implementation = target.model.config._attn_implementation
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    draft_layers = next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == len(layers))
    path = next(name for name, module in model.named_modules() if module is draft_layers)
    whole = target.model.state_dict()
    own = {}
    for name in model.state_dict():
        own[name] = whole[name if not name.startswith(path + ".") else _renumbered(name, path, layers)]
    model.load_state_dict(own, assign=True)
    model.tie_weights()
    buffers = dict(target.model.named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:  # such as rotary frequencies, which no checkpoint holds
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, buffers[name])
    return Standalone(Target(model, target.tokenizer, f"{target.name}, layers {', '.join(map(str, layers))}")).bind(target)


def _renumbered(name: str, path: str, layers: Sequence[int]) -> str:
    """The name in the target of a tensor of the draft's layer list."""
    index, _, rest = name[len(path) + 1 :].partition(".")
    return f"{path}.{layers[int(index)]}.{rest}"


def check_tokenizers(draft: Target, target: Target) -> None:
    """Raise UserError unless every token has the same id for both. A longer table of padding rows does not matter."""
    if draft.tokenizer is None or target.tokenizer is None:
        return  # models without one, in which case ids are all there is
    compare_tokenizers(draft.tokenizer, target.tokenizer, draft.name, target.name)


def compare_tokenizers(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, draft_name: str, target_name: str) -> None:
    """`check_tokenizers` before any model is loaded."""
    ours, theirs = draft.get_vocab(), target.get_vocab()
    differing = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if differing:
        raise UserError(
            f"draft model {draft_name}: wanted the tokenizer of target {target_name}, got one in which {len(differing)} tokens differ "
            f"(such as {min(differing)!r}); choose a model of the target's family, or allow another tokenizer (--cross-tokenizer)"
        )


class StandaloneProposer(Grower):
    """Grows chains and dynamic trees with a draft model. Its cache holds every token up to and including the root."""

    ahead = 1  # the root

    def __init__(self, model: Standalone, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        super().__init__(taps=(), depth=depth, topk=topk, nodes=nodes, kind=kind)
        self.draft, self._vocab_size, self._target_vocab_size = model.draft, model.vocab_size, model.target_vocab_size
        self.max_positions, self.predictor = model.draft.max_positions, model.predictor

    def memory(self, batch: int, capacity: int) -> int:
        """Bytes that the draft's cache will grow by after `reset`."""
        return cache_growth(self.draft, batch, capacity + self.max_depth * self.topk)

    def reset(self, batch: int, capacity: int) -> None:
        """Make room for the tokens and one tree."""
        self.draft.allocate(batch, capacity + self.max_depth * self.topk)
        self._restart(batch, self.draft.device)

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [*super().tensors(), *self.draft.tensors()]

    def observe(self, accepted: Accepted) -> None:
        """Run the draft over the tokens that are new to it: the prompt's first, and then what follows each accepted token."""
        first, entries = self._fresh, self._entries
        self._observe_length(accepted)
        ids_BM, count_B = self._new_tokens(accepted, first)
        columns = ids_BM.shape[1]
        slots_BM = self._length_B.unsqueeze(1) + torch.arange(columns, device=ids_BM.device)
        slot_L = torch.arange(entries.longest + columns, device=ids_BM.device)
        allowed_BML = slot_L <= slots_BM.unsqueeze(-1)
        start = entries.longest if entries.exact else None
        hidden_BMH = self.draft.extend(ids_BM, slots_BM, slots_BM, allowed_BML, slot_L.expand(ids_BM.shape[0], -1), start).hidden_BNH
        self._remember(hidden_BMH, count_B)

    def _new_tokens(self, accepted: Accepted, first: bool) -> tuple[Tensor, Tensor]:
        """(tokens that are new to the draft [B, M], each row's real count)."""
        ids_BM = torch.cat([accepted.tokens_BM[:, :1], accepted.next_BM], dim=1) if first else accepted.next_BM
        count_B = accepted.count_B + 1 if first else accepted.count_B
        return ids_BM.clamp(max=self.draft.vocab_size - 1), count_B  # padding rows of the target's table that the draft's lacks

    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        return self.draft.extend(ids_BK, position_BK, slots_BK, allowed_BKL, key_BL, start).hidden_BNH

    def _confidence(self, p_BKV: Tensor, hidden_BKH: Tensor) -> Tensor:
        if isinstance(self.length, Predicted) and self.predictor is not None:
            predicted: Tensor = self.predictor(hidden_BKH)
            return predicted
        return super()._confidence(p_BKV, hidden_BKH)

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        return self.draft.logits(hidden_BKH)[..., : self._vocab_size]

    def _target_vocab(self) -> int:
        return self._target_vocab_size
