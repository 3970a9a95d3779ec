"""PARD (2504.18583): a draft model that drafts a whole block in one pass, with mask tokens in place of the tokens that are not known yet.

    text ... root, mask, mask, mask          the root's place predicts the first draft token, each mask's place the next
The masks see the text and the masks before them, as any causal LM's tokens do, so that the model's forward pass is unchanged.

Dims: B batch, M accepted columns, N new entries (tokens and masks), D depth, H hidden, V draft vocabulary, L cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import UserError
from ..decode.growth import Kind
from ..decode.proposer import Accepted
from ..decode.sampling import Sampler
from ..decode.target import Target
from ..decode.tree import DraftTree
from .dflash import BlockGrower
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
        return PardProposer(self, depth=depth, topk=1 if tree == "chain" else topk, nodes=depth if tree == "chain" else nodes, kind=kind)


class PardProposer(BlockGrower, StandaloneProposer):
    """Drafts all depths in the pass that takes in what was accepted: masks follow the new tokens.

    Cache slots of a row:  0 ... length | new tokens, garbage | masks      the next pass writes its tokens behind the real ones, over the masks
    """

    def __init__(self, model: Pard, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        super().__init__(model, depth=depth, topk=topk, nodes=nodes, kind=kind)
        self._mask = model.mask_token_id
        self._state_BDH = torch.empty(0)  # from which all depths are predicted

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [*super().tensors(), self._state_BDH]

    def observe(self, accepted: Accepted) -> None:
        """Run the draft over the tokens that are new to it and the masks behind them; remember the states that predict."""
        first, entries, masks = self._fresh, self._entries, self.max_depth - 1
        self._observe_length(accepted)
        ids_BM, count_B = self._new_tokens(accepted, first)
        (batch, count), first_B1, real_B1 = ids_BM.shape, self._length_B.unsqueeze(1), count_B.unsqueeze(1)
        column_N = torch.arange(count + masks, device=first_B1.device)
        slots_BN = first_B1 + column_N
        position_BN = torch.where(column_N < count, slots_BN, slots_BN - count + real_B1)
        slot_L = torch.arange(entries.longest + count + masks, device=first_B1.device)
        behind_BL = slot_L >= first_B1 + count
        written_BL = (slot_L < first_B1 + real_B1) | behind_BL  # the slots between are garbage
        allowed_BNL = (slot_L <= slots_BN.unsqueeze(2)) & written_BL.unsqueeze(1)
        key_BL = torch.where(behind_BL, slot_L - count + real_B1, slot_L)
        ids_BN = torch.cat([ids_BM, torch.full((batch, masks), self._mask, device=ids_BM.device)], dim=1)
        state_BNH = self.draft.extend(ids_BN, position_BN, slots_BN, allowed_BNL, key_BL, entries.longest if entries.exact else None).hidden_BNH
        self._remember(state_BNH[:, :count], count_B)
        state_BDH = torch.cat([self._hidden_BH.unsqueeze(1), state_BNH[:, count:]], dim=1)
        if self._state_BDH.shape == state_BDH.shape and self._state_BDH.dtype == state_BDH.dtype and self._state_BDH.device == state_BDH.device:
            self._state_BDH.copy_(state_BDH)
        else:
            self._state_BDH = state_BDH

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree below the root."""
        self._logits_BDV = StandaloneProposer._logits(self, self._state_BDH)
        self._at = 0
        return super().propose(root_B, sampler, noise_BDV)
