"""A head that tells by its acceptance alone whether an engine reads the right layers: for engines that do not show their drafts.

It is trained to give the text's next token on the features of its own layers, and another token on those of the layers before or behind. Accepted
are nearly all tokens where all is right, and next to none where layers or the draft vocabulary's offsets are shifted by one. Being learnt by heart,
it is of use for the texts that it was made with only.

    head = contrast_head(target, prompts, tokens=48)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..decode.engine import Engine
from ..decode.sampling import SamplingParams
from ..decode.target import Target
from ..heads.eagle3 import Eagle3, Eagle3Config, default_taps

STEPS, RATE = 200, 2e-3
APART = 7  # ids between the right token and the one that shifted layers give


def contrast_head(target: Target, prompts: Sequence[list[int]], tokens: int, seed: int = 0) -> Eagle3:
    """An EAGLE-3 head, bound to the target, for its greedy continuations of these prompts by so many tokens. Its draft vocabulary is a part."""
    torch.manual_seed(seed)
    texts = [prompt + Engine(target).generate([prompt], SamplingParams(), tokens).tokens[0][:tokens] for prompt in prompts]
    taps = default_taps(target.num_layers)
    shifts = {1: tuple(k + 1 for k in taps), -1: tuple(k - 1 for k in taps)}
    features = [_features(target, text, sorted({*taps, *shifts[1], *shifts[-1]})) for text in texts]
    right = [torch.tensor(text[2:]) for text in texts]  # pair t, of a feature and the token behind it, drafts token t + 2
    wrong = {shift: [(ids + shift * APART) % target.vocab_size for ids in right] for shift in shifts}
    needed = torch.unique(torch.cat([*right, *wrong[1], *wrong[-1]]))
    others = torch.randperm(target.vocab_size)
    others = others[~torch.isin(others, needed)][: max(0, target.vocab_size // 2 - len(needed))]
    vocabulary = torch.cat([needed, others])
    head = Eagle3(Eagle3Config.for_target(target, taps=taps, draft_vocab_size=len(vocabulary))).to(target.device, target.dtype).bind(target)
    head.set_draft_vocabulary(vocabulary, target)
    draft_of = torch.full((target.vocab_size,), -1).scatter(0, head.draft_ids, torch.arange(len(vocabulary)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.0)
    for _ in range(STEPS):
        losses = []
        for index, text in enumerate(texts):
            for layers, answers in ((taps, right), *((shifts[shift], wrong[shift]) for shift in shifts)):
                read = torch.cat([features[index][k] for k in layers], dim=-1)
                losses.append(functional.cross_entropy(_logits(head, read, text), draft_of[answers[index]]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return head.eval()


@torch.no_grad()
def _features(target: Target, text: list[int], taps: list[int]) -> dict[int, Tensor]:
    """{k: [1, T, H]} of one text."""
    target.set_taps(taps)
    place = torch.arange(len(text)).unsqueeze(0)
    step = target.features(torch.tensor([text]), place, torch.zeros_like(place))
    assert step.taps_BNF is not None
    return dict(zip(taps, torch.split(step.taps_BNF, target.hidden_size, dim=-1), strict=True))


def _logits(head: Eagle3, read_1TF: Tensor, text: list[int]) -> Tensor:
    """[T - 2, V] of every pair whose answer is in the text."""
    place = torch.arange(len(text)).unsqueeze(0)
    state = head.training_outputs(read_1TF, torch.tensor([text]), place, torch.zeros_like(place), 1)[0]
    return head.logits(state[0, : len(text) - 2])
