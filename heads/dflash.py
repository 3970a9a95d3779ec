"""DFlash (2602.06036): a block of positions drafted in one pass, each seeing the whole block and the target's features of everything before it.

    c_t    = rms(fc(taps_t))                                            context: one entry a token, the same for all layers
    x      = [embed(anchor), embed(mask), embed(mask) ...]              a block of S positions p, p + 1 ...; the anchor is the token at p
    x      = x + attention(rms(x) over {c_t: t < p} and rms(x));  x = x + mlp(rms(x))           in each layer; no causal mask inside the block
    logits = output_rows(rms(x))                                        position p + k predicts the token at p + k; the anchor's predicts nothing
Keys and values of context and block come from the same projections; queries and keys have norms, as in Qwen3. Embeddings and output rows are the
target's and frozen. Tensor names and arithmetic follow the layout that serving engines load; the mask is a token of the target's vocabulary.

A block's positions do not know each other's tokens: the draft is one distribution a depth. A head that was trained with blocks of S positions can
draft with shorter ones, not with longer.

Dims: B batch, T sequence, A anchors, S positions of a block, M accepted columns, D depth, K candidates a depth, H hidden, F taps * H, Y layers,
V draft vocabulary, L cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import UserError
from ..decode.factorised import best_first
from ..decode.growth import Grower, Kind
from ..decode.proposer import Accepted
from ..decode.sampling import Sampler
from ..decode.target import Target
from ..decode.tree import DraftTree
from .blocks import MLP, Attention, RMSNorm, anchored_attention, fused_matrix, rotate
from .head import Head, LayerConfig, draft_shape, head_sizes, layer_sizes, scaled_rows
from .recurrent import check_output_layer


def spread_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """The reference's taps, spread evenly over k = 2 .. L - 2; all layers of a target that has no more than `count`."""
    if num_layers <= count:
        return tuple(range(1, num_layers + 1))
    return tuple(sorted({round(2 + index * (num_layers - 4) / (count - 1)) for index in range(count)}))


def mask_token(target: Target) -> int:
    """A token that texts do not hold: the tokenizer's mask token, else its padding token unless texts end with that, else the last one."""
    named = [getattr(target.tokenizer, name, None) for name in ("mask_token_id", "pad_token_id")] + [getattr(target.config, "pad_token_id", None)]
    own = getattr(target.config, "eos_token_id", None)
    ends = {getattr(target.tokenizer, "eos_token_id", None), *(own if isinstance(own, list) else [own])}
    return next((int(token) for token in named if token is not None and token not in ends and 0 <= token < target.vocab_size), target.vocab_size - 1)


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """num_layers: decoder layers. block_size: positions of a training block. mask_token_id: the token that stands for what is to be drafted.

    Taps are outputs of layers, as served heads' are: not the final norm.
    """

    num_layers: int
    block_size: int
    mask_token_id: int

    def __post_init__(self) -> None:
        if self.taps and self.taps[-1] > self.target_num_layers:
            raise UserError(f"drafter.taps: wanted ascending layers in 0 .. {self.target_num_layers} (the target's), got {list(self.taps)}")
        super().__post_init__()
        for name, good, wanted in (
            ("num_layers", self.num_layers >= 1, "at least 1"),
            ("block_size", self.block_size >= 2, "at least 2 positions"),
            ("mask_token_id", 0 <= self.mask_token_id < self.target_vocab_size, f"0 .. {self.target_vocab_size - 1} (the target's vocabulary)"),
        ):
            if not good:
                raise UserError(f"drafter.{name}: wanted {wanted}, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """Sizes of the head."""

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        taps: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        num_layers: int = 2,
        block_size: int = 8,
        mask_token_id: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> DFlashConfig:
        """Sizes that follow the target where none is given. The paper has 5 layers and blocks of 8 to 16."""
        check_output_layer(target)
        return cls(
            taps=tuple(taps) if taps is not None else spread_taps(target.num_layers),
            num_layers=num_layers,
            block_size=block_size,
            mask_token_id=mask_token(target) if mask_token_id is None else mask_token_id,
            **head_sizes(target, draft_vocab_size),
            **layer_sizes(target, intermediate_size, num_heads, num_kv_heads),
        )


class BlockAttention(Attention):
    """Attention of a block over context entries and itself, with norms of queries and keys."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x_BMH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, heads, M, width], rotated."""
        return rotate(self.q_norm(self.split(self.q_proj(x_BMH), self.heads)), cos, sin)

    def entries(self, x_BMH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, heads, M, width], repeated to match the query heads."""
        keys = rotate(self.k_norm(self.split(self.k_proj(x_BMH), self.kv_heads)), cos, sin)
        return self.expand(keys), self.expand(self.split(self.v_proj(x_BMH), self.kv_heads))


class BlockLayer(nn.Module):
    """A decoder layer of the head."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_BMH: Tensor, context_BTH: Tensor, turns: tuple[Tensor, Tensor], context_turns: tuple[Tensor, Tensor], allowed_BAT: Tensor
    ) -> Tensor:
        """Blocks side by side [B, A * S, H] through the layer. turns: cos and sin of their positions, [B, 1, A * S, width]; those of the context."""
        attention, x = self.self_attn, self.input_layernorm(x_BMH)
        query, own = attention.queries(x, *turns), attention.entries(x, *turns)
        mixed = anchored_attention(query, attention.entries(context_BTH, *context_turns), own, allowed_BAT)
        x_BMH = x_BMH + attention.output(mixed)
        out: Tensor = x_BMH + self.mlp(self.post_attention_layernorm(x_BMH))
        return out


class DFlash(Head):
    """The head. skipped: positions at a block's start that predict nothing (the anchor's)."""

    method = "dflash"
    skipped: ClassVar[int] = 1

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def block_layers(self) -> list[BlockLayer]:
        """Its layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def output_rows(self) -> Tensor:
        """[V, H] the target's output rows of the draft vocabulary, in the head's dtype; no gradient."""
        part = self.config.draft_vocab_size < self.config.target_vocab_size
        return scaled_rows(self.target, self.draft_ids if part else None).detach().to(self.fc.weight.dtype)

    def context(self, taps_BMF: Tensor) -> Tensor:
        """[B, M, H] context entries, which every layer projects to keys and values."""
        out: Tensor = self.hidden_norm(self.fc(taps_BMF.to(self.fc.weight.dtype)))
        return out

    def training_outputs(
        self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, anchors_BA: Tensor, size: int | None = None
    ) -> Tensor:
        """Blocks of `size` positions (None: block_size) at all anchors at once: what the output rows multiply, [B, A, S - skipped, H].

        anchors_BA: columns. A block sees the features of its own document's tokens before its anchor, and itself; no other block.
        """
        size = size or self.config.block_size
        column_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        own_BAT = document_BT.unsqueeze(1) == document_BT.gather(1, anchors_BA).unsqueeze(2)
        allowed_BAT = own_BAT & (column_T < anchors_BA.unsqueeze(2))
        ids_BAS = torch.full((*anchors_BA.shape, size), self.config.mask_token_id, device=ids_BT.device)
        ids_BAS[..., 0] = ids_BT.gather(1, anchors_BA)
        position_BAS = position_BT.gather(1, anchors_BA).unsqueeze(2) + torch.arange(size, device=ids_BT.device)
        x, context = self.embed(ids_BAS.flatten(1)), self.context(taps_BTF)
        turns, context_turns = self._turns(position_BAS.flatten(1)), self._turns(position_BT)
        for layer in self.block_layers():
            x = layer(x, context, turns, context_turns, allowed_BAT)
        out: Tensor = self.norm(x).unflatten(1, (-1, size))
        return out[:, :, self.skipped :]

    def _turns(self, position_BM: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.block_layers()[0].self_attn.rotary(position_BM)
        return cos.to(self.fc.weight.dtype).unsqueeze(1), sin.to(self.fc.weight.dtype).unsqueeze(1)

    @property
    def longest(self) -> int:
        """A block's positions that predict."""
        return self.config.block_size - self.skipped

    def check_depth(self, depth: int) -> None:
        """Raise UserError if it was not trained to draft so deep."""
        most = self.longest
        if not 1 <= depth <= most:
            size = self.config.block_size
            raise UserError(f"decode.depth: wanted 1 .. {most} (drafter.block_size is {size}), got {depth}; train longer blocks to draft deeper")

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> DFlashProposer:
        """A proposer of chains of each depth's best token, or of the `nodes` likeliest paths of each depth's `topk` best. kind: see `Grower`."""
        return DFlashProposer(self, **draft_shape(self.config.draft_vocab_size, tree, depth, topk, nodes), kind=kind)


class _Fused:
    """A layer's weights: projections that read the same input are one matrix."""

    def __init__(self, layer: BlockLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.between, self.q_norm, self.k_norm = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            attention.q_norm,
            attention.k_norm,
        )
        self.qkv = fused_matrix(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.output, self.down = fused_matrix(attention.o_proj.weight), fused_matrix(mlp.down_proj.weight)
        self.gate_up = fused_matrix(mlp.gate_proj.weight, mlp.up_proj.weight)


class BlockGrower(Grower):
    """Grows drafts from logits of all depths, `_logits_BDV`: chains (topk 1), or the likeliest trees (`best_first`)."""

    by_level = False
    _logits_BDV: Tensor
    _at = 0  # the depth, counted from 0, that is drafted next where that is done level by level

    def _all_scores(self, sampler: Sampler, noise_BDV: Tensor | None) -> Tensor:
        """[B, D, V] scores of all depths."""
        noise = None if noise_BDV is None else noise_BDV[:, : self.max_depth]
        ids_V = self._draft_ids()
        if noise is not None:
            noise = noise[..., : self._logits_BDV.shape[-1]] if ids_V is None else noise.index_select(-1, ids_V)
        return sampler.scores(self._logits_BDV, noise, ids_V=ids_V)

    def _chain(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        if self._policy is not None:
            return super()._chain(root_B, sampler, noise_BDV)
        tokens_BD = self._target_ids(self._all_scores(sampler, noise_BDV).argmax(-1))
        return DraftTree.chain(torch.cat([root_B.unsqueeze(1), tokens_BD], dim=1))

    def _tree(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        values_BDK, index_BDK = self.temperatures.log_p_by_depth(self._all_scores(sampler, noise_BDV), sampler).topk(self.topk, dim=-1)
        return best_first(root_B, self._target_ids(index_BDK), values_BDK, self.num_nodes - 1)

    def _static(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        assert self._static_shape is not None
        self._static_shape = self._static_shape.on(root_B.device)
        scores_BDV = self._all_scores(sampler, noise_BDV)[:, : self.max_depth]
        return self._static_shape.fill_by_depth(root_B, self._target_ids(scores_BDV.topk(self._static_shape.topk, dim=-1).indices))

    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        self._at += 1
        return fed_BKH

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        return self._logits_BDV[:, self._at].unsqueeze(1).expand(-1, hidden_BKH.shape[1], -1)


class DFlashProposer(BlockGrower):
    """Drafts a block a round.

    Its cache holds every layer's keys and values of the committed tokens' features; a block's own lie behind them until the next round. It copies
    weights: after training make a new one.

    Cache slots of a row:  0 ... length | block: root, mask, mask ...      length = committed tokens, which sit at their positions
    """

    def __init__(self, head: DFlash, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        head.check_depth(depth)
        super().__init__(taps=head.taps, depth=depth, topk=topk, nodes=nodes, kind=kind)
        self.head, config = head, head.config
        self._size = depth + head.skipped  # positions of a block
        layers = head.block_layers()
        self._layers = [_Fused(layer) for layer in layers]
        self._fc = fused_matrix(head.fc.weight)
        self._context = fused_matrix(*(part.weight for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)))
        self._k_norms = torch.stack([layer.self_attn.k_norm.weight.detach() for layer in layers]).unsqueeze(1)  # [Y, 1, width]
        self._vocabulary = fused_matrix(head.output_rows())
        self._ids = head.draft_ids if config.draft_vocab_size < config.target_vocab_size else None
        masks = torch.full((1, self._size - 1), config.mask_token_id, device=self._vocabulary.device)
        self._masks = head.embed(masks)
        self._keys = self._values = self._cos = self._sin = self._logits_BDV = torch.empty(0)

    def _shape(self, batch: int, capacity: int) -> tuple[int, int, int, int, int]:
        config = self.head.config
        return config.num_layers, batch, config.num_kv_heads, capacity + self._size, config.head_dim

    def memory(self, batch: int, capacity: int) -> int:
        """Bytes that `reset` will allocate: keys, values and the rotation tables; none if the cache is of that size already."""
        layers, _, kv_heads, slots, width = shape = self._shape(batch, capacity)
        if self._keys.shape == shape and self._keys.dtype == self._fc.dtype:
            return 0
        return 2 * slots * width * (layers * batch * kv_heads + 1) * self._fc.dtype.itemsize

    def reset(self, batch: int, capacity: int) -> None:
        """Make room for the committed tokens and one block."""
        shape = self._shape(batch, capacity)
        if self._keys.shape != shape or self._keys.dtype != self._fc.dtype:
            self._keys = torch.zeros(shape, dtype=self._fc.dtype, device=self._fc.device)
            self._values = torch.zeros_like(self._keys)
            tables = self.head.block_layers()[0].self_attn.rotary(torch.arange(shape[3], device=self._fc.device))
            self._cos, self._sin = (table.to(self._fc.dtype) for table in tables)
        self._restart(batch, self._fc.device)

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [self._length_B, self._keys, self._values, self._cos, self._sin]

    def observe(self, accepted: Accepted) -> None:
        """Put the new tokens' features into the cache, as keys and values of every layer."""
        assert accepted.taps_BMF is not None
        self._observe_length(accepted)
        config, entries = self.head.config, self._entries
        batch, count, width = *accepted.taps_BMF.shape[:2], config.head_dim
        slots_BM = self._length_B.unsqueeze(1) + torch.arange(count, device=self._length_B.device)
        context = self.head.hidden_norm(accepted.taps_BMF.to(self._fc.dtype).flatten(0, 1).mm(self._fc))
        keys, values = context.mm(self._context).view(batch, count, config.num_layers, 2, config.num_kv_heads, width).unbind(3)
        keys = functional.rms_norm(keys.float(), (width,), eps=config.rms_norm_eps).to(keys.dtype) * self._k_norms
        cos, sin = (table[slots_BM].view(batch, count, 1, 1, width) for table in (self._cos, self._sin))
        keys = rotate(keys, cos, sin)
        if entries.exact:
            new = slice(entries.longest, entries.longest + count)
            self._keys[:, :, :, new], self._values[:, :, :, new] = keys.permute(2, 0, 3, 1, 4), values.permute(2, 0, 3, 1, 4)
        else:
            rows = torch.arange(batch, device=slots_BM.device).unsqueeze(1)
            self._keys[:, rows, :, slots_BM], self._values[:, rows, :, slots_BM] = keys, values
        self._length_B.add_(accepted.count_B)
        self._fresh = False

    def _block(self, root_B: Tensor) -> Tensor:
        """One pass over a block that starts with the root: what the output rows multiply, [B, D, H]."""
        config, entries, batch, count = self.head.config, self._entries, root_B.shape[0], self._size
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        slots_BS = self._length_B.unsqueeze(1) + torch.arange(count, device=root_B.device)
        visible = entries.longest + count
        # All of a block see the same: what is committed, and the block. If all rows are of one length, that is all there is.
        allowed = None if entries.exact else (torch.arange(visible, device=root_B.device) <= slots_BS[:, -1:]).view(batch, 1, 1, visible)
        cos, sin = (table[slots_BS].unsqueeze(1) for table in (self._cos, self._sin))
        rows = torch.arange(batch, device=root_B.device).unsqueeze(1)
        x = torch.cat([self.head.embed(root_B.unsqueeze(1)), self._masks.expand(batch, -1, -1)], dim=1).flatten(0, 1)
        for index, layer in enumerate(self._layers):
            mixed = layer.before(x).mm(layer.qkv).view(batch, count, -1, width).transpose(1, 2)
            query, key = layer.q_norm(mixed[:, :heads]), layer.k_norm(mixed[:, heads : heads + kv_heads])
            turned = rotate(torch.cat([query, key], dim=1), cos, sin)
            keys, values = self._keys[index], self._values[index]
            if entries.exact:
                keys[:, :, entries.longest : visible], values[:, :, entries.longest : visible] = turned[:, heads:], mixed[:, heads + kv_heads :]
            else:
                keys[rows, :, slots_BS] = turned[:, heads:].transpose(1, 2)
                values[rows, :, slots_BS] = mixed[:, heads + kv_heads :].transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                turned[:, :heads].reshape(batch, kv_heads, -1, width), keys[:, :, :visible], values[:, :, :visible], attn_mask=allowed
            )
            attended = attended.view(batch, heads, count, width).transpose(1, 2).reshape(batch * count, heads * width)
            x = x + attended.mm(layer.output)
            gate, up = layer.between(x).mm(layer.gate_up).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up).mm(layer.down)
        out: Tensor = self.head.norm(x).view(batch, count, -1)[:, self.head.skipped :]
        return out

    def _begin(self, root_B: Tensor) -> Tensor:
        """Draft the block: sets its logits [B, D, V]. Returns the hidden states behind them, [B, D, H]."""
        hidden_BDH = self._block(root_B)
        self._logits_BDV = hidden_BDH.flatten(0, 1).mm(self._vocabulary).view(*hidden_BDH.shape[:2], -1)
        self._at = 0
        return hidden_BDH

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree below the root."""
        self._hidden_BH = self._begin(root_B)[:, 0]
        return super().propose(root_B, sampler, noise_BDV)

    def _target_vocab(self) -> int:
        return self.head.config.target_vocab_size

    def _draft_ids(self) -> Tensor | None:
        return self._ids
