"""Growing a draft with a causal model, level by level: what EAGLE-style heads and standalone drafts have in common.

A node's value is its cumulative log-probability under softmax((warped draft logits + noise) / t): at temperature 0 EAGLE-2's confidence (2406.16858),
and with shared noise the same idea given the noise that is known already; t is 1, or calibrated (`calibration.py`).

Cache slots of a row:  0 ... length | level 1: topk | level 2: topk | ...      length = committed entries, which sit at their positions

Dims: B batch, K nodes a level, D depth, C candidates, H hidden, V draft vocabulary, L cache slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from .. import UserError
from .calibration import Temperatures
from .draw import iid_children, without_replacement_children
from .factorised import keep_best
from .length import CostAware, DraftLength
from .proposer import Accepted, Extent
from .sampling import Sampler
from .tree import DraftTree
from .trees import StaticTree

Kind = Literal["deterministic", "iid", "without_replacement"]


class Grower(ABC):
    """A proposer of chains (topk 1) or dynamic trees: each level's `topk` best nodes are expanded, and of all candidates the best `nodes` are kept.

    kind "iid" or "without_replacement" draws instead of choosing the best: `topk` children of the root, one child of every other node, so that the
    tree is `topk` chains side by side (2305.09781's token tree), for the verification rules that ask for a sampled draft.

    A subclass keeps the cache of committed entries, and calls `_restart` in `reset` and `_remember` in `observe`.
    """

    ahead = 0  # entries in the cache beyond the target's committed tokens
    by_level = True  # whether a deeper tree takes longer to draft
    max_positions: int | None = None  # of the longest text that the model can follow; None: any
    temperatures = Temperatures()  # by which probabilities of acceptance follow from scores; to be set before a request

    def __init__(self, *, taps: tuple[int, ...], depth: int, topk: int, nodes: int, kind: Kind = "deterministic") -> None:
        if kind != "deterministic":
            nodes = depth * topk
        self.kind = kind
        self._policy: DraftLength | None = None
        self._cost: CostAware | None = None
        self._static_shape: StaticTree | None = None
        self._plan: list[tuple[Tensor, Tensor, Tensor]] = []
        candidates = topk + (depth - 1) * topk * topk
        if not depth <= nodes <= candidates:
            raise UserError(f"decode.nodes: wanted {depth} .. {candidates} for depth {depth} and topk {topk}, got {nodes}")
        self.taps, self.max_depth, self.topk, self.num_nodes = taps, depth, topk, nodes + 1
        self.extent = Extent(0, True)
        self._hidden_BH = torch.empty(0)  # from which the root's children are predicted
        self._length_B = torch.empty(0, dtype=torch.int64)  # entries in the cache
        self._fresh, self._drafted = True, 0

    @property
    def asynchronous(self) -> bool:
        """Unless a policy decides on the host."""
        return self._policy is None and self._cost is None

    def tensors(self) -> list[Tensor]:
        """What is kept between calls. A subclass adds its cache."""
        return [self._hidden_BH, self._length_B]

    @property
    def _entries(self) -> Extent:
        """How far the cache's entries reach."""
        return Extent(0, True) if self._fresh else Extent(self.extent.longest + self.ahead, self.extent.exact)

    def _restart(self, batch: int, device: torch.device) -> None:
        """No row has an entry."""
        self._fresh = True
        if self._length_B.shape != (batch,) or self._length_B.device != device:
            self._length_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self._length_B.zero_()

    def _remember(self, hidden_BMH: Tensor, count_B: Tensor) -> None:
        """Take each row's last real column as what its next tree grows from. Rows that are finished bring nothing new."""
        last_BH = hidden_BMH.gather(1, (count_B - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, hidden_BMH.shape[-1])).squeeze(1)
        if self._hidden_BH.shape != last_BH.shape or self._hidden_BH.dtype != last_BH.dtype or self._hidden_BH.device != last_BH.device:
            self._hidden_BH = last_BH.clone()
        else:
            self._hidden_BH.copy_(last_BH if self._fresh else torch.where((count_B > 0).unsqueeze(1), last_BH, self._hidden_BH))
        self._length_B.add_(count_B)
        self._fresh = False

    @property
    def length(self) -> DraftLength | None:
        """How deep each round's chain is, at most max_depth. None: always max_depth. Raises UserError for trees and sampled drafts."""
        return self._policy

    @length.setter
    def length(self, policy: DraftLength | None) -> None:
        if policy is not None and (self.topk > 1 or self.kind != "deterministic"):
            raise UserError(f"draft length: wanted a chain that is not sampled, got topk {self.topk}, kind {self.kind}; set no policy, or tree=chain")
        self._policy = policy

    @property
    def cost(self) -> CostAware | None:
        """How large each round's tree is, at most num_nodes. None: always num_nodes. Raises UserError for chains and sampled drafts."""
        return self._cost

    @cost.setter
    def cost(self, policy: CostAware | None) -> None:
        if policy is not None and (self.topk == 1 or self.kind != "deterministic"):
            raise UserError(f"cost-aware tree: wanted a dynamic tree, got topk {self.topk}, kind {self.kind}; for chains set a draft length")
        if policy is not None and not self.by_level:
            raise UserError("cost-aware tree: wanted a drafter that drafts level by level, got one that drafts a block at once; use dynamic")
        self._cost = policy

    def follow(self, shape: StaticTree) -> None:
        """Draft trees of this shape in all rounds (as EAGLE, 2401.15077). Raises UserError for one that does not fit, or with a policy."""
        if self.kind != "deterministic" or self._policy is not None or self._cost is not None or self.topk == 1:
            raise UserError(f"static tree: wanted a proposer of dynamic trees without a policy, got topk {self.topk}, kind {self.kind}")
        if shape.max_depth > self.max_depth or max(shape.width, shape.topk) > self.topk:
            wanted = f"a tree of depth {self.max_depth} at most, with {self.topk} children a node and {self.topk} expanded nodes a level at most"
            raise UserError(f"static tree: wanted {wanted}, got depth {shape.max_depth}, {shape.topk} and {shape.width}")
        self._static_shape, self.max_depth, self.num_nodes = shape, shape.max_depth, shape.num_nodes
        self._plan = []

    def _static(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        assert self._static_shape is not None
        shape, k = self._static_shape, self.topk
        if not self._plan or self._plan[0][0].device != root_B.device:
            self._static_shape = shape = shape.on(root_B.device)
            padded = [(p, r, (c + c[:1] * k)[:k]) for p, r, c in shape.plan()]  # a level is expanded k nodes at a time: the first ones again
            self._plan = [tuple(torch.tensor(x, device=root_B.device) for x in level) for level in padded]  # type: ignore[misc]
        offered_BKK = self._children(self._hidden_BH.unsqueeze(1), sampler, noise_BDV, 0)[0]
        hidden_BKH, (allowed_BKL, key_BL) = self._hidden_BH.unsqueeze(1).expand(-1, k, -1), self._below_root()
        levels = [root_B.unsqueeze(1)]
        for level, (parent_M, rank_M, chosen_K) in enumerate(self._plan, 1):
            tokens_BM = offered_BKK[:, parent_M, rank_M]
            levels.append(tokens_BM)
            if level < self.max_depth:
                from_K = parent_M[chosen_K]
                hidden_BKH, allowed_BKL = hidden_BKH[:, from_K], allowed_BKL[:, from_K]
                hidden_BKH, allowed_BKL = self._level(level, hidden_BKH, tokens_BM[:, chosen_K], allowed_BKL, key_BL)
                offered_BKK = self._children(hidden_BKH, sampler, noise_BDV, level)[0]
        return shape.fill(torch.cat(levels, dim=1))

    @abstractmethod
    def reset(self, batch: int, capacity: int) -> None:
        """Forget everything; make room for the committed entries and for `max_depth * topk` more."""

    @abstractmethod
    def observe(self, accepted: Accepted) -> None:
        """Run the model over what was accepted; set what the class's docstring says."""

    @abstractmethod
    def _advance(
        self, fed_BKH: Tensor, ids_BK: Tensor, position_BK: Tensor, slots_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor, start: int | None
    ) -> Tensor:
        """Run the model over one level's nodes: hidden states [B, K, H] that predict their children. fed_BKH: those that predicted the nodes.

        allowed_BKL: the slots that each node sees, its own one too; key_BL: each slot's position; start: if the host knows that the slots of all
        rows are start .. start + K - 1.
        """

    def _start(self, level: int) -> int | None:
        """The first slot of a level's nodes, if that is the same in all rows for sure."""
        return self._entries.longest + (level - 1) * self.topk if self._entries.exact else None

    @abstractmethod
    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        """[B, K, V] over the draft vocabulary."""

    @abstractmethod
    def _target_vocab(self) -> int:
        """Size of the target's vocabulary."""

    def _draft_ids(self) -> Tensor | None:
        """[V] target id of each draft id; None if they are the first V of the target's."""
        return None

    def _scores(self, hidden_BKH: Tensor, sampler: Sampler, noise_BDV: Tensor | None, level: int) -> Tensor:
        logits_BKV = self._logits(hidden_BKH)
        noise, ids_V = None, self._draft_ids()
        if noise_BDV is not None:
            noise = noise_BDV[:, level : level + 1]
            noise = noise[..., : logits_BKV.shape[-1]] if ids_V is None else noise.index_select(-1, ids_V)
        return sampler.scores(logits_BKV, noise, ids_V=ids_V)  # penalties do not count the draft's own tokens: only acceptance could tell

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        ids_V = self._draft_ids()
        return draft_ids if ids_V is None else ids_V[draft_ids]

    def _observe_length(self, accepted: Accepted) -> None:
        """Tell the policy how the last round went; rows that are finished say nothing. To be called by `observe`, before `_remember`."""
        policy = self._policy or self._cost
        if policy is None:
            return
        if self._fresh:
            policy.reset()
            return
        counts = [count - 1 for count in accepted.count_B.tolist() if count]
        if self._policy is not None:
            self._policy.observe(self._drafted, counts)
        if self._cost is not None:
            self._cost.observe(counts)

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        """Grow the tree below the root."""
        if self.kind != "deterministic":
            return self._sampled(root_B, sampler)
        if self._static_shape is not None:
            return self._static(root_B, sampler, noise_BDV)
        return self._chain(root_B, sampler, noise_BDV) if self.topk == 1 else self._tree(root_B, sampler, noise_BDV)

    def _below_root(self) -> tuple[Tensor, Tensor]:
        """(slots that a tree's nodes see before any is drafted [B, K, L], each slot's position [B, L])."""
        first_B1 = self._length_B.unsqueeze(1)
        slot_L = torch.arange(self._entries.longest + self.max_depth * self.topk, device=first_B1.device)
        key_BL = torch.where(slot_L < first_B1, slot_L, first_B1 + (slot_L - first_B1) // self.topk)
        return (slot_L < first_B1).unsqueeze(1).expand(-1, self.topk, -1), key_BL

    def _level(self, level: int, fed_BKH: Tensor, tokens_BK: Tensor, allowed_BKL: Tensor, key_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Run one level's nodes: (hidden states, the slots that they see, their own too)."""
        first_B1 = self._length_B.unsqueeze(1)
        slots_BK = first_B1 + (level - 1) * self.topk + torch.arange(self.topk, device=first_B1.device)
        allowed_BKL = allowed_BKL.scatter(2, slots_BK.unsqueeze(-1), True)
        position_BK = (first_B1 + level - 1).expand(-1, self.topk)
        return self._advance(fed_BKH, tokens_BK, position_BK, slots_BK, allowed_BKL, key_BL, self._start(level)), allowed_BKL

    def _draw(self, hidden_BKH: Tensor, sampler: Sampler, branching: int, first_node: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [B, K, branching], whether they exist, q over the target's vocabulary [B, K, V]) of the nodes from `first_node` on."""
        logits_BKV = self._logits(hidden_BKH)
        ids_V = self._draft_ids()
        q = sampler.probabilities(logits_BKV, ids_V=ids_V)
        vocab = max(self._target_vocab(), q.shape[-1])
        ids_V = torch.arange(q.shape[-1], device=q.device) if ids_V is None else ids_V
        q_BKV = q.new_zeros(*q.shape[:2], vocab).index_copy(2, ids_V, q)
        where = (branching, sampler.seed_B, self._length_B, first_node)
        if self.kind == "iid":
            tokens = iid_children(q_BKV, *where)
            return tokens, torch.ones_like(tokens, dtype=torch.bool), q_BKV
        return *without_replacement_children(q_BKV, *where), q_BKV

    def _sampled(self, root_B: Tensor, sampler: Sampler) -> DraftTree:
        batch, k, device = root_B.shape[0], self.topk, root_B.device
        tokens, exists, q_BKV = self._draw(self._hidden_BH.unsqueeze(1), sampler, k, 0)
        tokens_BK, exists_BK = tokens.squeeze(1), exists.squeeze(1)
        all_tokens, all_exists, all_q = [root_B.unsqueeze(1), tokens_BK], [torch.ones_like(exists_BK[:, :1]), exists_BK], [q_BKV]
        hidden_BKH, (allowed_BKL, key_BL) = self._hidden_BH.unsqueeze(1).expand(-1, k, -1), self._below_root()
        for level in range(1, self.max_depth):
            hidden_BKH, allowed_BKL = self._level(level, hidden_BKH, tokens_BK, allowed_BKL, key_BL)
            tokens, exists, q_BKV = self._draw(hidden_BKH, sampler, 1, 1 + (level - 1) * k)
            tokens_BK, exists_BK = tokens.squeeze(-1), exists_BK & exists.squeeze(-1)
            all_tokens.append(tokens_BK)
            all_exists.append(exists_BK)
            all_q.append(q_BKV)
        q_BNV = torch.cat([*all_q, torch.zeros_like(q_BKV[:, :1]).expand(-1, k, -1)], dim=1)  # the last level has no children
        tokens_BN, valid_BN = torch.cat(all_tokens, dim=1), torch.cat(all_exists, dim=1)
        if k == 1:
            tree = DraftTree.chain(tokens_BN, valid_BN)
        else:
            parents_N = torch.cat([torch.zeros(k + 1, dtype=torch.int64, device=device), torch.arange(1, self.num_nodes - k, device=device)])
            tree = DraftTree.from_parents(tokens_BN, parents_N.expand(batch, -1).contiguous(), self.max_depth, valid_BN)
        tree.q_BNV, tree.kind = q_BNV, self.kind
        return tree

    def _chain(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        tokens = [root_B.unsqueeze(1)]
        hidden_BKH, first_BK = self._hidden_BH.unsqueeze(1), self._length_B.unsqueeze(1)
        depth = self.max_depth if self._policy is None else self._policy.limit(self.max_depth)
        longest = self._entries.longest
        slot_L = torch.arange(longest + depth, device=root_B.device)
        path_B1 = torch.ones(1)
        for level in range(depth):
            scores_BKV = self._scores(hidden_BKH, sampler, noise_BDV, level)
            tokens.append(self._target_ids(scores_BKV.argmax(-1)))
            if level < depth - 1:
                if self._policy is not None and self._policy.needs_scores:
                    p_BKV = self.temperatures.log_p(scores_BKV, sampler, level).exp()
                    path_B1 = self._confidence(p_BKV, hidden_BKH) * path_B1
                    if not self._policy.goes_on(float(path_B1.max()), float(torch.special.entr(p_BKV).sum(-1).min())):
                        break
                slots_BK, seen_L = first_BK + level, slot_L[: longest + level + 1]
                allowed_BKL = (seen_L <= slots_BK).unsqueeze(1)
                key_BL = seen_L.expand(root_B.shape[0], -1)
                hidden_BKH = self._advance(hidden_BKH, tokens[-1], slots_BK, slots_BK, allowed_BKL, key_BL, self._start(level + 1))
        self._drafted = len(tokens) - 1
        return DraftTree.chain(torch.cat(tokens, dim=1))

    def _confidence(self, p_BKV: Tensor, hidden_BKH: Tensor) -> Tensor:
        """[B, K] how likely the tokens just chosen are to be accepted: by the draft's distributions, of which these are the hidden states."""
        return p_BKV.amax(-1)

    def _children(self, hidden_BKH: Tensor, sampler: Sampler, noise_BDV: Tensor | None, level: int) -> tuple[Tensor, Tensor]:
        """The topk children of each node: target ids and log values [B, K, topk]."""
        scores_BKV = self._scores(hidden_BKH, sampler, noise_BDV, level)
        values, index = self.temperatures.log_p(scores_BKV, sampler, level).topk(self.topk, dim=-1)
        return self._target_ids(index), values

    def _tree(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        batch, k, device = root_B.shape[0], self.topk, root_B.device
        tokens_BK, values_BK = (x.squeeze(1) for x in self._children(self._hidden_BH.unsqueeze(1), sampler, noise_BDV, 0))
        parent_BK = torch.zeros_like(tokens_BK)  # candidate ids: 0 is the root, then candidates in order of creation
        all_tokens, all_values, all_parents = [tokens_BK], [values_BK], [parent_BK]
        made = k
        chosen_BK = torch.arange(1, k + 1, device=device).expand(batch, k)  # candidate ids that this level expands
        hidden_BKH, (allowed_BKL, key_BL) = self._hidden_BH.unsqueeze(1).expand(-1, k, -1), self._below_root()
        for level in range(1, self.max_depth):
            if self._cost is not None and not self._worth_a_level(self._cost, level, torch.cat(all_values, 1), values_BK):
                break
            hidden_BKH, allowed_BKL = self._level(level, hidden_BKH, tokens_BK, allowed_BKL, key_BL)
            child_tokens, child_values = self._children(hidden_BKH, sampler, noise_BDV, level)
            flat_tokens = child_tokens.flatten(1)
            flat_values = (values_BK.unsqueeze(-1) + child_values).flatten(1)
            all_tokens.append(flat_tokens)
            all_values.append(flat_values)
            all_parents.append(chosen_BK.repeat_interleave(k, dim=1))
            values_BK, best = flat_values.topk(k, dim=-1)
            tokens_BK, from_node = flat_tokens.gather(1, best), best // k
            chosen_BK = best + made + 1
            made += k * k
            hidden_BKH = hidden_BKH.gather(1, from_node.unsqueeze(-1).expand_as(hidden_BKH))
            allowed_BKL = allowed_BKL.gather(1, from_node.unsqueeze(-1).expand_as(allowed_BKL))
        nodes, values_BC = self.num_nodes - 1, torch.cat(all_values, 1)
        if self._cost is not None:
            best_C = values_BC.sort(dim=1, descending=True).values[:, :nodes].exp().mean(0).cumsum(0)
            nodes = self._cost.choose([0.0, *best_C.tolist()], len(all_values))
        return keep_best(root_B, torch.cat(all_tokens, 1), values_BC, torch.cat(all_parents, 1), nodes, len(all_values))

    def _worth_a_level(self, cost: CostAware, levels: int, values_BC: Tensor, frontier_BK: Tensor) -> bool:
        nodes = min(self.num_nodes - 1, values_BC.shape[1])
        mass = values_BC.topk(nodes, dim=1).values.exp().sum(1).mean()
        return cost.goes_on(levels, nodes + 1, *torch.stack([mass, frontier_BK.exp().sum(1).mean()]).tolist())
