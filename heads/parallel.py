"""Drafters whose mask entries stand for tokens that are not known yet: what P-EAGLE and PARD have in common when they draft.

Dims: B batch, M accepted columns, N new entries (accepted ones and masks), D depth, H hidden, V draft vocabulary, L cache slots.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ..decode.sampling import Sampler
from ..decode.tree import DraftTree
from .dflash import BlockGrower


class MaskGrower(BlockGrower):
    """Drafts all depths in the pass that takes in what was accepted: `max_depth - 1` masks follow the new entries.

    Cache slots of a row:  0 ... length | new entries, garbage | masks      the next pass writes its entries behind the real ones, over the masks
    """

    _state_BDH: Tensor  # from which all depths are predicted

    @abstractmethod
    def _read(self, state_BDH: Tensor) -> Tensor:
        """[B, D, V] logits of states."""

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [*super().tensors(), self._state_BDH]

    def _places(self, count: int, count_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where the new entries and the masks go, `count` columns of which count_B are real: (slots [B, N], positions [B, N], the slots that each
        sees [B, N, L], each slot's position [B, L]).
        """
        first_B1, real_B1 = self._length_B.unsqueeze(1), count_B.unsqueeze(1)
        column_N = torch.arange(count + self.max_depth - 1, device=first_B1.device)
        slots_BN = first_B1 + column_N
        position_BN = torch.where(column_N < count, slots_BN, slots_BN - count + real_B1)
        slot_L = torch.arange(self._entries.longest + len(column_N), device=first_B1.device)
        behind_BL = slot_L >= first_B1 + count
        written_BL = (slot_L < first_B1 + real_B1) | behind_BL  # the slots between are garbage
        allowed_BNL = (slot_L <= slots_BN.unsqueeze(2)) & written_BL.unsqueeze(1)
        return slots_BN, position_BN, allowed_BNL, torch.where(behind_BL, slot_L - count + real_B1, slot_L)

    def _keep(self, state_BNH: Tensor, count: int, count_B: Tensor) -> None:
        """Remember what the next draft is predicted from: the state of each row's last real entry, and those of the masks."""
        self._remember(state_BNH[:, :count], count_B)
        state_BDH = torch.cat([self._hidden_BH.unsqueeze(1), state_BNH[:, count:]], dim=1)
        if self._state_BDH.shape == state_BDH.shape and self._state_BDH.dtype == state_BDH.dtype and self._state_BDH.device == state_BDH.device:
            self._state_BDH.copy_(state_BDH)
        else:
            self._state_BDH = state_BDH

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree below the root."""
        self._logits_BDV = self._read(self._state_BDH)
        self._at = 0
        return super().propose(root_B, sampler, noise_BDV)
