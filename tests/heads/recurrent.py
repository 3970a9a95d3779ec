"""What the tests of EAGLE-1, EAGLE-3 and MTP share: a tiny target, the heads' arithmetic written out from tensor names, and checks that hold for all.

`plain_states` knows neither caches nor batches nor unrolled attention: it drafts one token after another, and runs everything again for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from draftsmith.decode.engine import Engine
from draftsmith.decode.proposer import Accepted
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.recurrent import RecurrentHead, RecurrentProposer
from draftsmith.heads.registry import new_head
from draftsmith.train.losses import soft_cross_entropy
from draftsmith.train.objectives.common import Batch, Objective

from .tiny import VOCAB, documents, features, ragged, random_ids, whole

PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11], [12, 80, 6, 6, 6, 19, 21, 20, 50, 51, 52, 53]]
CHAIN: dict[str, Any] = {"tree": "chain", "depth": 4}
TREE: dict[str, Any] = {"tree": "dynamic", "depth": 3, "topk": 3, "nodes": 12}
Weights = dict[str, torch.Tensor]


def make(method: str, target: Target, draft_vocab_size: int = VOCAB, **settings: Any) -> RecurrentHead:
    """A head whose norms have left their initial value."""
    torch.manual_seed(1)
    head = new_head(method, target, {"draft_vocab_size": draft_vocab_size, **settings})
    head.set_draft_vocabulary(torch.randperm(target.vocab_size)[:draft_vocab_size], target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_((0.3 if parameter.ndim == 1 else 0.1) * torch.randn_like(parameter))
    assert isinstance(head, RecurrentHead)
    return head.eval()


# The arithmetic, written out


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[n, width] of positions 0 .. n - 1, turned as complex numbers of the two halves."""
    half = x.shape[1] // 2
    angle = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(half) / half)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=1)


def layer(w: Weights, prefix: str, head: RecurrentHead, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A Llama layer over a whole sequence [n, W] -> [n, H], one attention head after another."""
    config = head.config
    q, k, v = (x @ w[f"{prefix}.self_attn.{part}_proj.weight"].t() for part in "qkv")
    width, group, mixed = config.head_dim, config.num_heads // config.num_kv_heads, []
    past = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    for index in range(config.num_heads):
        own, shared = slice(index * width, (index + 1) * width), slice(index // group * width, (index // group + 1) * width)
        scores = turned(q[:, own], config.rope_theta) @ turned(k[:, shared], config.rope_theta).t() / width**0.5
        mixed.append(scores.masked_fill(~past, -torch.inf).softmax(-1) @ v[:, shared])
    hidden = hidden + torch.cat(mixed, dim=1) @ w[f"{prefix}.self_attn.o_proj.weight"].t()
    inner = rms(hidden, w[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (inner @ w[f"{prefix}.mlp.{part}_proj.weight"].t() for part in ("gate", "up"))
    return hidden + (gate * gate.sigmoid() * up) @ w[f"{prefix}.mlp.down_proj.weight"].t()


Pass = Callable[[RecurrentHead, Weights, torch.Tensor, torch.Tensor], torch.Tensor]  # (head, weights, embedded [n, H], fed [n, H]) -> states [n, H]


def plain_states(
    head: RecurrentHead, run: Pass, fed: torch.Tensor, ids: torch.Tensor, pairs: int, steps: int, detach: bool = False
) -> list[torch.Tensor]:
    """The state after `pairs` pairs of fed [T, H] and next token, and after each true token that follows: [H] each."""
    w: Weights = dict(head.named_parameters())
    sequence, states = fed[:pairs], []
    for k in range(steps):
        state = run(head, w, head.embed(ids[1 : pairs + k + 1]), sequence)[-1]
        states.append(state)
        sequence = torch.cat([sequence, (state.detach() if detach else state)[None]])
    return states


def check_training_pass(
    head: RecurrentHead, run: Pass, combine: Callable[[Weights, torch.Tensor], torch.Tensor], target: Target, **how: bool
) -> None:
    """The training pass against `plain_states`: values at every place of two rows of two documents, and gradients."""
    batch, steps = whole(random_ids(2, 13)), 3
    batch.document_BT[1, 6:] = 1
    batch.position_BT = torch.stack([torch.arange(13), torch.arange(13)])
    batch.position_BT[1, 6:] -= 6
    taps = features(target, head, batch)
    coefficient = torch.randn(steps, 2, 13, head.config.hidden_size, generator=torch.Generator().manual_seed(3))
    fast = head.training_outputs(taps, batch.ids_BT, batch.position_BT, batch.document_BT, steps, **how)
    total, plain_total = torch.zeros(()), torch.zeros(())
    fed = combine(dict(head.named_parameters()), taps)
    for row, start, stop in ((0, 0, 13), (1, 0, 6), (1, 6, 13)):
        for t in range(start, stop - steps):
            plain = plain_states(head, run, fed[row, start:stop], batch.ids_BT[row, start:stop], t - start + 1, steps, **how)
            for k in range(steps):
                torch.testing.assert_close(fast[k][row, t], plain[k], atol=2e-5, rtol=1e-4)
                total = total + (coefficient[k, row, t] * fast[k][row, t]).sum()
                plain_total = plain_total + (coefficient[k, row, t] * plain[k]).sum()
    names, parameters = zip(*head.named_parameters(), strict=True)
    grads = torch.autograd.grad(total, parameters, allow_unused=True)
    for name, grad, want in zip(names, grads, torch.autograd.grad(plain_total, parameters, allow_unused=True), strict=True):
        assert (grad is None) == (want is None), name
        if grad is not None:
            torch.testing.assert_close(grad, want, atol=1e-3, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def check_cache(head: RecurrentHead, target: Target) -> None:
    """The training pass against step-by-step drafting with the proposer's cache."""
    batch = whole(random_ids(1, 30))
    ids, taps = batch.ids_BT, features(target, head, batch)
    with torch.no_grad():
        outputs = head.training_outputs(taps, ids, batch.position_BT, batch.document_BT, 4)
        for pairs in (1, 9, 20):
            proposer = head.proposer(depth=4)
            assert isinstance(proposer, RecurrentProposer)
            proposer.reset(1, 64)
            proposer.observe(
                Accepted(ids[:, :pairs], ids[:, 1 : pairs + 1], taps[:, :pairs], torch.zeros(1, dtype=torch.int64), torch.tensor([pairs]))
            )
            state = proposer._hidden_BH.unsqueeze(1)
            torch.testing.assert_close(state[:, 0], outputs[0][:, pairs - 1], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(proposer._logits(state)[:, 0], head.logits(outputs[0][:, pairs - 1]), atol=1e-4, rtol=1e-4)
            for k in range(1, 4):  # true tokens are fed, as in training
                slot = torch.tensor([[pairs + k - 1]])
                state = proposer._run(state, ids[:, pairs + k : pairs + k + 1], slot, slot, (torch.arange(pairs + k) <= slot)[None])
                torch.testing.assert_close(state[:, 0], outputs[k][:, pairs - 1], atol=1e-5, rtol=1e-4)


def check_decoding(head: RecurrentHead, target: Target, how: dict[str, Any], temperature: float) -> None:
    """A ragged batch gives the target's own tokens, and each row the same rounds alone."""
    params = [SamplingParams(temperature=temperature, seed=n) for n in range(4)]
    plain = Engine(target).generate(PROMPTS, params, 20).tokens
    out = Engine(target, head.proposer(**how)).generate(PROMPTS, params, 20)
    assert out.tokens == plain
    alone = [Engine(target, head.proposer(**how)).generate([p], s, 20) for p, s in zip(PROMPTS, params, strict=True)]
    assert [g.rounds[0] for g in alone] == out.rounds


def step_means(head: RecurrentHead, batch: Batch, k: int, term: Callable[[int, int], torch.Tensor | None]) -> torch.Tensor:
    """Mean over sequences of the mean of term(row, t) over the places t that step k is judged at; a term of None does not count."""
    rows = []
    for row, document in documents(batch):
        terms = []
        for t in range(batch.ids_BT.shape[1] - 2 - k):
            real = batch.document_BT[row, t] == document and batch.document_BT[row, t] == batch.document_BT[row, t + 2 + k]
            if real and batch.loss_BT[row, t + 2 + k] and (value := term(row, t)) is not None:
                terms.append(value)
        if terms:
            rows.append(torch.stack(terms).mean())
    return torch.stack(rows).mean()


def plain_cross_entropy(head: RecurrentHead, outputs: list[torch.Tensor], logits: torch.Tensor, k: int) -> Callable[[int, int], torch.Tensor | None]:
    """Step k's cross-entropy at a place; None where the target's choice lies outside the draft vocabulary."""

    def term(row: int, t: int) -> torch.Tensor | None:
        judge = logits[row, t + 1 + k]
        if not head.t2d[judge.argmax()]:
            return None
        return soft_cross_entropy(head.logits(outputs[k][row, t]), judge[head.draft_ids].softmax(-1))

    return term


def check_objective(head: RecurrentHead, target: Target, objective: Objective, plain: Callable[[Batch], torch.Tensor]) -> None:
    """The objective against the formula, in value and gradient; every parameter is trained."""
    batch, values, grads = ragged(), [], []
    for written_out in (False, True):
        head.zero_grad()
        target.set_taps(head.taps)
        if written_out:
            value = plain(batch)
        else:
            value, metrics = objective(head, head, target, batch)
            assert 0 <= metrics["accuracy_0"] <= 1
        value.backward()  # type: ignore[no-untyped-call]
        values.append(value.detach())
        grads.append({name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None})
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-5)
    assert grads[0].keys() == grads[1].keys() == dict(head.named_parameters()).keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-5, rtol=1e-3)


def check_over_fit(method: str, target: Target, objective: Objective, steps: int, least: float, **settings: Any) -> None:
    """Trained on one text that the target sampled, the head drafts it: tau at depth 3, of at most 4, is at least `least`."""
    prompt, params = PROMPTS[0], SamplingParams(temperature=1.0, seed=3)
    text = Engine(target).generate([prompt], params, 40).tokens[0]
    batch = whole(torch.tensor([prompt + text]))
    torch.manual_seed(0)
    head = new_head(method, target, settings)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(steps):
        target.set_taps(head.taps)
        loss, _metrics = objective(head, head, target, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    out = Engine(target, head.eval().proposer(depth=3)).generate([prompt], params, 40)
    assert out.tokens[0] == text
    assert (len(text) - 1) / len(out.rounds[0]) >= least
