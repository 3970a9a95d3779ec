"""What the tests of Medusa, Hydra and MLP speculator share: a tiny target, the objective written out, and checks that hold for all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.proposer import Accepted, Extent, Proposer
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.registry import new_head
from draftsmith.heads.stepwise import SequentialProposer, StepwiseHead
from draftsmith.train.data import collate
from draftsmith.train.losses import soft_cross_entropy
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.medusa import MedusaObjective
from draftsmith.train.templates import Sample

from .tiny import VOCAB, documents, features, ragged, random_ids, whole

LENGTH = 16
PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11], [12, 80, 6, 6, 6, 19, 21, 20, 50, 51, 52, 53]]
CHAIN: dict[str, Any] = {"tree": "chain", "depth": 3}
TREE: dict[str, Any] = {"tree": "dynamic", "depth": 3, "topk": 3, "nodes": 12}


def make(method: str, target: Target, draft_vocab_size: int = VOCAB, seed: int = 0, noise: float = 0.2, **settings: Any) -> StepwiseHead:
    """A head that has left its initial values, which are zero in places."""
    torch.manual_seed(seed)
    head = new_head(method, target, {"draft_vocab_size": draft_vocab_size, **settings})
    head.set_draft_vocabulary(torch.randperm(target.vocab_size)[:draft_vocab_size], target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    assert isinstance(head, StepwiseHead)
    return head.eval()


def plain_loss(head: StepwiseHead, outputs: list[torch.Tensor], target: Target, batch: Batch, decay: float, labels: str) -> torch.Tensor:
    """The objective written out: every head, row and position on its own, full tensors, per-sequence means."""
    step = target.features(batch.ids_BT, batch.position_BT, batch.document_BT)
    logits, ids_V = target.logits(step.hidden_BNH).float(), head.draft_ids
    total = torch.zeros(())
    for k, hidden in enumerate(outputs):
        rows = []
        for row, document in documents(batch):
            losses = []
            for t in range(batch.ids_BT.shape[1] - 2 - k):
                if not (batch.document_BT[row, t : t + 3 + k] == document).all() or not batch.loss_BT[row, t + 2 + k]:
                    continue
                judge, token = logits[row, t + 1 + k], int(batch.ids_BT[row, t + 2 + k])
                drafted = head.lm_head(k)(hidden[row, t])
                if labels == "soft" and head.t2d[judge.argmax()]:
                    losses.append(soft_cross_entropy(drafted, judge[ids_V].softmax(-1)))
                if labels == "hard" and token in ids_V.tolist():
                    losses.append(-drafted.log_softmax(-1)[ids_V.tolist().index(token)])
            if losses:
                rows.append(torch.stack(losses).mean())
        total = total + decay**k * torch.stack(rows).mean()
    return total / sum(decay**k for k in range(len(outputs)))


def check_objective(
    head: StepwiseHead, outputs: Callable[[torch.Tensor, Batch], list[torch.Tensor]], target: Target, objective: MedusaObjective
) -> None:
    """The objective against `plain_loss` of `outputs`, an independent computation of what the heads give: values and gradients."""
    batch, values, grads = ragged(), [], []
    taps = features(target, head, batch)
    for plain in (False, True):
        head.zero_grad()
        if plain:
            value = plain_loss(head, outputs(taps, batch), target, batch, objective.step_decay, objective.labels)
        else:
            value, metrics = objective(head, head, target, batch)
            assert 0 <= metrics["accuracy_0"] <= 1
        value.backward()  # type: ignore[no-untyped-call]
        values.append(value.detach())
        grads.append({name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None})
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-5)
    assert grads[0].keys() == grads[1].keys() == dict(head.named_parameters()).keys()  # every parameter is trained
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-5, rtol=1e-3)


def fit(method: str, target: Target, objective: MedusaObjective, batch: Batch, steps: int, **settings: Any) -> StepwiseHead:
    """A head trained on one batch."""
    torch.manual_seed(0)
    head = new_head(method, target, {"draft_vocab_size": target.vocab_size - 2, **settings})
    head.set_draft_vocabulary(torch.arange(2, target.vocab_size), target)
    assert isinstance(head, StepwiseHead)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    target.set_taps(head.taps)
    for _ in range(steps):
        loss, _metrics = objective(head, head, target, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return head.eval()


def parameters(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=n) for n in range(len(PROMPTS))]


def acquainted(method: str, target: Target, objective: MedusaObjective, **settings: Any) -> StepwiseHead:
    """A head that has seen what `check_lossless` decodes a few times, so that some of its drafts are accepted and others are not."""
    texts = [Engine(target).generate(PROMPTS, parameters(temperature), LENGTH).tokens for temperature in (0.0, 1.0)]
    batch = collate([Sample(prompt + text, [(0, len(prompt + text))]) for rows in texts for prompt, text in zip(PROMPTS, rows, strict=True)])
    return fit(method, target, objective, batch, 10, **settings)


def check_lossless(target: Target, make_proposer: Callable[[], Proposer], temperature: float) -> None:
    """Token-identical to plain decoding in a ragged batch, with and without overlap, and each row as alone."""
    params = parameters(temperature)
    plain = Engine(target).generate(PROMPTS, params, LENGTH).tokens
    out = Engine(target, make_proposer()).generate(PROMPTS, params, LENGTH)
    assert out.tokens == plain
    assert Engine(target, make_proposer(), overlap=True).generate(PROMPTS, params, LENGTH).tokens == plain
    alone = [Engine(target, make_proposer()).generate([p], s, LENGTH) for p, s in zip(PROMPTS, params, strict=True)]
    assert [g.rounds[0] for g in alone] == out.rounds  # padding rows change no draft either
    assert len({r.accepted for rounds in out.rounds for r in rounds}) > 1  # paths of several lengths were accepted


def learnt(method: str, target: Target, objective: MedusaObjective, steps: int, **settings: Any) -> tuple[StepwiseHead, list[int], list[int]]:
    """(a head over-fitted on one text that the target sampled, the prompt, the text)."""
    prompt, params = random_ids(1, 6, seed=5)[0].tolist(), SamplingParams(temperature=1.0, seed=3)
    text = Engine(target).generate([prompt], params, 40).tokens[0]
    return fit(method, target, objective, whole(torch.tensor([prompt + text])), steps, **settings), prompt, text


def tau(target: Target, proposer: Proposer, prompt: list[int], text: list[int]) -> float:
    """Tokens a round, when the text that was learnt is drafted again."""
    out = Engine(target, proposer).generate([prompt], SamplingParams(temperature=1.0, seed=3), len(text))
    assert out.tokens[0] == text
    return (len(text) - 1) / len(out.rounds[0])


def check_refusals(method: str, target: Target) -> None:
    """Settings that the method does not have, taps that it cannot read, depths that it cannot draft."""
    with pytest.raises(UserError, match=rf"drafter\.taps: wanted null, as the method {method} has no such setting"):
        new_head(method, target, {"taps": [1, 2]})
    head = make(method, target)
    with pytest.raises(UserError, match=r"decode\.depth: wanted 1 \.\. 4 \(drafter\.heads\), got 5"):
        head.proposer(depth=5)
    values = {name: getattr(head.sizes, name) for name in type(head.sizes).__dataclass_fields__}
    with pytest.raises(UserError, match=r"drafter\.taps: wanted \[5\] \(the target's final norm\), got \[4\]"):
        type(head.sizes)(**{**values, "taps": (4,)})


def observed(proposer: Proposer, ids: torch.Tensor, taps: torch.Tensor, pieces: list[int]) -> None:
    """Let a proposer take in the first sum(pieces) tokens of one row, as a prefill and then rounds would."""
    proposer.reset(1, 64)
    start = 0
    for size in pieces:
        if start:
            proposer.extent = Extent(start, True)  # type: ignore[attr-defined]
        stop = start + size
        count, first = torch.tensor([size]), torch.tensor([start])
        wide = slice(start, stop + 1)  # one column of garbage, as rounds have
        proposer.observe(Accepted(ids[:, wide], ids[:, start + 1 : stop + 2], taps[:, wide], first, count))
        start = stop
    proposer.extent = Extent(start, True)  # type: ignore[attr-defined]


def check_drafting(target: Target, head: StepwiseHead) -> None:
    """Fed the true tokens, the proposer's states give, depth by depth, what the training pass gives; its chain is what that predicts."""
    ids = random_ids(1, 20)
    taps = features(target, head, whole(ids))
    with torch.no_grad():
        outputs = head.training_outputs(taps, ids, torch.arange(20)[None], torch.zeros_like(ids))
        for pieces in ([1], [9], [9, 1, 3]):
            proposer = head.proposer()
            assert isinstance(proposer, SequentialProposer)
            observed(proposer, ids, taps, pieces)
            t = sum(pieces) - 1
            state = proposer._hidden_BH.unsqueeze(1)
            torch.testing.assert_close(proposer.head.output(state, 0)[:, 0], outputs[0][:, t], atol=1e-5, rtol=1e-4)
            proposer._drafted_levels = 0
            unused = torch.empty(0)
            for k in range(1, head.heads):
                state = proposer._advance(state, ids[:, t + 1 + k : t + 2 + k], unused, unused, unused, unused, None)
                torch.testing.assert_close(proposer._logits(state)[:, 0], head.lm_head(k)(outputs[k][:, t]), atol=1e-4, rtol=1e-4)
            # The chain that it drafts by itself is what the training pass predicts along a text with that chain in it.
            drafted_BN = proposer.propose(ids[:, t + 1], greedy(), None).tokens_BN
            text = torch.cat([ids[:, : t + 1], drafted_BN, ids[:, t + 2 + head.heads :]], dim=1)
            own = head.training_outputs(taps, text, torch.arange(20)[None], torch.zeros_like(ids))
            best = [head.draft_ids[head.lm_head(k)(own[k][:, t]).argmax(-1)] for k in range(head.heads)]
            assert torch.equal(drafted_BN[:, 1:], torch.stack(best, dim=1))


def greedy(rows: int = 1) -> Sampler:
    return Sampler([SamplingParams()] * rows, "cpu")
