"""What the tests of DFlash, DSpark and P-EAGLE share: a tiny target, batches, and checks that hold for all three."""

from __future__ import annotations

from typing import Any

import torch
from draftsmith.decode.engine import Engine
from draftsmith.decode.growth import Grower
from draftsmith.decode.proposer import Accepted, Extent
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.head import Head
from draftsmith.heads.registry import new_head
from draftsmith.train.objectives.common import Objective

from .tiny import VOCAB, features, random_ids, whole

PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [12, 80, 6, 6, 6, 19]]
CHAIN: dict[str, Any] = {"tree": "chain", "depth": 4}
TREE: dict[str, Any] = {"tree": "dynamic", "depth": 4, "topk": 3, "nodes": 12}


def make(method: str, target: Target, draft_vocab_size: int = VOCAB, seed: int = 0, noise: float = 0.1, **settings: Any) -> Head:
    """A head whose norms are not the identity."""
    torch.manual_seed(seed)
    head = new_head(method, target, {"draft_vocab_size": draft_vocab_size, "block_size": 6, **settings})
    head.set_draft_vocabulary(torch.randperm(target.vocab_size)[:draft_vocab_size], target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return head.eval()


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turn(x_MW: torch.Tensor, position: list[int], theta: float = 10000.0) -> torch.Tensor:
    """Queries or keys of one head [M, width] at positions: dimensions i and i + width / 2 are a complex number, which is turned."""
    half = x_MW.shape[-1] // 2
    angle = torch.tensor(position).unsqueeze(1) * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x_MW[:, :half], x_MW[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def feed(proposer: Grower, ids: torch.Tensor, taps: torch.Tensor, counts: list[list[int]], capacity: int = 64) -> list[int]:
    """Let rows observe their texts in rounds of `counts[round][row]` tokens, with garbage behind. Returns how far each row has come.

    All rows begin at once, so that the first round is the prefill; its columns are as many as the longest has.
    """
    rows = len(ids)
    proposer.reset(rows, capacity)
    lengths = [0] * rows
    for round_ in counts:
        proposer.extent = Extent(max(lengths), len(set(lengths)) == 1)
        most = max(round_)
        columns = torch.tensor([[min(lengths[row] + i, ids.shape[1] - 2) for i in range(most)] for row in range(rows)])
        garbage = torch.arange(most) >= torch.tensor(round_).unsqueeze(1)
        tokens = ids.gather(1, columns).masked_fill(garbage, 3)
        following = ids.gather(1, columns + 1).masked_fill(garbage, 4)
        seen = taps.gather(1, columns.unsqueeze(-1).expand(-1, -1, taps.shape[-1])).masked_fill(garbage.unsqueeze(-1), 9.0)
        proposer.observe(Accepted(tokens, following, seen, torch.tensor(lengths), torch.tensor(round_)))
        lengths = [length + count for length, count in zip(lengths, round_, strict=True)]
    proposer.extent = Extent(max(lengths), len(set(lengths)) == 1)
    return lengths


def check_lossless(target: Target, head: Any, settings: dict[str, Any], temperature: float, **more: Any) -> None:
    """Token-identical to plain decoding in a ragged batch, and each row drafts alone as it does in the batch."""
    params = [SamplingParams(temperature=temperature, seed=n) for n in range(len(PROMPTS))]
    plain = Engine(target).generate(PROMPTS, params, 14).tokens
    out = Engine(target, head.proposer(**settings, **more)).generate(PROMPTS, params, 14)
    assert out.tokens == plain
    for row, prompt in enumerate(PROMPTS):
        alone = Engine(target, head.proposer(**settings, **more)).generate([prompt], params[row], 14)
        assert alone.tokens[0] == plain[row] and alone.rounds[0] == out.rounds[row]  # padding rows change no draft either
    overlapped = Engine(target, head.proposer(**settings, **more), overlap=True) if head.proposer(**settings, **more).asynchronous else None
    if overlapped is not None:
        first = overlapped.generate(PROMPTS, params, 14)
        assert first.tokens == plain and overlapped.generate(PROMPTS, params, 14).tokens == plain  # the same tensors once more


def check_in_place(target: Target, head: Any, settings: dict[str, Any]) -> None:
    """What is kept between calls stays in the same tensors, and `memory` tells their size."""
    proposer = head.proposer(**settings)
    told = proposer.memory(2, 40)
    ids = random_ids(2, 20)
    taps = features(target, head, whole(ids))
    feed(proposer, ids, taps, [[6, 6]], capacity=40)
    kept = [tensor.data_ptr() for tensor in proposer.tensors()]
    caches = [tensor for tensor in proposer.tensors() if tensor.is_floating_point() and tensor.shape[-1] == head.config.head_dim]
    assert told == sum(tensor.nbytes for tensor in caches) and proposer.memory(2, 40) == 0
    feed(proposer, ids, taps, [[5, 3], [2, 4], [0, 1]], capacity=40)
    assert kept == [tensor.data_ptr() for tensor in proposer.tensors()]
    end = feed(proposer, ids, taps, [[9, 9]], capacity=9)  # a block has room behind the last position
    tree = proposer.propose(ids[:, end[0]], Sampler([SamplingParams()] * 2, "cpu"), None)
    assert tree.tokens_BN.shape == (2, 1 + settings["depth"])


def over_fit(target: Target, head: Any, objective: Objective, steps: int, lr: float = 3e-3) -> tuple[list[int], SamplingParams, list[int]]:
    """(prompt, how it was sampled, the target's text after it) that the head has learned. Sampled: greedy text soon is a loop."""
    prompt, params = random_ids(1, 6, seed=5)[0].tolist(), SamplingParams(temperature=1.0, seed=3)
    text = Engine(target).generate([prompt], params, 40).tokens[0]
    batch = whole(torch.tensor([prompt + text]))
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr)
    head.train()
    for _ in range(steps):
        target.set_taps(head.taps)
        loss, _metrics = objective(head, head, target, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    head.eval()
    return prompt, params, text


def tau(target: Target, proposer: Any, prompt: list[int], params: SamplingParams, text: list[int]) -> float:
    """Tokens a round; what is generated must be the text."""
    out = Engine(target, proposer).generate([prompt], params, len(text))
    assert out.tokens[0] == text
    return (len(text) - 1) / len(out.rounds[0])
