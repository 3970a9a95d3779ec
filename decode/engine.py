"""The engine: prefill, then rounds of propose / verify / walk / commit / observe. Written once, batched, with every row at its own length.

Plain decoding is the same loop with a tree of one node; it is the honest baseline. With shared noise the output of every proposer is
token-identical to plain decoding with the same seeds (L1 at any temperature; greedy is the case of zero noise).

Dims: B batch, T prompt, N nodes, D depth, P = D + 1 path, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .. import UserError
from .budget import check as check_memory
from .draw import PhiloxChance
from .proposer import Accepted, Proposer
from .sampling import NoiseWindow, Sampler, SamplingParams
from .target import Target
from .tree import DraftTree
from .verify import Verdict, rule_for, verify, walk

Finish = Literal["", "eos", "stop", "length"]  # why a row ended; empty: it has not


@dataclass
class Times:
    """Seconds, host clock, device synchronised at the borders when it is a GPU."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0  # prefill included

    @property
    def decode(self) -> float:
        """Seconds after the first token."""
        return self.total - self.prefill


@dataclass
class Round:
    """One row's part in one round: accepted draft tokens, and tokens emitted (accepted + 1, less what EOS or the limit cut off)."""

    accepted: int
    emitted: int


@dataclass
class Generation:
    """Per row: new tokens (EOS included), and its rounds. The first token comes from the prefill and belongs to no round."""

    tokens: list[list[int]]
    rounds: list[list[Round]]
    times: Times = field(default_factory=Times)
    draft_nodes: int = 0  # draft nodes a round
    finish: list[Finish] = field(default_factory=list)


class Engine:
    """Decodes with a target and, if given, a proposer, whose drafts the verification rule `rule` (one of `verify.RULES`) judges.

    shared_noise, the default, is token-identical to plain decoding at any temperature. The others draw on their own: lossless in distribution, as
    their class says, and reproducible by seed, but another sample than plain decoding's. Raises UserError for a rule that the proposer's trees
    are not valid for.
    """

    def __init__(self, target: Target, proposer: Proposer | None = None, *, rule: str = "shared_noise") -> None:
        self.target, self.proposer, self.rule = target, proposer, rule
        kind = getattr(proposer, "kind", "deterministic")
        rule_for(rule, "chain" if kind != "deterministic" and getattr(proposer, "topk", 0) == 1 else kind)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        max_new_tokens: int,
        *,
        eos_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        speculate: Sequence[bool] | None = None,
        on_tokens: Callable[[int, list[int], int], None] | None = None,
    ) -> Generation:
        """Generate for a batch of prompts (token ids, each at least one).

        params: one for all rows, or one a row. speculate: False for rows that are to be decoded one token at a time (None: none). A row ends with
        the token that completes a stop string. on_tokens(row, new tokens, drafted) is called as tokens come; the first `drafted` were drafted.
        Raises UserError if a prompt is empty or does not fit the target's positions, or if memory does not suffice (`decode/budget.py`).
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        self._check(prompts, settings, max_new_tokens)
        target, proposer, device = self.target, self.proposer, self.target.device
        target.set_taps(proposer.taps if proposer else ())
        observer: Any = proposer if getattr(proposer, "wants_logits", False) else None
        sampler = Sampler(settings, device)
        ends = _Ends(set(eos_ids), list(stop_strings), max_new_tokens, target.tokenizer)
        depth, nodes = (proposer.max_depth, proposer.num_nodes) if proposer else (0, 1)
        batch, longest = len(prompts), max(len(p) for p in prompts)
        capacity = longest + max_new_tokens + nodes + depth + 1
        check_memory(target, proposer, batch, capacity, prompt=longest, max_new_tokens=max_new_tokens, settings=settings, shared_noise=self._shared)
        target.allocate(batch, capacity)
        times, clock = Times(), _Clock(device)
        began = clock.now()

        ids_BT = torch.zeros(batch, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, : len(prompt)] = torch.tensor(prompt)
        ids_BT = ids_BT.to(device)
        lengths = [len(p) for p in prompts]  # host copy of length_B
        length_B = torch.tensor(lengths, device=device)
        step = target.prefill(ids_BT, length_B)
        last_BH = step.hidden_BNH.gather(1, (length_B - 1).view(-1, 1, 1).expand(-1, 1, step.hidden_BNH.shape[-1]))
        sampler.begin(ids_BT, length_B, target.vocab_size)
        window = NoiseWindow(sampler, target.vocab_size)
        root_B = sampler.scores(target.logits(last_BH), window.at(lengths, 1)).argmax(-1).squeeze(1)
        sampler.emitted(root_B.unsqueeze(1), torch.ones_like(length_B))
        if proposer:
            proposer.reset(batch, capacity)
            next_BT = torch.cat([ids_BT[:, 1:], root_B.unsqueeze(1)], 1).scatter(1, (length_B - 1).unsqueeze(1), root_B.unsqueeze(1))
            proposer.observe(Accepted(ids_BT, next_BT, step.taps_BNF, torch.zeros_like(length_B), length_B))

        out = Generation([[] for _ in prompts], [[] for _ in prompts], times, nodes - 1, [""] * batch)
        for row, token in enumerate(root_B.tolist()):
            out.finish[row] = ends.extend(out.tokens[row], [token])[1]
            if on_tokens:
                on_tokens(row, [token], 0)
        plain_B1 = None if speculate is None or all(speculate) else ~torch.tensor(speculate, device=device).unsqueeze(1)
        times.prefill = clock.now() - began

        while not all(out.finish):
            mark = clock.now()
            noise_BDV = window.at([n + 1 for n in lengths], depth + 1)
            tree = proposer.propose(root_B, sampler, noise_BDV if self._shared else None) if proposer else DraftTree.root_only(root_B)
            if plain_B1 is not None:
                tree.valid_BN = (~plain_B1 if tree.valid_BN is None else tree.valid_BN & ~plain_B1).expand(batch, tree.num_nodes)
            drafted = clock.now()
            step = target.verify(tree, length_B, max(lengths), uniform=min(lengths) == max(lengths))
            logits_BNV = target.logits(step.hidden_BNH)
            verified = clock.now()
            verdict = self._judge(tree, logits_BNV, sampler, noise_BDV, length_B)
            live_B = torch.tensor([not why for why in out.finish], device=device)
            target.commit(tree, verdict.path_BP, length_B)
            path_BP, count_B = verdict.path_BP, (verdict.accepted_B + 1) * live_B
            tokens_BP = tree.tokens_BN.gather(1, path_BP)
            next_BP = torch.cat([tokens_BP[:, 1:], verdict.next_B.unsqueeze(1)], 1).scatter(
                1, verdict.accepted_B.unsqueeze(1), verdict.next_B.unsqueeze(1)
            )
            sampler.emitted(next_BP, count_B)
            observed = clock.now()
            if proposer:
                if observer is not None:
                    valid_BN = live_B.unsqueeze(1).expand(batch, tree.num_nodes)
                    observer.observe_logits(tree.tokens_BN, logits_BNV, valid_BN if tree.valid_BN is None else valid_BN & tree.valid_BN)
                taps = step.taps_BNF
                taps_BPF = None if taps is None else taps.gather(1, path_BP.unsqueeze(-1).expand(-1, -1, taps.shape[-1]))
                proposer.observe(Accepted(tokens_BP, next_BP, taps_BPF, length_B, count_B))
            times.draft += (drafted - mark) + (clock.now() - observed)
            times.verify += verified - drafted
            length_B = length_B + count_B
            root_B = torch.where(live_B, verdict.next_B, root_B)
            for row, (accepted, new) in enumerate(zip(verdict.accepted_B.tolist(), next_BP.tolist(), strict=True)):
                if out.finish[row]:
                    continue
                lengths[row] += accepted + 1
                kept, out.finish[row] = ends.extend(out.tokens[row], new[: accepted + 1])
                out.rounds[row].append(Round(min(accepted, len(kept)), len(kept)))
                if on_tokens:
                    on_tokens(row, kept, min(accepted, len(kept)))
        times.total = clock.now() - began
        return out

    @property
    def _shared(self) -> bool:
        return self.rule == "shared_noise"

    def _judge(self, tree: DraftTree, logits_BNV: Tensor, sampler: Sampler, noise_BDV: Tensor | None, length_B: Tensor) -> Verdict:
        """Apply the rule. Without a proposer there is nothing to judge: the plain sampler chooses, whatever the rule."""
        if self._shared or self.proposer is None:
            noise_BNV = None
            if noise_BDV is not None and tree.is_chain:
                noise_BNV = noise_BDV[:, : tree.num_nodes]
            elif noise_BDV is not None:
                noise_BNV = noise_BDV.gather(1, tree.depth_BN.unsqueeze(-1).expand(-1, -1, noise_BDV.shape[-1]))
            # The argmax of the very scores that plain decoding takes it of: probabilities would merge near-ties.
            choice_BN = sampler.scores(logits_BNV, noise_BNV, tree).argmax(-1)
            if tree.num_nodes == 1:
                zero_B = torch.zeros_like(length_B)
                return Verdict(zero_B.unsqueeze(1), zero_B, choice_BN.squeeze(1))
            return walk(tree, choice_BN)
        chance = PhiloxChance(sampler.seed_B, length_B, sampler.random_B)
        return verify(self.rule, tree, sampler.probabilities(logits_BNV, tree), chance)

    def _check(self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_new_tokens: int) -> None:
        if not prompts or min(len(p) for p in prompts) < 1:
            raise UserError("prompts: wanted at least one token in every prompt, got an empty one; the chat template renders prompts")
        if len(settings) != len(prompts):
            raise UserError(f"sampling params: wanted one, or one for each of {len(prompts)} prompts, got {len(settings)}")
        if self.rule == "greedy" and any(s.temperature > 0 for s in settings):
            raise UserError("temperature: wanted 0 with the verification rule greedy, got one above it; choose another rule")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: wanted at least 1, got {max_new_tokens}")
        need, limit = max(len(p) for p in prompts) + max_new_tokens, self.target.max_positions
        if limit is not None and need > limit:
            raise UserError(f"prompt + max_new_tokens: wanted at most the target's {limit} positions, got {need}; shorten one of them")


@dataclass(frozen=True)
class _Ends:
    """Where a row ends: at an EOS, at the token that completes a stop string, or at the limit; nothing after it is kept."""

    eos_ids: set[int]
    stop_strings: list[str]
    limit: int
    tokenizer: Any

    def __post_init__(self) -> None:
        if any(not text for text in self.stop_strings):
            raise UserError("stop_strings: wanted texts of at least one character, got an empty one")
        if self.stop_strings and self.tokenizer is None:
            raise UserError("stop_strings: wanted a target with a tokenizer, got one without; give eos_ids instead")

    def extend(self, tokens: list[int], new: list[int]) -> tuple[list[int], Finish]:
        """Append to `tokens` what is to be kept of `new`; return that, and why the row ends, if it does."""
        for index, token in enumerate(new):
            tokens.append(token)
            why: Finish = "eos" if token in self.eos_ids else "stop" if self._completed(tokens) else "length" if len(tokens) >= self.limit else ""
            if why:
                return new[: index + 1], why
        return new, ""

    def _completed(self, tokens: list[int]) -> bool:
        if not self.stop_strings:
            return False
        # No token is shorter than a byte, and no character longer than four. Text that began before the last token is new only if that ends it.
        most = 4 * max(len(text) for text in self.stop_strings) + 4
        text = self.tokenizer.decode(tokens[-most:], skip_special_tokens=False)
        before = self.tokenizer.decode(tokens[-most:-1], skip_special_tokens=False)
        return any(text.count(stop) > before.count(stop) for stop in self.stop_strings)


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
