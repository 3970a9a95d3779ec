"""The engine: prefill, then rounds of propose / verify / walk / commit / observe. Written once, batched, with every row at its own length.

Plain decoding is the same loop with a tree of one node; it is the honest baseline. With shared noise the output of every proposer is
token-identical to plain decoding with the same seeds (L1 at any temperature; greedy is the case of zero noise).

Dims: B batch, T prompt, N nodes, D depth, P = D + 1 path, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import UserError
from .proposer import Accepted, Proposer
from .sampling import NoiseWindow, Sampler, SamplingParams
from .target import Target
from .tree import DraftTree
from .verify import walk


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


class Engine:
    """Decodes with a target and, if given, a proposer."""

    def __init__(self, target: Target, proposer: Proposer | None = None) -> None:
        self.target, self.proposer = target, proposer

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        max_new_tokens: int,
        *,
        eos_ids: Sequence[int] = (),
        on_tokens: Callable[[int, list[int], int], None] | None = None,
    ) -> Generation:
        """Generate for a batch of prompts (token ids, each at least one).

        params: one for all rows, or one a row. on_tokens(row, new tokens, drafted) is called as tokens come; the first `drafted` were drafted.
        Raises UserError if a prompt is empty or does not fit the target's positions.
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        self._check(prompts, settings, max_new_tokens)
        target, proposer, device = self.target, self.proposer, self.target.device
        target.set_taps(proposer.taps if proposer else ())
        sampler = Sampler(settings, device)
        depth, nodes = (proposer.max_depth, proposer.num_nodes) if proposer else (0, 1)
        batch, longest = len(prompts), max(len(p) for p in prompts)
        capacity = longest + max_new_tokens + nodes + depth + 1
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
        window = NoiseWindow(sampler, target.vocab_size)
        root_B = sampler.scores(target.logits(last_BH), window.at(lengths, 1)).argmax(-1).squeeze(1)
        if proposer:
            proposer.reset(batch, capacity)
            next_BT = torch.cat([ids_BT[:, 1:], root_B.unsqueeze(1)], 1).scatter(1, (length_B - 1).unsqueeze(1), root_B.unsqueeze(1))
            proposer.observe(Accepted(ids_BT, next_BT, step.taps_BNF, torch.zeros_like(length_B), length_B))

        out = Generation([[token] for token in root_B.tolist()], [[] for _ in prompts], times, nodes - 1)
        stops = set(eos_ids)
        done = [tokens[0] in stops or max_new_tokens == 1 for tokens in out.tokens]
        if on_tokens:
            for row, tokens in enumerate(out.tokens):
                on_tokens(row, list(tokens), 0)
        times.prefill = clock.now() - began

        while not all(done):
            mark = clock.now()
            noise_BDV = window.at([n + 1 for n in lengths], depth + 1)
            tree = proposer.propose(root_B, sampler, noise_BDV) if proposer else DraftTree.root_only(root_B)
            drafted = clock.now()
            step = target.verify(tree, length_B, max(lengths), uniform=min(lengths) == max(lengths))
            logits_BNV = target.logits(step.hidden_BNH)
            verified = clock.now()
            noise_BNV = noise_BDV
            if noise_BDV is not None and not tree.is_chain:
                noise_BNV = noise_BDV.gather(1, tree.depth_BN.unsqueeze(-1).expand(-1, -1, target.vocab_size))
            verdict = walk(tree, sampler.scores(logits_BNV, noise_BNV).argmax(-1))
            live_B = torch.tensor([not d for d in done], device=device)
            target.commit(tree, verdict.path_BP, length_B)
            path_BP, count_B = verdict.path_BP, (verdict.accepted_B + 1) * live_B
            tokens_BP = tree.tokens_BN.gather(1, path_BP)
            next_BP = torch.cat([tokens_BP[:, 1:], verdict.next_B.unsqueeze(1)], 1).scatter(
                1, verdict.accepted_B.unsqueeze(1), verdict.next_B.unsqueeze(1)
            )
            observed = clock.now()
            if proposer:
                taps = step.taps_BNF
                taps_BPF = None if taps is None else taps.gather(1, path_BP.unsqueeze(-1).expand(-1, -1, taps.shape[-1]))
                proposer.observe(Accepted(tokens_BP, next_BP, taps_BPF, length_B, count_B))
            times.draft += (drafted - mark) + (clock.now() - observed)
            times.verify += verified - drafted
            length_B = length_B + count_B
            root_B = torch.where(live_B, verdict.next_B, root_B)
            for row, (accepted, new) in enumerate(zip(verdict.accepted_B.tolist(), next_BP.tolist(), strict=True)):
                if done[row]:
                    continue
                lengths[row] += accepted + 1
                kept = _truncate(new[: accepted + 1], stops, max_new_tokens - len(out.tokens[row]))
                out.tokens[row] += kept
                out.rounds[row].append(Round(min(accepted, len(kept)), len(kept)))
                done[row] = len(out.tokens[row]) >= max_new_tokens or kept[-1] in stops
                if on_tokens:
                    on_tokens(row, kept, min(accepted, len(kept)))
        times.total = clock.now() - began
        return out

    def _check(self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_new_tokens: int) -> None:
        if not prompts or min(len(p) for p in prompts) < 1:
            raise UserError("prompts: wanted at least one token in every prompt, got an empty one; the chat template renders prompts")
        if len(settings) != len(prompts):
            raise UserError(f"sampling params: wanted one, or one for each of {len(prompts)} prompts, got {len(settings)}")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: wanted at least 1, got {max_new_tokens}")
        need, limit = max(len(p) for p in prompts) + max_new_tokens, self.target.max_positions
        if limit is not None and need > limit:
            raise UserError(f"prompt + max_new_tokens: wanted at most the target's {limit} positions, got {need}; shorten one of them")


def _truncate(tokens: list[int], stops: set[int], room: int) -> list[int]:
    """Cut at the limit, then after the first EOS."""
    tokens = tokens[:room]
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
