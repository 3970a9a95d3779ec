"""Hydra (2402.05109): Medusa's heads, each of which also reads the embeddings of the tokens drafted before it. Hydra++ adds a prefix layer.

    z_k = [h_t; c e(token t+1); ...; c e(token t+1+k)]   h_t: the target's last hidden state after its final norm; e: the target's embeddings
    x_k = blocks_k(res_k z_k + SiLU(W_k z_k + b_k));     logits lm_head_k x_k predict token t + 2 + k
With `prefix_attention` (Hydra++), h_t is first put through one decoder layer of Llama's kind, causal over the hidden states of the whole text.
The constant c, one over the embeddings' root mean square, brings them to the scale of hidden states: they are often a hundredth of it, and then
learnt from slowly. It can be folded into res_k and W_k; in the paper it is 1. res_k starts as the choice of h_t, W_k as zero and output layers as the
target's rows, so that untrained heads are Medusa's untrained heads.

Dims: B batch, T sequence, M accepted columns, K nodes a level, H hidden, F taps * H (= H), W width of the state ((k + 2) H for head k),
V draft vocabulary, L cache slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import UserError
from ..decode.growth import Kind
from ..decode.proposer import Accepted
from ..decode.target import Target
from .blocks import DecoderLayer, within_documents
from .head import LayerConfig, draft_shape, head_sizes, layer_sizes
from .stepwise import ResBlock, SequentialHead, SequentialProposer, last_column


@dataclass(frozen=True, kw_only=True)
class HydraConfig(LayerConfig):
    """heads: tokens that can be drafted. num_layers: blocks of each head, the first of which reads the tokens. token_scale: c, see the module.
    prefix_attention: Hydra++; a decoder layer's sizes are those of its prefix layer, and mean nothing without it.
    """

    heads: int
    num_layers: int
    token_scale: float
    prefix_attention: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps != (self.target_num_layers + 1,):
            raise UserError(f"drafter.taps: wanted [{self.target_num_layers + 1}] (the target's final norm), got {list(self.taps)}; leave it out")

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        heads: int = 4,
        num_layers: int = 1,
        prefix_attention: bool = False,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> HydraConfig:
        """Sizes that follow the target where none is given."""
        return cls(
            taps=(target.num_layers + 1,),
            heads=heads,
            num_layers=num_layers,
            token_scale=_inverse_size(target),
            prefix_attention=prefix_attention,
            **head_sizes(target, draft_vocab_size),
            **layer_sizes(target, intermediate_size, num_heads, num_kv_heads),
        )


@torch.no_grad()
def _inverse_size(target: Target, sample: int = 4096) -> float:
    """One over the root mean square of the target's embeddings, of up to `sample` tokens from the whole vocabulary."""
    ids = torch.arange(0, target.vocab_size, max(1, target.vocab_size // sample), device=target.device)
    embedded: Tensor = target.embeddings(ids)
    if embedded.is_meta:  # a target of sizes only
        return 1.0
    return 1 / max(float(embedded.float().pow(2).mean().sqrt()), 1e-6)


class TokenBlock(nn.Module):
    """From [hidden state; embeddings of `tokens` tokens] to a hidden state; at first it gives the one it reads."""

    def __init__(self, hidden: int, tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden * (1 + tokens), hidden)
        self.res_connection = nn.Linear(hidden * (1 + tokens), hidden, bias=False)
        for parameter in (self.linear.weight, self.linear.bias):
            nn.init.zeros_(parameter)
        nn.init.eye_(self.res_connection.weight)  # the leftmost square is the identity, the rest is zero

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + functional.silu(self.linear(x))
        return out


class PrefixLayer(DecoderLayer):
    """Hydra++'s layer over hidden states: h + attention(rms(h)), then + mlp(rms(.))."""

    def project(self, hidden_BMH: Tensor, position_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys and values of hidden states at these positions."""
        return self.self_attn.project(self.input_layernorm(hidden_BMH), position_BM)

    def attend(self, hidden_BMH: Tensor, query: Tensor, key: Tensor, value: Tensor, allowed_BML: Tensor) -> Tensor:
        """The layer's output [B, M, H]. query: [B, heads, M, width], these hidden states' own; key, value: [B, kv_heads, L, width], of all slots."""
        attention = self.self_attn
        mixed = functional.scaled_dot_product_attention(query, attention.expand(key), attention.expand(value), attn_mask=allowed_BML.unsqueeze(1))
        return self.finish(hidden_BMH, attention.output(mixed))


class Hydra(SequentialHead):
    """The heads. Embeddings are the target's."""

    method = "hydra"

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.config = config
        hidden, later = config.hidden_size, config.num_layers - 1
        self.prefix = PrefixLayer(config) if config.prefix_attention else None
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(TokenBlock(hidden, k + 1), *(ResBlock(hidden) for _ in range(later))) for k in range(config.heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(hidden, config.draft_vocab_size, bias=False) for _ in range(config.heads))

    @property
    def heads(self) -> int:
        """How many tokens it can draft."""
        return self.config.heads

    def lm_head(self, k: int) -> nn.Linear:
        """Head k's output layer."""
        layer = self.hydra_lm_head[k]
        assert isinstance(layer, nn.Linear)
        return layer

    def output_layers(self) -> list[nn.Linear]:
        """One a head."""
        return [self.lm_head(k) for k in range(self.heads)]

    def begin(self, fed_BMF: Tensor, ids_BM: Tensor) -> Tensor:
        """[h_t; c e(token t+1)]. With a prefix layer, fed_BMF is what that gives."""
        return self.advance(fed_BMF, ids_BM, 0)

    def advance(self, state_BKW: Tensor, ids_BK: Tensor, k: int) -> Tensor:
        """One token more."""
        return torch.cat([state_BKW, self.config.token_scale * self.embed(ids_BK)], dim=-1)

    def output(self, state: Tensor, k: int) -> Tensor:
        """Head k's hidden state."""
        out: Tensor = self.hydra_mlp[k](state)
        return out

    def training_outputs(self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor) -> list[Tensor]:
        """Each head's hidden states [B, T, H], the true tokens being read; the prefix layer sees each document's own past."""
        hidden = taps_BTF.to(self.lm_head(0).weight.dtype)
        if self.prefix is not None:
            projected = self.prefix.project(hidden, position_BT)
            hidden = self.prefix.attend(hidden, *projected, within_documents(document_BT).squeeze(1))
        return self.unrolled(hidden, ids_BT)

    def proposer(
        self, *, tree: str = "chain", depth: int | None = None, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic"
    ) -> SequentialProposer:
        """A proposer of chains, or of dynamic trees with `nodes` draft nodes. depth None: all heads. kind: see `Grower`."""
        shape = draft_shape(self.config.draft_vocab_size, tree, self.heads if depth is None else depth, topk, nodes)
        return (SequentialProposer if self.prefix is None else PrefixProposer)(self, **shape, kind=kind)


class PrefixProposer(SequentialProposer):
    """Hydra++'s: keeps the keys and values of the prefix layer for all committed positions. Drafted tokens never get there."""

    head: Hydra

    def __init__(self, head: Hydra, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        super().__init__(head, depth=depth, topk=topk, nodes=nodes, kind=kind)
        assert head.prefix is not None
        self._prefix = head.prefix
        self._keys = self._values = torch.empty(0)

    def _shape(self, batch: int, capacity: int) -> tuple[int, int, int, int]:
        # Columns past a row's count are written too, up to a round's past the last committed position.
        return batch, self.head.config.num_kv_heads, capacity + self.max_depth + 1, self.head.config.head_dim

    def memory(self, batch: int, capacity: int) -> int:
        """Bytes that `reset` will allocate; none if the cache is of that size already."""
        shape, weight = self._shape(batch, capacity), self.head.lm_head(0).weight
        if self._keys.shape == shape and self._keys.dtype == weight.dtype:
            return 0
        return 2 * torch.Size(shape).numel() * weight.dtype.itemsize

    def reset(self, batch: int, capacity: int) -> None:
        """Make room for the committed positions."""
        shape, weight = self._shape(batch, capacity), self.head.lm_head(0).weight
        if self._keys.shape != shape or self._keys.dtype != weight.dtype:
            self._keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self._values = torch.zeros_like(self._keys)
        super().reset(batch, capacity)

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [*super().tensors(), self._keys, self._values]

    def observe(self, accepted: Accepted) -> None:
        """Run the prefix layer over what was accepted, then remember the state that each row's last pair gives."""
        assert accepted.taps_BMF is not None
        self._observe_length(accepted)
        entries, count = self._entries, accepted.tokens_BM.shape[1]
        hidden_BMH = accepted.taps_BMF.to(self.head.lm_head(0).weight.dtype)
        slots_BM = self._length_B.unsqueeze(1) + torch.arange(count, device=hidden_BMH.device)
        query, key, value = self._prefix.project(hidden_BMH, slots_BM)
        if entries.exact:
            self._keys[:, :, entries.longest : entries.longest + count] = key
            self._values[:, :, entries.longest : entries.longest + count] = value
        else:
            rows = torch.arange(hidden_BMH.shape[0], device=hidden_BMH.device).unsqueeze(1)
            self._keys[rows, :, slots_BM] = key.transpose(1, 2)
            self._values[rows, :, slots_BM] = value.transpose(1, 2)
        visible = entries.longest + count
        allowed_BML = torch.arange(visible, device=slots_BM.device) <= slots_BM.unsqueeze(-1)
        out_BMH = self._prefix.attend(hidden_BMH, query, self._keys[:, :, :visible], self._values[:, :, :visible], allowed_BML)
        self._begin(accepted, last_column(out_BMH, accepted.count_B))
