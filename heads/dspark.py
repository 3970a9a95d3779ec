"""DSpark (2607.05147): DFlash's backbone, a bias by the token before, and a head that tells how likely a draft is to be accepted.

    x      = [embed(anchor), embed(mask), embed(mask) ...]              as DFlash's, but position p + k predicts the token at p + k + 1,
                                                                        so that the anchor's position predicts too
    logits = output_rows(h_k) + W2 W1[token at p + k],   h_k = rms(x)   low rank: W1 embeds target tokens, W2 gives draft-vocabulary biases
    c_k    = sigmoid(w [h_k; W1[token at p + k]] + b)                   trained to be 1 - TV(target, drafter) there: the probability that a token
                                                                        sampled from the drafter is accepted, if all before it were
What is drafted is not sampled from the drafter alone: it is its best token, or its best under noise that the target shares. So the logit of c_k is
calibrated by measured decoding, for greedy and for sampled text: scale * logit + shift. The contract of a trained head holds both.
The layers run once a round; only the bias is sequential. Tensor names and arithmetic follow the layout that serving engines load (in its terms
`sample_from_anchor` and `confidence_head_with_markov` are true, and `markov_head_type` is vanilla).

Dims: B batch, D depth, K nodes a level, H hidden, R rank, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from .. import UserError
from ..decode.growth import Grower, Kind
from ..decode.length import Expected
from ..decode.sampling import Sampler
from ..decode.target import Target
from ..decode.tree import DraftTree
from .blocks import fused_matrix
from .dflash import BlockConfig, DFlash, DFlashConfig, DFlashProposer
from .head import draft_shape


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How to read the confidence's logit: (scale, shift) for greedy and for sampled text. As it is trained: (1, 0)."""

    greedy: tuple[float, float] = (1.0, 0.0)
    sampled: tuple[float, float] = (1.0, 0.0)

    @classmethod
    def of(cls, values: dict[str, Sequence[float]]) -> Self:
        """From a contract. Raises UserError for what is none."""
        try:
            pairs = {name: (float(values[name][0]), float(values[name][1])) for name in ("greedy", "sampled")}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"contract: wanted calibration with scale and shift of greedy and sampled, got {values}") from error
        return cls(**pairs)

    def apply(self, logit_BD: Tensor, greedy_B: Tensor) -> Tensor:
        """Calibrated logits, by row."""
        table = torch.tensor([self.sampled, self.greedy], dtype=logit_BD.dtype, device=logit_BD.device)
        scale_B1, shift_B1 = table[greedy_B.long()].unsqueeze(-1).unbind(1)
        return scale_B1 * logit_BD + shift_B1


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """markov_rank: of the bias by the token before."""

    markov_rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise UserError(f"drafter.markov_rank: wanted at least 1, got {self.markov_rank}; for none use the method dflash")

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        taps: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        num_layers: int = 2,
        block_size: int = 7,
        mask_token_id: int | None = None,
        markov_rank: int = 256,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> DSparkConfig:
        """Sizes that follow the target where none is given. The paper has 5 layers and blocks of 7."""
        backbone = DFlashConfig.for_target(
            target,
            taps=taps,
            draft_vocab_size=draft_vocab_size,
            num_layers=num_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
        return cls(**vars(backbone), markov_rank=markov_rank)


class MarkovHead(nn.Module):
    """The bias by the token before. It is zero at first."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.target_vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """From [h; W1[token before]] to the logit of the probability of acceptance."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class DSpark(DFlash):
    """The head. All positions of a block predict."""

    method = "dspark"
    skipped: ClassVar[int] = 0

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)
        self.calibration = Calibration()

    def latent(self, before: Tensor) -> Tensor:
        """[..., R] of the target tokens before."""
        out: Tensor = self.markov_head.markov_w1(before)
        return out

    def confidence_logits(self, hidden: Tensor, latent: Tensor) -> Tensor:
        """[...] from hidden states [..., H] and latents [..., R]; the sigmoid is the probability of acceptance."""
        out: Tensor = self.confidence_head.proj(torch.cat([hidden, latent], dim=-1)).squeeze(-1)
        return out

    def proposer(
        self,
        *,
        tree: str = "chain",
        depth: int = 5,
        topk: int = 4,
        nodes: int = 16,
        kind: Kind = "deterministic",
        min_confidence: float | None = None,
    ) -> DSparkProposer:
        """A proposer of chains or dynamic trees. kind: see `Grower`. min_confidence: see `DSparkProposer`."""
        shape = draft_shape(self.config.draft_vocab_size, tree, depth, topk, nodes)
        return DSparkProposer(self, **shape, kind=kind, min_confidence=min_confidence)


class DSparkProposer(DFlashProposer):
    """Runs the layers over a block, then grows chains or dynamic trees in which each token's children have its bias.

    min_confidence: chains end where the probability that all of it is accepted falls below that, but hold at least one token. `expected`: they end
    where verifying more does not pay. Both go by calibrated confidence; whether a token is verified depends on the tokens before it, never on itself.
    They make rounds wait for the device.
    """

    head: DSpark
    by_level = True

    def __init__(self, head: DSpark, *, depth: int, topk: int, nodes: int, kind: Kind = "deterministic", min_confidence: float | None = None) -> None:
        super().__init__(head, depth=depth, topk=topk, nodes=nodes, kind=kind)
        if min_confidence is not None and not 0 <= min_confidence <= 1:
            raise UserError(f"min_confidence: wanted a probability, got {min_confidence}")
        if min_confidence is not None and (topk > 1 or kind != "deterministic"):
            raise UserError(f"min_confidence: wanted a chain that is not sampled, got topk {topk}, kind {kind}; leave it out, or use tree=chain")
        self.min_confidence = min_confidence
        self._expected: Expected | None = None
        self._bias = fused_matrix(head.markov_head.markov_w2.weight)
        self._hidden_BDH = self._drafted_BN = torch.empty(0)
        self._greedy_B = torch.empty(0, dtype=torch.bool)

    @property
    def expected(self) -> Expected | None:
        """How much of a chain is verified. None: all of it. Raises UserError for trees and sampled drafts."""
        return self._expected

    @expected.setter
    def expected(self, policy: Expected | None) -> None:
        if policy is not None and (self.topk > 1 or self.kind != "deterministic"):
            raise UserError(f"decode.length: wanted a chain that is not sampled, got topk {self.topk}, kind {self.kind}; leave it out")
        self._expected = policy

    @property
    def asynchronous(self) -> bool:
        """Unless chains end by confidence."""
        return self.min_confidence is None and self._expected is None and super().asynchronous

    def confidence(self) -> Tensor:
        """[B, D] of the chain that was proposed last: the probability that each token is accepted if all before it were, without looking at it.

        Calibrated; as it is trained it speaks of tokens sampled from the drafter at temperature 1. Raises ValueError after a tree.
        """
        return self.head.calibration.apply(self.confidence_logits(), self._greedy_B).sigmoid()

    def confidence_logits(self) -> Tensor:
        """[B, D] float32: `confidence` before calibration and sigmoid."""
        if self.topk > 1:
            raise ValueError(f"confidence is of chains, this proposer grows trees of topk {self.topk}")
        before_BD = self._drafted_BN[:, : self._hidden_BDH.shape[1]]
        hidden_BDH = self._hidden_BDH[:, : before_BD.shape[1]]
        return self.head.confidence_logits(hidden_BDH, self.head.latent(before_BD)).float()

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """A tree below the root."""
        self._hidden_BDH = self._begin(root_B)
        self._hidden_BH = self.head.latent(root_B)  # what grows from node to node is the token's latent
        tree = Grower.propose(self, root_B, sampler, noise_BDV)
        self._drafted_BN, self._greedy_B = tree.tokens_BN, ~sampler.random_B
        if self._expected is not None:
            return DraftTree.chain(tree.tokens_BN[:, : 1 + self._expected.choose(self.confidence().cumprod(1).tolist())])
        return tree if self.min_confidence is None else self._confident(tree, self.min_confidence)

    def _confident(self, tree: DraftTree, least: float) -> DraftTree:
        """The chain as far as it is likely enough to be accepted."""
        kept_B = (self.confidence().cumprod(1) >= least).sum(1).clamp(1, tree.max_depth)
        nodes = 1 + int(kept_B.max())
        valid_BN = torch.arange(nodes, device=kept_B.device) <= kept_B.unsqueeze(1)
        return DraftTree.chain(tree.tokens_BN[:, :nodes], valid_BN)

    def _chain(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        return Grower._chain(self, root_B, sampler, noise_BDV)

    def _tree(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        return Grower._tree(self, root_B, sampler, noise_BDV)

    def _static(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        return Grower._static(self, root_B, sampler, noise_BDV)

    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        self._at += 1
        return self.head.latent(ids_BK)

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        bias_BKV = hidden_BKH.flatten(0, 1).mm(self._bias).view(*hidden_BKH.shape[:2], -1)
        return bias_BKV + self._logits_BDV[:, self._at].unsqueeze(1)
