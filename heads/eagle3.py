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


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The reference's three taps, k = (2, L // 2, L - 3); for targets too small for three distinct ones, as many as are left."""
    return tuple(sorted({k for k in (2, num_layers // 2, num_layers - 3) if 1 <= k <= num_layers})) or (num_layers,)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes of the head. taps: canonical k (`decode/target.py`), ascending; lm_head has draft_vocab_size rows."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    target_vocab_size: int
    draft_vocab_size: int
    target_num_layers: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 2048

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or not 0 <= self.taps[0] <= self.taps[-1] <= self.target_num_layers:
            raise UserError(f"drafter.taps: wanted ascending layers in 0 .. {self.target_num_layers} (the target's), got {list(self.taps)}")
        if not 1 <= self.draft_vocab_size <= self.target_vocab_size:
            raise UserError(f"drafter.draft_vocab_size: wanted 1 .. {self.target_vocab_size} (the target's vocabulary), got {self.draft_vocab_size}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise UserError(f"drafter.num_heads: wanted a multiple of num_kv_heads {self.num_kv_heads} and an even head_dim, got {self.num_heads}")

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
        config = target.config
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") if isinstance(rope, dict) else None
        heads = num_heads or config.num_attention_heads
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=intermediate_size or getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            num_heads=heads,
            num_kv_heads=num_kv_heads or (heads if num_heads else getattr(config, "num_key_value_heads", None) or heads),
            head_dim=getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
            taps=tuple(taps) if taps is not None else default_taps(target.num_layers),
            target_vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size or target.vocab_size,
            target_num_layers=target.num_layers,
            rope_theta=float(theta or getattr(config, "rope_theta", None) or 10000.0),
            max_positions=target.max_positions or 2048,
        )


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * functional.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections of the head's attention; the input is [embedding; hidden], twice the width."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.num_heads, config.num_kv_heads, config.head_dim
        double = 2 * config.hidden_size
        self.q_proj = nn.Linear(double, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(double, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(double, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)
        inverse = config.rope_theta ** (-torch.arange(0, self.width, 2, dtype=torch.float32) / self.width)
        self.register_buffer("inverse_frequency", inverse, persistent=False)
        self.inverse_frequency: Tensor

    def project(self, x_BMW: Tensor, position_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, M, width], rotated keys and values [B, kv_heads, M, width]."""
        batch, pairs, _ = x_BMW.shape
        query = self.q_proj(x_BMW).view(batch, pairs, self.heads, self.width).transpose(1, 2)
        key = self.k_proj(x_BMW).view(batch, pairs, self.kv_heads, self.width).transpose(1, 2)
        value = self.v_proj(x_BMW).view(batch, pairs, self.kv_heads, self.width).transpose(1, 2)
        cos, sin = (table.to(query.dtype).unsqueeze(1) for table in self.rotary(position_BM))
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [..., width] of positions, in float32."""
        angle = torch.cat([position.float().unsqueeze(-1) * self.inverse_frequency] * 2, dim=-1)
        return angle.cos(), angle.sin()

    def expand(self, states: Tensor) -> Tensor:
        """Repeat kv heads to match the query heads."""
        return states if self.kv_heads == self.heads else states.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, heads, M, width] -> [B, M, H]."""
        merged: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return merged


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
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


class Eagle3(nn.Module):
    """The head. Its embeddings are the target's, frozen and not saved: `bind` attaches them."""

    method = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.target_vocab_size, dtype=torch.bool))
        self.d2t: Tensor
        self.t2d: Tensor
        self._embed: list[nn.Module] = []  # in a list, so that it is no submodule: never trained, never saved

    def bind(self, target: Target) -> Eagle3:
        """Use the target's embeddings. Returns self."""
        self._embed = [target.embeddings]
        return self

    def set_draft_vocabulary(self, ids: Tensor, target: Target | None = None) -> None:
        """Choose the draft vocabulary: ascending distinct target ids [V]. With a target, lm_head starts from the target's rows."""
        ids = ids.sort().values.to(self.d2t.device)
        if ids.numel() != self.config.draft_vocab_size or torch.unique(ids).numel() != ids.numel():
            raise UserError(f"draft vocabulary: wanted {self.config.draft_vocab_size} distinct ids, got {torch.unique(ids).numel()} of {ids.numel()}")
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True
        if target is not None:
            with torch.no_grad():
                rows = target.lm_head.weight
                assert isinstance(rows, Tensor)
                self.lm_head.weight.copy_(rows[ids])

    @property
    def draft_ids(self) -> Tensor:
        """[V] target id of each draft id."""
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings in the head's dtype."""
        assert self._embed, "bind(target) comes first"
        with torch.no_grad():
            out: Tensor = self._embed[0](ids)
        return out.to(self.fc.weight.dtype)

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
        total = ids_BT.shape[1]
        causal = torch.ones(total, total, dtype=torch.bool, device=ids_BT.device).tril()
        allowed = (causal & (document_BT.unsqueeze(1) == document_BT.unsqueeze(2))).unsqueeze(1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for k in range(steps):
            ids = torch.cat([ids_BT[:, k + 1 :], ids_BT.new_zeros(ids_BT.shape[0], min(k + 1, total))], dim=1)
            x = self.midlayer.inputs(self.embed(ids), hidden)
            query, key, value = attention.project(x, position_BT + k)
            keys.append(attention.expand(key))
            values.append(attention.expand(value))
            scale = attention.width**-0.5
            scores = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
            diagonal = [(query * later).sum(-1, keepdim=True) * scale for later in keys[1:]]
            weights = torch.cat([scores, *diagonal], dim=-1).float().softmax(-1).to(query.dtype)
            mixed = weights[..., :total] @ values[0]
            for index, later in enumerate(values[1:]):
                mixed = mixed + weights[..., total + index : total + index + 1] * later
            hidden = self.midlayer.finish(hidden, attention.output(mixed))
            outputs.append(hidden)
        return outputs

    def forward(self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, steps: int) -> list[Tensor]:
        """`training_outputs`, where wrappers for several processes expect it."""
        return self.training_outputs(taps_BTF, ids_BT, position_BT, document_BT, steps)

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
        self._length_B = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        self._longest = 0

    def observe(self, accepted: Accepted) -> None:
        """Run the head over the new (feature, next token) pairs; remember the output of each row's last one."""
        assert accepted.taps_BMF is not None
        self._observe_length(accepted, self._longest == 0)
        head, count = self.head, accepted.tokens_BM.shape[1]
        column = torch.arange(count, device=accepted.tokens_BM.device)
        slots_BM = self._length_B.unsqueeze(1) + column
        visible = self._longest + count
        allowed_BML = torch.arange(visible, device=column.device) <= slots_BM.unsqueeze(-1)
        fed = head.fc(accepted.taps_BMF.to(head.fc.weight.dtype))
        hidden_BMH = self._run(fed, accepted.next_BM, slots_BM, slots_BM, allowed_BML, self._longest if len(accepted.count_B) == 1 else None)
        last_BH = hidden_BMH.gather(1, (accepted.count_B - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, hidden_BMH.shape[-1])).squeeze(1)
        stands = (accepted.count_B > 0).unsqueeze(1)  # finished rows bring nothing new
        self._hidden_BH = last_BH if self._longest == 0 else torch.where(stands, last_BH, self._hidden_BH)
        self._length_B = self._length_B + accepted.count_B
        self._longest = int(self._length_B.max())

    def _run(self, fed_BMH: Tensor, ids_BM: Tensor, position_BM: Tensor, slots_BM: Tensor, allowed_BML: Tensor, start: int | None = None) -> Tensor:
        """One pass of the head: hidden states fed and tokens in, pre-norm outputs [B, M, H] out; K/V go to `slots`."""
        config, layer = self.head.config, self.head.midlayer
        batch, count = ids_BM.shape
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        x = layer.inputs(self.head.embed(ids_BM), fed_BMH).flatten(0, 1)
        mixed = x.mm(self._qkv).view(batch, count, -1, width).transpose(1, 2)
        turned = _rotate(mixed[:, : heads + kv_heads], self._cos[position_BM].unsqueeze(1), self._sin[position_BM].unsqueeze(1))
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
