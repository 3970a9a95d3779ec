"""The engine: prefill, then rounds of propose / verify / walk / commit / observe. Written once, batched, with every row at its own length.

Plain decoding is the same loop with a tree of one node; it is the honest baseline. With shared noise the output of every proposer is
token-identical to plain decoding with the same seeds (L1 at any temperature; greedy is the case of zero noise).

Dims: B batch, T prompt, N nodes, D depth, P = D + 1 path, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .. import UserError
from .budget import check as check_memory
from .draw import PhiloxChance
from .proposer import Accepted, DeviceProposer, Extent, LogitObserver, Proposer
from .replay import Replay, bucket
from .sampling import NoiseWindow, Sampler, SamplingParams
from .target import Step, Target
from .tree import DraftTree
from .verify import Verdict, rule_for, verify, walk

Finish = Literal["", "eos", "stop", "length"]  # why a row ended; empty: it has not


@dataclass
class Times:
    """Seconds: prefill and total by the host's clock, draft and verify by the device's own where it is a GPU."""

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
    """One row's part in one round: accepted draft tokens, tokens emitted (accepted + 1, less what EOS or the limit cut off), nodes drafted."""

    accepted: int
    emitted: int
    proposed: int


@dataclass
class Generation:
    """Per row: new tokens (EOS included), and its rounds. The first token comes from the prefill and belongs to no round."""

    tokens: list[list[int]]
    rounds: list[list[Round]]
    times: Times = field(default_factory=Times)
    finish: list[Finish] = field(default_factory=list)


class Engine:
    """Decodes with a target and, if given, a proposer, whose drafts the verification rule `rule` (one of `verify.RULES`) judges.

    shared_noise, the default, is token-identical to plain decoding at any temperature. The others draw on their own: lossless in distribution, as
    their class says, and reproducible by seed, but another sample than plain decoding's. Raises UserError for a rule that the proposer's trees
    are not valid for.

    overlap: start a round before the host has read what the last one gave, in shapes that are the same for many rounds; on CUDA these are captured
    as graphs. None: wherever there is a GPU and the proposer never waits for it (`DeviceProposer.asynchronous`). What is generated is the same.
    A proposer belongs to one engine at a time.
    """

    def __init__(self, target: Target, proposer: Proposer | None = None, *, rule: str = "shared_noise", overlap: bool | None = None) -> None:
        self.target, self.proposer, self.rule = target, proposer, rule
        kind = getattr(proposer, "kind", "deterministic")
        rule_for(rule, "chain" if kind != "deterministic" and getattr(proposer, "topk", 0) == 1 else kind)
        self._device_proposer = proposer if isinstance(proposer, DeviceProposer) else None
        self._logit_observer = proposer if isinstance(proposer, LogitObserver) and proposer.wants_logits else None
        able = proposer is None or (self._device_proposer is not None and self._device_proposer.asynchronous)
        if overlap and not able:
            raise UserError("overlap: wanted a proposer that never waits for the device, got one that does; leave it out")
        self.overlap = able and target.device.type == "cuda" if overlap is None else overlap
        self._kept: _Session | None = None  # the last request's, whose graphs the next one may replay

    @property
    def max_depth(self) -> int:
        """Greatest depth of a round's tree."""
        return self.proposer.max_depth if self.proposer else 0

    @property
    def num_nodes(self) -> int:
        """Most nodes that a round verifies, root included."""
        return self.proposer.num_nodes if self.proposer else 1

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
        ends = _Ends(set(eos_ids), list(stop_strings), max_new_tokens, target.tokenizer)
        depth, nodes = self.max_depth, self.num_nodes
        batch, longest = len(prompts), max(len(p) for p in prompts)
        capacity = longest + max_new_tokens + nodes + (depth + 1) * (1 + self.overlap)  # a finished row runs on until the host has noticed
        capacity = bucket(capacity) if self.overlap else capacity
        about: dict[str, Any] = {"prompt": longest, "max_new_tokens": max_new_tokens, "settings": settings}
        check_memory(target, proposer, batch, capacity, **about, shared_noise=self._shared, overlap=self.overlap)
        target.allocate(batch, capacity)
        times, clock = Times(), _Clock(device)
        began = clock.now()

        ids_BT = torch.zeros(batch, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, : len(prompt)] = torch.tensor(prompt)
        ids_BT = ids_BT.to(device)
        lengths = [len(p) for p in prompts]  # what the host knows of length_B
        length_B = torch.tensor(lengths, device=device)
        step = target.prefill(ids_BT, length_B)
        last_BH = step.hidden_BNH.gather(1, (length_B - 1).view(-1, 1, 1).expand(-1, 1, step.hidden_BNH.shape[-1]))
        session = self._session(Sampler(settings, device), capacity)
        sampler = session.sampler
        sampler.begin(ids_BT, length_B, target.vocab_size)
        root_B = sampler.scores(target.logits(last_BH), session.window.at(lengths, 1)).argmax(-1).squeeze(1)
        sampler.emitted(root_B.unsqueeze(1), torch.ones_like(length_B))
        if proposer:
            proposer.reset(batch, capacity)
            next_BT = torch.cat([ids_BT[:, 1:], root_B.unsqueeze(1)], 1).scatter(1, (length_B - 1).unsqueeze(1), root_B.unsqueeze(1))
            proposer.observe(Accepted(ids_BT, next_BT, step.taps_BNF, torch.zeros_like(length_B), length_B))
        session.begin(root_B, length_B, torch.tensor([True] * batch if speculate is None else list(speculate), device=device))

        out = Generation([[] for _ in prompts], [[] for _ in prompts], times, [""] * batch)
        for row, token in enumerate(root_B.tolist()):
            out.finish[row] = ends.extend(out.tokens[row], [token])[1]
            if on_tokens:
                on_tokens(row, [token], 0)
        times.prefill = clock.now() - began

        started: list[tuple[Tensor, Any]] = []  # rounds that the host has not read yet
        live = [True] * batch
        while not all(out.finish):
            if live != (live := [not why for why in out.finish]):
                session.live_B.copy_(torch.tensor(live))
            started.append(session.round(lengths, len(started), clock))
            if len(started) > self.overlap:
                self._read(started.pop(0), lengths, ends, out, on_tokens)
        times.total = clock.now() - began
        times.draft, times.verify = clock.seconds("propose") + clock.seconds("observe"), clock.seconds("verify")
        return out

    def _session(self, sampler: Sampler, capacity: int) -> _Session:
        """The last one, if it can be used again; else a new one."""
        kept = self._kept
        if kept is not None and kept.capacity == capacity and kept.sampler.kind == sampler.kind:
            kept.sampler.load(sampler)
            kept.window.forget()
            return kept
        self._kept = _Session(self, sampler, capacity)
        return self._kept

    @staticmethod
    def _read(
        started: tuple[Tensor, Any], lengths: list[int], ends: _Ends, out: Generation, on_tokens: Callable[[int, list[int], int], None] | None
    ) -> None:
        """Take in what a round gave: the only place where the host waits for the device."""
        report_BR, done = started
        if done is not None:
            done.synchronize()
        for row, (count, proposed, *new) in enumerate(report_BR.tolist()):
            lengths[row] += count
            if out.finish[row]:
                continue
            kept, out.finish[row] = ends.extend(out.tokens[row], new[:count])
            accepted = min(count - 1, len(kept))
            out.rounds[row].append(Round(accepted, len(kept), proposed))
            if on_tokens:
                on_tokens(row, kept, accepted)

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
        drafts = self._device_proposer.max_positions if self._device_proposer is not None else None
        if drafts is not None and need > drafts:
            raise UserError(f"prompt + max_new_tokens: wanted at most the drafter's {drafts} positions, got {need}; shorten one of them")


class _Session:
    """What rounds read and write, in tensors that stay where they are, and the rounds captured over them."""

    def __init__(self, engine: Engine, sampler: Sampler, capacity: int) -> None:
        self.engine, self.sampler, self.capacity = engine, sampler, capacity
        self.window = NoiseWindow(sampler, engine.target.vocab_size, least=(engine.max_depth + 1) * (1 + engine.overlap))
        rows = sampler.seed_B
        self.root_B, self.length_B = torch.zeros_like(rows), torch.zeros_like(rows)
        self.live_B, self.speculate_B = torch.ones_like(rows, dtype=torch.bool), torch.ones_like(rows, dtype=torch.bool)
        self.all_speculate = True
        self._rounds: dict[int, _Stages] = {}
        self.capture = engine.overlap and engine.target.device.type == "cuda"
        self.pool: Any = torch.cuda.graph_pool_handle() if self.capture else None
        self._held: list[Tensor] = []  # that graphs read and write; held, so that their memory is not given away

    def begin(self, root_B: Tensor, length_B: Tensor, speculate_B: Tensor) -> None:
        """A request's prefill is done."""
        self.root_B.copy_(root_B)
        self.length_B.copy_(length_B)
        self.live_B.fill_(True)
        self.speculate_B.copy_(speculate_B)
        held, proposer = self.engine.target.tensors(), self.engine._device_proposer
        held += proposer.tensors() if proposer is not None else []
        all_speculate = bool(speculate_B.all())
        if [t.data_ptr() for t in held] != [t.data_ptr() for t in self._held] or all_speculate != self.all_speculate:
            self._rounds, self._held, self.all_speculate = {}, held, all_speculate

    def round(self, lengths: Sequence[int], unread: int, clock: _Clock) -> tuple[Tensor, Any]:
        """Run one. lengths: as of the last round read, after which `unread` more were started. Returns (report, event: when it can be read).

        The report [B, 2 + P] holds each row's count of emitted tokens (0 if it is finished), the nodes that were drafted for it, and the tokens.
        """
        engine, overlap = self.engine, self.engine.overlap
        depth, nodes = engine.max_depth, engine.num_nodes
        self.window.cover([n + 1 for n in lengths], (unread + 1) * (depth + 1))
        longest = max(lengths) + unread * (depth + 1)
        if not overlap:
            stages = self._rounds.setdefault(0, _Stages(self))
            stages.extent, stages.lengths = Extent(longest, min(lengths) == longest), lengths
        else:
            visible = bucket(longest + nodes)
            if visible not in self._rounds:
                self._rounds[visible] = _Stages(self)
                self._rounds[visible].extent = Extent(visible - nodes, False)
            stages = self._rounds[visible]
        report_BR = stages.run(clock)
        if not overlap or report_BR.device.type != "cuda":
            return report_BR.clone(), None
        there = torch.empty(report_BR.shape, dtype=report_BR.dtype, pin_memory=True)
        there.copy_(report_BR, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return there, done


class _Stages:
    """A round's stages, each of which can be captured: they hand on tensors by attributes."""

    extent: Extent
    lengths: Sequence[int] | None = None  # if the host knows them exactly

    _tree: DraftTree
    _step: Step
    _verdict: Verdict
    _noise_BDV: Tensor | None
    _logits_BNV: Tensor
    _next_BP: Tensor
    _count_B: Tensor
    _start_B: Tensor
    _report_BR: Tensor

    def __init__(self, session: _Session) -> None:
        self._session, self._engine = session, session.engine
        pieces = {"propose": self._propose, "verify": self._verify, "judge": self._judge, "observe": self._observe}
        self._pieces = {name: Replay(piece, capture=session.capture, pool=session.pool) for name, piece in pieces.items()}

    def run(self, clock: _Clock) -> Tensor:
        """All of them, one after the other. Returns the report."""
        if self._engine._device_proposer is not None:
            self._engine._device_proposer.extent = self.extent
        for name, piece in self._pieces.items():
            clock.start(name)
            piece()
        clock.stop()
        return self._report_BR

    def _propose(self) -> None:
        session, proposer = self._session, self._engine.proposer
        depth, shared = self._engine.max_depth, self._engine._shared
        self._noise_BDV = None
        if shared or proposer is None:  # the other rules draw on their own
            at = [n + 1 for n in self.lengths] if self.lengths is not None else None
            self._noise_BDV = session.window.after(session.length_B + 1, depth + 1) if at is None else session.window.at(at, depth + 1)
        self._tree = proposer.propose(session.root_B, session.sampler, self._noise_BDV) if proposer else DraftTree.root_only(session.root_B)
        if not session.all_speculate:
            spared_B1 = session.speculate_B.unsqueeze(1)
            valid_BN = spared_B1 if self._tree.valid_BN is None else self._tree.valid_BN & spared_B1
            self._tree.valid_BN = valid_BN.expand(self._tree.tokens_BN.shape)

    def _verify(self) -> None:
        self._step = self._engine.target.verify(self._tree, self._session.length_B, self.extent)
        self._logits_BNV = self._engine.target.logits(self._step.hidden_BNH)

    def _judge(self) -> None:
        session, tree = self._session, self._tree
        verdict = self._verdict = self._engine._judge(tree, self._logits_BNV, session.sampler, self._noise_BDV, session.length_B)
        self._engine.target.commit(tree, verdict.path_BP, session.length_B)
        after_B1 = verdict.accepted_B.unsqueeze(1)
        tokens_BP = tree.tokens_BN.gather(1, verdict.path_BP)
        self._next_BP = torch.cat([tokens_BP[:, 1:], verdict.next_B.unsqueeze(1)], 1).scatter(1, after_B1, verdict.next_B.unsqueeze(1))
        self._count_B = (verdict.accepted_B + 1) * session.live_B
        self._start_B = session.length_B.clone()
        session.sampler.emitted(self._next_BP, self._count_B)
        session.length_B.add_(self._count_B)
        session.root_B.copy_(torch.where(session.live_B, verdict.next_B, session.root_B))
        valid_BN = torch.ones_like(tree.tokens_BN, dtype=torch.bool) if tree.valid_BN is None else tree.valid_BN
        proposed_B = valid_BN[:, 1:].sum(1)
        self._report_BR = torch.cat([self._count_B.unsqueeze(1), proposed_B.unsqueeze(1), self._next_BP], dim=1)

    def _observe(self) -> None:
        proposer, tree, path_BP, taps = self._engine.proposer, self._tree, self._verdict.path_BP, self._step.taps_BNF
        if proposer is None:
            return
        if self._engine._logit_observer is not None:
            live_BN = self._session.live_B.unsqueeze(1).expand(tree.tokens_BN.shape)
            valid_BN = live_BN if tree.valid_BN is None else live_BN & tree.valid_BN
            self._engine._logit_observer.observe_logits(tree.tokens_BN, self._logits_BNV, valid_BN)
        taps_BPF = None if taps is None else taps.gather(1, path_BP.unsqueeze(-1).expand(-1, -1, taps.shape[-1]))
        proposer.observe(Accepted(tree.tokens_BN.gather(1, path_BP), self._next_BP, taps_BPF, self._start_B, self._count_B))


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
    """Seconds of a round's stages. A GPU's are measured by events, which the host does not wait for before it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def now(self) -> float:
        """The host's time, when the device has done what it was given."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self, stage: str) -> None:
        """A stage begins, and the one before ends."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        self._marks.append((stage, mark))

    def stop(self) -> None:
        """The last stage ends."""
        self.start("")

    def seconds(self, stage: str) -> float:
        """All of this stage's."""
        pairs = [(one, two) for (name, one), (_, two) in itertools.pairwise(self._marks) if name == stage]
        return float(sum(one.elapsed_time(two) / 1e3 if self._cuda else two - one for one, two in pairs))
