"""Medusa (2401.10774): heads that predict several tokens ahead from one hidden state of the target, each on its own.

    x_k = blocks_k(h_t)          h_t: the target's last hidden state, after its final norm; each block is x + SiLU(Wx + b)
    p_k = softmax(lm_head_k x_k)                                                     predicts token t + 2 + k, k = 0, 1 ...
The target is frozen (Medusa-1). Blocks are the identity at first, and output layers the target's rows, so that head 0 starts as the target's own
prediction of token t + 1.

Dims: B batch, T sequence, M accepted columns, D depth, K candidates a depth, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import UserError
from ..decode.calibration import Temperatures
from ..decode.factorised import best_first, check_nodes
from ..decode.proposer import Accepted, Extent
from ..decode.sampling import Sampler
from ..decode.target import Target
from ..decode.tree import DraftTree
from ..decode.trees import StaticTree
from .head import HeadConfig, draft_shape, head_sizes
from .stepwise import ResBlock, StepwiseHead, last_column


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """heads: tokens that can be drafted. num_layers: residual blocks of each head. It reads the last hidden state, after the final norm, only."""

    heads: int
    num_layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps != (self.target_num_layers + 1,):
            raise UserError(f"drafter.taps: wanted [{self.target_num_layers + 1}] (the target's final norm), got {list(self.taps)}; leave it out")

    @classmethod
    def for_target(cls, target: Target, *, heads: int = 4, num_layers: int = 1, draft_vocab_size: int | None = None) -> MedusaConfig:
        """Sizes that follow the target where none is given."""
        return cls(taps=(target.num_layers + 1,), heads=heads, num_layers=num_layers, **head_sizes(target, draft_vocab_size))


class MedusaBlocks(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Medusa(StepwiseHead):
    """The heads."""

    method = "medusa"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.config = config
        self.blocks = nn.ModuleList(MedusaBlocks(config) for _ in range(config.heads))
        self.lm_heads = nn.ModuleList(nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.heads))

    @property
    def heads(self) -> int:
        """How many tokens it can draft."""
        return self.config.heads

    def lm_head(self, k: int) -> nn.Linear:
        """Head k's output layer."""
        layer = self.lm_heads[k]
        assert isinstance(layer, nn.Linear)
        return layer

    def output_layers(self) -> list[nn.Linear]:
        """One a head."""
        return [self.lm_head(k) for k in range(self.heads)]

    def training_outputs(self, taps_BTF: Tensor, ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor) -> list[Tensor]:
        """Each head's hidden states [B, T, H], of all positions. They depend on no token that is drafted, so ids are not read."""
        hidden = taps_BTF.to(self.lm_head(0).weight.dtype)
        return [blocks(hidden) for blocks in self.blocks]

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[..., depth, V] of the first `depth` heads, from the target's last hidden states [..., H]."""
        hidden = hidden.to(self.lm_head(0).weight.dtype)
        return torch.stack([self.lm_head(k)(self.blocks[k](hidden)) for k in range(depth)], dim=-2)

    def proposer(self, *, tree: str = "chain", depth: int | None = None, topk: int = 4, nodes: int = 16) -> MedusaProposer:
        """A proposer of chains of each head's best token, or of the `nodes` likeliest paths of each head's `topk` best. depth None: all heads."""
        return MedusaProposer(self, **draft_shape(self.config.draft_vocab_size, tree, self.heads if depth is None else depth, topk, nodes))


class MedusaProposer:
    """Chains (topk 1), or the likeliest trees of each round (`best_first`).

    With shared noise, each depth's scores are given the noise of that position: tokens of one depth are then ranked the same under all parents, as
    they are without noise.
    """

    max_positions: int | None = None
    temperatures = Temperatures()  # by which probabilities of acceptance follow from scores; to be set before a request

    def __init__(self, head: Medusa, *, depth: int, topk: int, nodes: int) -> None:
        head.check_depth(depth)
        check_nodes(nodes, depth, topk)
        self.head, self.taps, self.max_depth, self.topk, self.num_nodes = head, head.taps, depth, topk, nodes + 1
        self.extent = Extent(0, True)
        self._ids = head.draft_ids
        self._shape: StaticTree | None = None
        self._hidden_BH = torch.empty(0)  # of each row's last accepted token

    @property
    def asynchronous(self) -> bool:
        """It never waits for the device."""
        return True

    def tensors(self) -> list[Tensor]:
        """What is kept between calls."""
        return [self._hidden_BH]

    def _draft_ids(self) -> Tensor:
        """[V] target id of each draft id."""
        return self._ids

    def reset(self, batch: int, capacity: int) -> None:
        """Nothing to do: what is kept is overwritten after the prefill."""

    def observe(self, accepted: Accepted) -> None:
        """Remember the hidden state of each row's last accepted token; rows that are finished bring nothing new."""
        assert accepted.taps_BMF is not None
        last_BH = last_column(accepted.taps_BMF, accepted.count_B).squeeze(1)
        if self._hidden_BH.shape != last_BH.shape or self._hidden_BH.dtype != last_BH.dtype or self._hidden_BH.device != last_BH.device:
            self._hidden_BH = last_BH.clone()
        else:
            self._hidden_BH.copy_(torch.where((accepted.count_B > 0).unsqueeze(1), last_BH, self._hidden_BH))

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree below the root."""
        logits_BDV = self.head.logits(self._hidden_BH, self.max_depth)
        noise = None if noise_BDV is None else noise_BDV[:, : self.max_depth].index_select(-1, self._ids)
        return self._tree(root_B, sampler.scores(logits_BDV, noise, ids_V=self._ids), sampler)

    def follow(self, shape: StaticTree) -> None:
        """Draft trees of this shape in all rounds, as the paper does. Raises UserError for one that is too deep or too wide."""
        self.head.check_depth(shape.max_depth)
        if shape.topk > self.head.config.draft_vocab_size:
            raise UserError(f"static tree: wanted ranks below {self.head.config.draft_vocab_size}, the draft vocabulary, got {shape.topk - 1}")
        self._shape = shape.on(self._ids.device)
        self.max_depth, self.num_nodes, self.topk = shape.max_depth, shape.num_nodes, shape.topk

    def _tree(self, root_B: Tensor, scores_BDV: Tensor, sampler: Sampler) -> DraftTree:
        if self._shape is not None:
            return self._shape.fill_by_depth(root_B, self._ids[scores_BDV.topk(self.topk, dim=-1).indices])
        if self.topk == 1:
            return DraftTree.chain(torch.cat([root_B.unsqueeze(1), self._ids[scores_BDV.argmax(-1)]], dim=1))
        values_BDK, index_BDK = self.temperatures.log_p_by_depth(scores_BDV, sampler).topk(self.topk, dim=-1)
        return best_first(root_B, self._ids[index_BDK], values_BDK, self.num_nodes - 1)


class StaticMedusaProposer(MedusaProposer):
    """Trees of one shape in all rounds, as the paper's. paths: see `decode.trees`; such as `likeliest_paths(rank_acceptance(...), nodes)`."""

    def __init__(self, head: Medusa, paths: Sequence[Sequence[int]]) -> None:
        shape = StaticTree.from_paths(paths)
        super().__init__(head, depth=shape.max_depth, topk=shape.topk, nodes=shape.num_nodes - 1)
        self.follow(shape)


@torch.no_grad()
def rank_acceptance(head: Medusa, target: Target, ids_BT: Tensor, loss_BT: Tensor, document_BT: Tensor, topk: int) -> list[list[float]]:
    """[heads][topk]: how often each head's candidate of each rank is the text's token (Medusa 2401.10774, section 2.3.3).

    Only tokens that `loss_BT` marks count; documents (-1: padding) are kept apart. One hit is added to every count, so that none is zero.
    """
    position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    hidden_BTH = target.features(ids_BT, position_BT, document_BT).hidden_BNH
    acceptance = []
    for k in range(head.heads):
        ahead = 2 + k
        judged = loss_BT[:, ahead:] & (document_BT[:, :-ahead] == document_BT[:, ahead:]) & (document_BT[:, ahead:] >= 0)
        logits_NV = head.lm_head(k)(head.blocks[k](hidden_BTH[:, :-ahead][judged].to(head.lm_head(k).weight.dtype)))
        hits_NK = head.draft_ids[logits_NV.topk(topk, dim=-1).indices] == ids_BT[:, ahead:][judged].unsqueeze(1)
        acceptance.append(((hits_NK.sum(0) + 1) / (len(hits_NK) + 1)).tolist())
    return acceptance
