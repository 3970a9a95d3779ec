"""What heads with parameters of their own for every depth share: Medusa, Hydra, MLP speculator.

Head k at position t predicts token t + 2 + k: the target itself gives token t + 1. Seen from a round, the hidden state of the last accepted token has
given the root, and head k predicts a node of depth k + 1.

Dims: B batch, T sequence, M accepted columns, K nodes a level, F taps * H, W width of the state, V draft vocabulary, L slots.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn
from torch.nn import functional

from .. import UserError
from ..decode.growth import Grower, Kind
from ..decode.proposer import Accepted
from ..decode.sampling import Sampler
from ..decode.tree import DraftTree
from .head import Head


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), the identity at first (Medusa 2401.10774, section 2.1.1)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class StepwiseHead(Head):
    """One that drafts `heads` tokens at most, each with an output layer of its own (or one that is tied)."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """How many tokens it can draft."""

    @abstractmethod
    def lm_head(self, k: int) -> nn.Linear:
        """From what head k gives to the draft vocabulary."""

    @abstractmethod
    def training_outputs(self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor) -> list[Tensor]:
        """What each head gives to its output layer, for every position, the true tokens being those drafted before."""

    @property
    def longest(self) -> int:
        """One token a head."""
        return self.heads

    def check_depth(self, depth: int) -> None:
        """Raise UserError if it cannot draft so many tokens."""
        if not 1 <= depth <= self.heads:
            raise UserError(f"decode.depth: wanted 1 .. {self.heads} (drafter.heads), got {depth}; train with more heads to draft deeper")


class SequentialHead(StepwiseHead):
    """A stepwise head whose predictions depend on the tokens drafted before. What it knows of them is carried in a state from depth to depth."""

    @abstractmethod
    def begin(self, fed_BMF: Tensor, ids_BM: Tensor) -> Tensor:
        """The state [B, M, W] that head 0 reads: from the target's features of a token, and the token after it (the root)."""

    @abstractmethod
    def advance(self, state_BKW: Tensor, ids_BK: Tensor, k: int) -> Tensor:
        """The state that head k reads: from that which head k - 1 read, and the token drafted from it."""

    @abstractmethod
    def output(self, state: Tensor, k: int) -> Tensor:
        """What head k gives to its output layer."""

    def unrolled(self, fed_BTF: Tensor, ids_BT: Tensor) -> list[Tensor]:
        """`training_outputs` of features: each step reads the true token after those read before; past the end of a row, token 0."""
        padded = functional.pad(ids_BT, (0, self.heads))
        total, state, outputs = ids_BT.shape[1], None, []
        for k in range(self.heads):
            ids = padded[:, k + 1 : k + 1 + total]
            state = self.begin(fed_BTF, ids) if state is None else self.advance(state, ids, k)
            outputs.append(self.output(state, k))
        return outputs


def last_column(x_BMF: Tensor, count_B: Tensor) -> Tensor:
    """[B, 1, F] each row's last real column; the first one of rows that have none."""
    return x_BMF.gather(1, (count_B - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, x_BMF.shape[-1]))


class SequentialProposer(Grower):
    """Grows chains and dynamic trees with a sequential head. It keeps no cache: all it knows of the text is in the last token's features."""

    def __init__(self, head: SequentialHead, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        head.check_depth(depth)
        super().__init__(taps=head.taps, depth=depth, topk=topk, nodes=nodes, kind=kind)
        self.head = head
        self._ids = head.draft_ids
        self._drafted_levels = 0

    def reset(self, batch: int, capacity: int) -> None:
        """Forget everything."""
        self._restart(batch, self._ids.device)

    def observe(self, accepted: Accepted) -> None:
        """Remember the state that each row's last pair of features and next token gives."""
        assert accepted.taps_BMF is not None
        self._observe_length(accepted)
        self._begin(accepted, last_column(accepted.taps_BMF, accepted.count_B))

    def _begin(self, accepted: Accepted, fed_B1F: Tensor) -> None:
        root_B1 = last_column(accepted.next_BM.unsqueeze(-1), accepted.count_B).squeeze(-1)
        state_B1W = self.head.begin(fed_B1F.to(next(self.head.parameters()).dtype), root_B1)
        self._remember(state_B1W.expand(-1, accepted.tokens_BM.shape[1], -1), accepted.count_B)

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """Grow the tree below the root."""
        self._drafted_levels = 0
        return super().propose(root_B, sampler, noise_BDV)

    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        self._drafted_levels += 1
        return self.head.advance(fed_BKH, ids_BK, self._drafted_levels)

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        k = self._drafted_levels
        out: Tensor = self.head.lm_head(k)(self.head.output(hidden_BKH, k))
        return out

    def _target_vocab(self) -> int:
        return self.head.sizes.target_vocab_size

    def _draft_ids(self) -> Tensor:
        return self._ids
