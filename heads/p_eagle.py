"""P-EAGLE (2602.01469): EAGLE-3 made parallel, so that one pass drafts all tokens.

After the pairs of EAGLE-3 (a feature and the token that follows it) come mask entries, which stand for pairs that are not known yet:
    pair t:            g = fc(taps_t),           embed(token_{t+1}),   position t,        predicts token t + 2
    mask d = 1, 2 ...: g = fc(mask_hidden),      embed(mask),          position t + d,    predicts token t + 2 + d
They go through EAGLE-3's layers side by side; a mask entry sees the pairs up to its anchor t, the masks before it, and itself. mask_hidden
[1, 1, F] is learned, the mask is a token of the target's vocabulary. Tensor names and arithmetic follow the layout that serving engines load.

Dims: B batch, T sequence, A anchors, N new entries (pairs and masks), M accepted columns, D depth, H hidden, F taps * H, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import UserError
from ..decode.growth import Kind
from ..decode.proposer import Accepted
from ..decode.target import Target
from .blocks import Documents, anchored_attention, unrolled_attention
from .dflash import mask_token
from .eagle3 import Eagle3, Eagle3Config
from .head import draft_shape
from .parallel import MaskGrower
from .recurrent import RecurrentProposer


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """block_size: predictions of an anchor in training, that of the pair and those of its mask entries. mask_token_id: the token of mask entries."""

    block_size: int
    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, good, wanted in (
            ("block_size", self.block_size >= 2, "at least 2 positions"),
            ("mask_token_id", 0 <= self.mask_token_id < self.target_vocab_size, f"0 .. {self.target_vocab_size - 1} (the target's vocabulary)"),
        ):
            if not good:
                raise UserError(f"drafter.{name}: wanted {wanted}, got {getattr(self, name)}")

    @classmethod
    def for_target(  # type: ignore[override]  # recipes tell a method's settings by these names
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
    ) -> PEagleConfig:
        """Sizes that follow the target where none is given. The paper has 4 layers and 8 predictions."""
        base = Eagle3Config.for_target(
            target,
            taps=taps,
            draft_vocab_size=draft_vocab_size,
            num_layers=num_layers,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
        return cls(**vars(base), block_size=block_size, mask_token_id=mask_token(target) if mask_token_id is None else mask_token_id)


class PEagle(Eagle3):
    """The head."""

    method = "p_eagle"
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.taps) * config.hidden_size))

    def masks(self, rows: int, count: int) -> tuple[Tensor, Tensor]:
        """(token ids [B, count], what is fed [B, count, H]) of mask entries."""
        ids = torch.full((rows, count), self.config.mask_token_id, device=self.mask_hidden.device)
        return ids, self.combine(self.mask_hidden).expand(rows, count, -1)

    def training_outputs(  # type: ignore[override]  # its own objective asks for other things than the unrolled ones
        self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, anchors_BA: Tensor, size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """States of all pairs [B, T, H], and of the mask entries of all anchors at once [B, A, size - 1, H] (size None: block_size).

        anchors_BA: columns of pairs. An anchor's mask entries see no other's.
        """
        rows, anchors, count = *anchors_BA.shape, (size or self.config.block_size) - 1
        device, documents = ids_BT.device, Documents(document_BT)
        own_BAT = document_BT.unsqueeze(1) == document_BT.gather(1, anchors_BA).unsqueeze(2)
        allowed_BAT = own_BAT & (torch.arange(ids_BT.shape[1], device=device) <= anchors_BA.unsqueeze(2))
        mask_position = (position_BT.gather(1, anchors_BA).unsqueeze(2) + 1 + torch.arange(count, device=device)).flatten(1)
        following = torch.cat([ids_BT[:, 1:], torch.zeros_like(ids_BT[:, :1])], dim=1)
        mask_ids, mask_fed = self.masks(rows, anchors * count)
        x, hidden = self.enter(self.embed(following), self.combine(taps_BTF))
        mask_x, mask_hidden = self.enter(self.embed(mask_ids), mask_fed)
        for index, layer in enumerate(self.decoder_layers()):
            attention = layer.self_attn
            if index:
                x, mask_x = layer.input_layernorm(hidden), layer.input_layernorm(mask_hidden)
            query, key, value = attention.project(x, position_BT)
            hidden = layer.finish(hidden, attention.output(unrolled_attention(query, [key], [value], documents)))
            mask_query, *own = attention.project(mask_x, mask_position)
            before, (own_key, own_value) = (attention.expand(key), attention.expand(value)), (attention.expand(part) for part in own)
            mixed = anchored_attention(mask_query, before, (own_key, own_value), allowed_BAT, causal=True)
            mask_hidden = layer.finish(mask_hidden, attention.output(mixed))
        return self.leave(hidden), self.leave(mask_hidden).view(rows, anchors, count, -1)

    @property
    def longest(self) -> int:
        """A block's positions."""
        return self.config.block_size

    def check_depth(self, depth: int) -> None:
        """Raise UserError if it was not trained to draft so deep."""
        most = self.longest
        if not 1 <= depth <= most:
            raise UserError(f"decode.depth: wanted 1 .. {most} (drafter.block_size is {most}), got {depth}; train longer blocks to draft deeper")

    def proposer(self, *, tree: str = "chain", depth: int = 5, topk: int = 4, nodes: int = 16, kind: Kind = "deterministic") -> PEagleProposer:
        """A proposer of chains of each depth's best token, or of the `nodes` likeliest paths of each depth's `topk` best. kind: see `Grower`."""
        return PEagleProposer(self, **draft_shape(self.config.draft_vocab_size, tree, depth, topk, nodes), kind=kind)


class PEagleProposer(MaskGrower, RecurrentProposer):
    """Its entries are pairs: see `MaskGrower`."""

    head: PEagle

    def __init__(self, head: PEagle, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        head.check_depth(depth)
        super().__init__(head, depth=depth, topk=topk, nodes=nodes, kind=kind)
        with torch.no_grad():
            self._mask_ids, self._mask_fed = head.masks(1, depth - 1)
        self._state_BDH = torch.empty(0)

    def observe(self, accepted: Accepted) -> None:
        """Run the head over the new pairs and the mask entries behind them; remember the states that predict."""
        assert accepted.taps_BMF is not None
        self._observe_length(accepted)
        entries, (batch, count) = self._entries, accepted.tokens_BM.shape
        slots_BN, position_BN, allowed_BNL, _ = self._places(count, accepted.count_B)
        fed = torch.cat([self.head.combine(accepted.taps_BMF), self._mask_fed.expand(batch, -1, -1)], dim=1)
        ids = torch.cat([accepted.next_BM, self._mask_ids.expand(batch, -1)], dim=1)
        state_BNH = self._run(fed, ids, position_BN, slots_BN, allowed_BNL, entries.longest if entries.exact else None)
        self._keep(state_BNH, count, accepted.count_B)

    def _read(self, state_BDH: Tensor) -> Tensor:
        return RecurrentProposer._logits(self, state_BDH)
