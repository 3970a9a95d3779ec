"""PARD (2504.18583): a draft model that drafts a whole block in one pass, with mask tokens in place of the tokens that are not known yet.

    text ... root, mask, mask, mask          the root's place predicts the first draft token, each mask's place the next
The masks see the text and the masks before them, as any causal LM's tokens do, so that the model's forward pass is unchanged.

Dims: B batch, M accepted columns, N new entries (tokens and masks), D depth, H hidden, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import UserError
from ..decode.growth import Kind
from ..decode.proposer import Accepted
from ..decode.target import Target
from .head import draft_shape
from .parallel import MaskGrower
from .standalone import Standalone, StandaloneProposer


class Pard(Standalone):
    """A draft model with its mask token. block_size: tokens that it was trained to draft in one pass; None: not known, and not limited."""

    method = "pard"

    def __init__(self, draft: Target, mask_token_id: int, block_size: int | None = None) -> None:
        super().__init__(draft)
        if not 0 <= mask_token_id < draft.vocab_size:
            raise UserError(f"draft model {draft.name}: wanted a mask token in 0 .. {draft.vocab_size - 1}, got {mask_token_id}")
        self.mask_token_id, self.block_size = mask_token_id, block_size

    @property
    def longest(self) -> int | None:
        """Tokens of a block."""
        return self.block_size

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> PardProposer:
        """A proposer of chains of each depth's best token, or of the `nodes` likeliest paths of each depth's `topk` best. kind: see `Grower`."""
        if depth < 1 or (self.block_size is not None and depth > self.block_size):
            raise UserError(f"decode.depth: wanted 1 .. {self.block_size} (drafter.block_size), got {depth}; train longer blocks to draft deeper")
        return PardProposer(self, **draft_shape(self.vocab_size, tree, depth, topk, nodes), kind=kind)


class PardProposer(MaskGrower, StandaloneProposer):
    """Its entries are tokens: see `MaskGrower`."""

    def __init__(self, model: Pard, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        super().__init__(model, depth=depth, topk=topk, nodes=nodes, kind=kind)
        self._mask = model.mask_token_id
        self._state_BDH = torch.empty(0)

    def observe(self, accepted: Accepted) -> None:
        """Run the draft over the tokens that are new to it and the masks behind them; remember the states that predict."""
        first, entries = self._fresh, self._entries
        self._observe_length(accepted)
        ids_BM, count_B = self._new_tokens(accepted, first)
        batch, count = ids_BM.shape
        slots_BN, position_BN, allowed_BNL, key_BL = self._places(count, count_B)
        ids_BN = torch.cat([ids_BM, torch.full((batch, self.max_depth - 1), self._mask, device=ids_BM.device)], dim=1)
        state_BNH = self.draft.extend(ids_BN, position_BN, slots_BN, allowed_BNL, key_BL, entries.longest if entries.exact else None).hidden_BNH
        self._keep(state_BNH, count, count_B)

    def _read(self, state_BDH: Tensor) -> Tensor:
        return StandaloneProposer._logits(self, state_BDH)
