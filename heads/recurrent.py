"""Heads that run on their own hidden states: what EAGLE-1, EAGLE-3 and MTP have in common.

    x, h   = enter(embed(token_{t+1}), fed_t)      fed: at step 0 the target's features, combined; at later steps the head's own state
    h      = h + attention(x);  h = h + mlp(rms(h))      in each layer; what a further layer reads is x = rms(h)
    state  = leave(h)                              what the next step is fed
    logits = readout(state) @ output_rows^T        over the draft vocabulary, predicting token t+2
Pair t, of a feature and the token that follows, has rotary position t.

Dims: B batch, T sequence, M pairs, K nodes a level, H hidden, F taps * H, W width that the first layer reads, V draft vocabulary, L cache slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .. import UserError
from ..decode.growth import Grower, Kind
from ..decode.proposer import Accepted
from ..decode.target import Target
from .blocks import DecoderLayer, Documents, RMSNorm, fused_matrix, unrolled_attention
from .head import Head, LayerConfig, draft_shape, scaled_rows


class RecurrentHead(Head):
    """A head of decoder layers that is fed its own states. Its embeddings, and unless it has its own, its output rows are the target's."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        self.config = config

    @abstractmethod
    def decoder_layers(self) -> list[DecoderLayer]:
        """Its layers, in order. They share one shape of keys and values."""

    @abstractmethod
    def combine(self, taps_BMF: Tensor) -> Tensor:
        """[B, M, H] what step 0 is fed: made of the target's features."""

    def embed_pairs(self, ids: Tensor, position: Tensor) -> Tensor:
        """The embeddings of the tokens of pairs at these positions: the target's unless a head says otherwise."""
        return self.embed(ids)

    @abstractmethod
    def enter(self, embedded: Tensor, fed: Tensor) -> tuple[Tensor, Tensor]:
        """(what the first layer's attention reads [B, M, W], the residual stream [B, M, H])."""

    def leave(self, hidden: Tensor) -> Tensor:
        """The state, from the last layer's output: that output itself unless a head says otherwise."""
        return hidden

    def readout(self, state: Tensor) -> Tensor:
        """What the output rows multiply: the state itself unless a head says otherwise."""
        return state

    def output_rows(self) -> Tensor:
        """[V, H] the output layer: the target's rows of the draft vocabulary, frozen, with the family's factor on logits.

        A soft cap on the target's logits is left out: it keeps their order, and the head is trained for what it is used with.
        """
        part = self.config.draft_vocab_size < self.config.target_vocab_size
        return scaled_rows(self.target, self.draft_ids if part else None).to(next(self.parameters()).dtype)

    def logits(self, state: Tensor) -> Tensor:
        """[..., V] over the draft vocabulary."""
        return functional.linear(self.readout(state), self.output_rows())

    def training_outputs(
        self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, steps: int, detach: bool = False
    ) -> list[Tensor]:
        """The training-time test (2503.01840): states [B, T, H] after each of `steps` unrolled steps.

        Step k at position t has eaten the true tokens up to t+1+k and predicts token t+2+k. In every layer its query sees step 0 causally (own
        document) and its own position's entries of steps 1 .. k, exactly what the cache holds when the head drafts k tokens past position t.
        detach: no gradient flows back through the states that a step is fed.
        """
        layers, documents = self.decoder_layers(), Documents(document_BT)
        keys: list[list[Tensor]] = [[] for _ in layers]
        values: list[list[Tensor]] = [[] for _ in layers]
        fed, outputs = self.combine(taps_BTF), []
        for k in range(steps):
            ids = torch.cat([ids_BT[:, k + 1 :], ids_BT.new_zeros(ids_BT.shape[0], min(k + 1, ids_BT.shape[1]))], dim=1)
            x, hidden = self.enter(self.embed_pairs(ids, position_BT + k), fed)
            for index, layer in enumerate(layers):
                attention = layer.self_attn
                query, key, value = attention.project(x if index == 0 else layer.input_layernorm(hidden), position_BT + k)
                keys[index].append(key)
                values[index].append(value)
                hidden = layer.finish(hidden, attention.output(unrolled_attention(query, keys[index], values[index], documents)))
            outputs.append(self.leave(hidden))
            fed = outputs[-1].detach() if detach else outputs[-1]
        return outputs

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> RecurrentProposer:
        """A proposer of chains, or of dynamic trees (EAGLE-2, 2406.16858) with `nodes` draft nodes. kind: see `Grower`."""
        return RecurrentProposer(self, **draft_shape(self.config.draft_vocab_size, tree, depth, topk, nodes), kind=kind)


def check_output_layer(target: Target) -> None:
    """For heads that draft with the target's output layer. Raises UserError if it has a bias, which they would leave out."""
    if getattr(target.lm_head, "bias", None) is not None:
        raise UserError("drafter.method: wanted a target whose output layer has no bias, got one that has; use eagle3, which has an output layer")


class _Fused:
    """A decoder layer's matrices, joined where they read the same input, and its norms."""

    def __init__(self, layer: DecoderLayer, first: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = fused_matrix(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.gate_up = fused_matrix(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.output, self.down = fused_matrix(attention.o_proj.weight), fused_matrix(mlp.down_proj.weight)
        self.before: RMSNorm | None = None if first else layer.input_layernorm
        self.between = layer.post_attention_layernorm


class RecurrentProposer(Grower):
    """Grows chains and dynamic trees with the head. Its cache holds committed (feature, next token) pairs.

    A draft step of a small head is all overhead, so this is the head's arithmetic in fewer operations: projections that read the same input are one,
    rotations come from a table, and query heads that share keys are rows of one matrix. It copies weights: after training make a new one.
    """

    def __init__(self, head: RecurrentHead, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        super().__init__(taps=head.taps, depth=depth, topk=topk, nodes=nodes, kind=kind)
        self.head = head
        self._layers = [_Fused(layer, first=index == 0) for index, layer in enumerate(head.decoder_layers())]
        self._vocabulary, self._ids = fused_matrix(head.output_rows()), head.draft_ids
        self._keys = self._values = self._cos = self._sin = torch.empty(0)
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()  # each layer's keys and values: views

    def _shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        config = self.head.config
        return len(self._layers), batch, config.num_kv_heads, capacity + self.max_depth * self.topk, config.head_dim

    def memory(self, batch: int, capacity: int) -> int:
        """Bytes that `reset` will allocate: keys, values and the rotation tables; none if the cache is of that size already."""
        layers, _, kv_heads, slots, width = shape = self._shape(batch, capacity)
        dtype = self._vocabulary.dtype
        if self._keys.shape == shape and self._keys.dtype == dtype:
            return 0
        return 2 * slots * width * (layers * batch * kv_heads + 1) * dtype.itemsize

    def reset(self, batch: int, capacity: int) -> None:
        """Make room for the committed pairs and one tree."""
        shape, like = self._shape(batch, capacity), self._vocabulary
        if self._keys.shape != shape or self._keys.dtype != like.dtype:
            self._keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._values = torch.zeros_like(self._keys)
            self._caches = [(self._keys[index], self._values[index]) for index in range(shape[0])]
            tables = self.head.decoder_layers()[0].self_attn.rotary(torch.arange(shape[3], device=like.device))
            self._cos, self._sin = (table.to(like.dtype) for table in tables)
            self._sin[:, : shape[4] // 2].neg_()  # rotation is x cos + [second half; first half] (-sin, sin)
        self._restart(batch, like.device)

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [*super().tensors(), self._keys, self._values, self._cos, self._sin]

    def observe(self, accepted: Accepted) -> None:
        """Run the head over the new (feature, next token) pairs; remember the state of each row's last one."""
        assert accepted.taps_BMF is not None
        self._observe_length(accepted)
        entries, count = self._entries, accepted.tokens_BM.shape[1]
        slots_BM = self._length_B.unsqueeze(1) + torch.arange(count, device=accepted.tokens_BM.device)
        allowed_BML = torch.arange(entries.longest + count, device=slots_BM.device) <= slots_BM.unsqueeze(-1)
        fed = self.head.combine(accepted.taps_BMF)
        state_BMH = self._run(fed, accepted.next_BM, slots_BM, slots_BM, allowed_BML, entries.longest if entries.exact else None)
        self._remember(state_BMH, accepted.count_B)

    def _run(self, fed_BMH: Tensor, ids_BM: Tensor, position_BM: Tensor, slots_BM: Tensor, allowed_BML: Tensor, start: int | None = None) -> Tensor:
        """One pass of the head: states fed and tokens in, states [B, M, H] out; K/V go to `slots`."""
        head, config = self.head, self.head.config
        batch, count = ids_BM.shape
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        cos, sin = self._cos[position_BM].unsqueeze(1), self._sin[position_BM].unsqueeze(1)
        visible, group = allowed_BML.shape[-1], heads // kv_heads
        mask = allowed_BML.repeat(1, group, 1).unsqueeze(1)
        rows = torch.arange(batch, device=ids_BM.device).unsqueeze(1) if start is None else None
        x, hidden = (part.flatten(0, 1) for part in head.enter(head.embed_pairs(ids_BM, position_BM), fed_BMH))
        for layer, (keys, values) in zip(self._layers, self._caches, strict=True):
            if layer.before is not None:
                x = layer.before(hidden)
            mixed = x.mm(layer.qkv).view(batch, count, -1, width).transpose(1, 2)
            turning = mixed[:, : heads + kv_heads]
            first, second = turning.chunk(2, dim=-1)
            turned = torch.addcmul(turning * cos, torch.cat([second, first], dim=-1), sin)
            if start is None:
                keys[rows, :, slots_BM] = turned[:, heads:].transpose(1, 2)
                values[rows, :, slots_BM] = mixed[:, heads + kv_heads :].transpose(1, 2)
            else:
                keys[:, :, start : start + count] = turned[:, heads:]
                values[:, :, start : start + count] = mixed[:, heads + kv_heads :]
            attended = functional.scaled_dot_product_attention(
                turned[:, :heads].reshape(batch, kv_heads, group * count, width), keys[:, :, :visible], values[:, :, :visible], attn_mask=mask
            )
            attended = attended.view(batch, heads, count, width).transpose(1, 2).reshape(batch * count, heads * width)
            hidden = torch.addmm(hidden, attended, layer.output)
            gate, up = layer.between(hidden).mm(layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, functional.silu(gate) * up, layer.down)
        return head.leave(hidden.view(batch, count, -1))

    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        return self._run(fed_BKH, ids_BK, position_BK, slots_BK, allowed_BKL, start)

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        return self.head.readout(hidden_BKH).flatten(0, 1).mm(self._vocabulary).view(*hidden_BKH.shape[:2], -1)

    def _target_vocab(self) -> int:
        return self.head.config.target_vocab_size

    def _draft_ids(self) -> Tensor | None:
        return self._ids
