"""EAGLE-3 (2503.01840): one decoder layer on the target's tapped features and the next token's embedding, unrolled on its own hidden states.

    g_t = fc(taps_t)                                     step 0; later steps feed the head's own pre-norm output instead
    x   = [rms(embed(token_{t+1})); rms(g_t)]            embeddings first
    h   = g_t + attention(x);  h = h + mlp(rms(h));      logits over the draft vocabulary = lm_head(rms(h)), predicting token t+2
Pair t has rotary position t. Tensor names and arithmetic follow the layout that serving engines load: one Llama layer, no biases,
`norm_before_residual` false; `d2t` holds offsets (target id = draft id + d2t[draft id]).

Dims: B batch, T sequence, M pairs, K nodes a level, H hidden, F taps * H, V draft vocabulary, L cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import UserError
from ..decode.growth import Grower, Kind
from ..decode.proposer import Accepted
from ..decode.target import Target
from .blocks import MLP, Attention, RMSNorm, rotate, unrolled_attention, within_documents
from .head import Head, LayerConfig, head_sizes, layer_sizes


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The reference's three taps, k = (2, L // 2, L - 3); for targets too small for three distinct ones, as many as are left."""
    return tuple(sorted({k for k in (2, num_layers // 2, num_layers - 3) if 1 <= k <= num_layers})) or (num_layers,)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """Sizes of the head. Its taps are outputs of layers, as served heads' are: not the final norm."""

    def __post_init__(self) -> None:
        if self.taps and self.taps[-1] > self.target_num_layers:
            raise UserError(f"drafter.taps: wanted ascending layers in 0 .. {self.target_num_layers} (the target's), got {list(self.taps)}")
        super().__post_init__()

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        taps: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> Eagle3Config:
        """Sizes that follow the target where none is given."""
        return cls(
            taps=tuple(taps) if taps is not None else default_taps(target.num_layers),
            **head_sizes(target, draft_vocab_size),
            **layer_sizes(target, intermediate_size, num_heads, num_kv_heads),
        )


class MidLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[rms(embedding); rms(hidden)]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual, then the MLP with its own: the pre-norm output, which is also the next step's hidden state."""
        hidden = hidden + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3(Head):
    """The head. Its embeddings are the target's."""

    method = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def output_layers(self) -> list[nn.Linear]:
        """The one output layer."""
        return [self.lm_head]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] over the draft vocabulary, from pre-norm outputs."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def training_outputs(self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, steps: int) -> list[Tensor]:
        """The training-time test: hidden states [B, T, H] after each of `steps` unrolled steps, pre-norm.

        Step k at position t has eaten the true tokens up to t+1+k and predicts token t+2+k. Its query sees step 0 causally (own document) and its
        own position's entries of steps 1 .. k, exactly what the cache holds when the head drafts k tokens past position t.
        """
        attention = self.midlayer.self_attn
        hidden = self.fc(taps_BTF.to(self.fc.weight.dtype))
        allowed = within_documents(document_BT)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for k in range(steps):
            ids = torch.cat([ids_BT[:, k + 1 :], ids_BT.new_zeros(ids_BT.shape[0], min(k + 1, ids_BT.shape[1]))], dim=1)
            x = self.midlayer.inputs(self.embed(ids), hidden)
            query, key, value = attention.project(x, position_BT + k)
            keys.append(attention.expand(key))
            values.append(attention.expand(value))
            hidden = self.midlayer.finish(hidden, attention.output(unrolled_attention(query, keys, values, allowed)))
            outputs.append(hidden)
        return outputs

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> Eagle3Proposer:
        """A proposer of chains, or of dynamic trees (EAGLE-2, 2406.16858) with `nodes` draft nodes. kind: see `Grower`."""
        return Eagle3Proposer(self, depth=depth, topk=1 if tree == "chain" else topk, nodes=depth if tree == "chain" else nodes, kind=kind)


@torch.no_grad()
def _matrix(*weights: Tensor) -> Tensor:
    """Weights [R_i, H] of projections of one input as a matrix [H, sum R_i]. On a CPU it is laid out anew: a product then takes half the time."""
    whole = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
    return whole.t().contiguous() if whole.device.type == "cpu" else whole.t()


class Eagle3Proposer(Grower):
    """Grows chains and dynamic trees with the head. Its cache holds committed (feature, next token) pairs.

    A draft step of a small head is all overhead, so this is the head's arithmetic in fewer operations: projections that read the same input are one,
    rotations come from a table, and query heads that share keys are rows of one matrix. It copies weights: after training make a new one.
    """

    def __init__(self, head: Eagle3, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        super().__init__(taps=head.config.taps, depth=depth, topk=topk, nodes=nodes, kind=kind)
        self.head = head
        attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
        self._qkv = _matrix(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self._gate_up = _matrix(mlp.gate_proj.weight, mlp.up_proj.weight)
        self._output, self._down, self._vocabulary = _matrix(attention.o_proj.weight), _matrix(mlp.down_proj.weight), _matrix(head.lm_head.weight)
        self._ids = head.draft_ids
        self._keys = self._values = self._cos = self._sin = torch.empty(0)

    def memory(self, batch: int, capacity: int) -> int:
        """Bytes that `reset` will allocate: keys, values and the rotation tables; none if the cache is of that size already."""
        config, weight = self.head.config, self.head.fc.weight
        slots = capacity + self.max_depth * self.topk
        if self._keys.shape == (batch, config.num_kv_heads, slots, config.head_dim) and self._keys.dtype == weight.dtype:
            return 0
        return 2 * slots * config.head_dim * (batch * config.num_kv_heads + 1) * weight.dtype.itemsize

    def reset(self, batch: int, capacity: int) -> None:
        """Make room for the committed pairs and one tree."""
        config, weight = self.head.config, self.head.fc.weight
        slots = capacity + self.max_depth * self.topk
        shape = (batch, config.num_kv_heads, slots, config.head_dim)
        if self._keys.shape != shape or self._keys.dtype != weight.dtype:
            self._keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self._values = torch.zeros_like(self._keys)
            tables = self.head.midlayer.self_attn.rotary(torch.arange(slots, device=weight.device))
            self._cos, self._sin = (table.to(weight.dtype) for table in tables)
        self._restart(batch, weight.device)

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [*super().tensors(), self._keys, self._values, self._cos, self._sin]

    def observe(self, accepted: Accepted) -> None:
        """Run the head over the new (feature, next token) pairs; remember the output of each row's last one."""
        assert accepted.taps_BMF is not None
        self._observe_length(accepted)
        head, entries, count = self.head, self._entries, accepted.tokens_BM.shape[1]
        slots_BM = self._length_B.unsqueeze(1) + torch.arange(count, device=accepted.tokens_BM.device)
        allowed_BML = torch.arange(entries.longest + count, device=slots_BM.device) <= slots_BM.unsqueeze(-1)
        fed = head.fc(accepted.taps_BMF.to(head.fc.weight.dtype))
        hidden_BMH = self._run(fed, accepted.next_BM, slots_BM, slots_BM, allowed_BML, entries.longest if entries.exact else None)
        self._remember(hidden_BMH, accepted.count_B)

    def _run(self, fed_BMH: Tensor, ids_BM: Tensor, position_BM: Tensor, slots_BM: Tensor, allowed_BML: Tensor, start: int | None = None) -> Tensor:
        """One pass of the head: hidden states fed and tokens in, pre-norm outputs [B, M, H] out; K/V go to `slots`."""
        config, layer = self.head.config, self.head.midlayer
        batch, count = ids_BM.shape
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        x = layer.inputs(self.head.embed(ids_BM), fed_BMH).flatten(0, 1)
        mixed = x.mm(self._qkv).view(batch, count, -1, width).transpose(1, 2)
        turned = rotate(mixed[:, : heads + kv_heads], self._cos[position_BM].unsqueeze(1), self._sin[position_BM].unsqueeze(1))
        if start is None:
            rows = torch.arange(batch, device=ids_BM.device).unsqueeze(1)
            self._keys[rows, :, slots_BM] = turned[:, heads:].transpose(1, 2)
            self._values[rows, :, slots_BM] = mixed[:, heads + kv_heads :].transpose(1, 2)
        else:
            self._keys[:, :, start : start + count] = turned[:, heads:]
            self._values[:, :, start : start + count] = mixed[:, heads + kv_heads :]
        visible, group = allowed_BML.shape[-1], heads // kv_heads
        attended = functional.scaled_dot_product_attention(
            turned[:, :heads].reshape(batch, kv_heads, group * count, width),
            self._keys[:, :, :visible],
            self._values[:, :, :visible],
            attn_mask=allowed_BML.repeat(1, group, 1).unsqueeze(1),
        )
        attended = attended.view(batch, heads, count, width).transpose(1, 2).reshape(batch * count, heads * width)
        hidden = fed_BMH.reshape(batch * count, -1) + attended.mm(self._output)
        gate, up = layer.post_attention_layernorm(hidden).mm(self._gate_up).chunk(2, dim=-1)
        out: Tensor = (hidden + (functional.silu(gate) * up).mm(self._down)).view(batch, count, -1)
        return out

    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        return self._run(fed_BKH, ids_BK, position_BK, slots_BK, allowed_BKL, start)

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        out: Tensor = self.head.norm(hidden_BKH).flatten(0, 1).mm(self._vocabulary).unflatten(0, hidden_BKH.shape[:2])
        return out

    def _target_vocab(self) -> int:
        return self.head.config.target_vocab_size

    def _draft_ids(self) -> Tensor:
        return self._ids
