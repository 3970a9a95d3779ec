"""Surveys: what is told of a draft without decoding it is what decoding it does, for every kind of draft; and the temperatures are the likeliest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith.decode.calibration import Temperatures
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.eval.drafting import make_proposer
from draftsmith.eval.survey import GRID, Offer, calibrate, plain_texts, rounds_of, survey
from draftsmith.heads.registry import Drafter, new_head
from draftsmith.heads.standalone import Standalone
from draftsmith.recipes.schema import Decode
from torch import Tensor

from .tiny import tiny

PROMPTS = [[5, 9, 33], [7, 80, 12, 4, 4, 31], [60, 2], [44, 45, 46, 47]]
PARAMS = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0.0, 1.0, 0.0, 0.7))]
TOKENS = 14


def near_twin(target: Target) -> Standalone:
    """The target's own weights a little off, so that its drafts are often right, and often wrong."""
    twin = tiny()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter)) if parameter.ndim == 2 else None
    return Standalone(twin).bind(target)


def drafter_of(method: str, target: Target) -> Drafter:
    torch.manual_seed(1)
    return near_twin(target) if method == "draft_model" else new_head(method, target, {"draft_vocab_size": 60}).double()


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", "dflash"])
def test_every_shape_s_rounds_are_those_of_decoding_it(method: str) -> None:
    target = tiny()
    drafter = drafter_of(method, target)
    texts = plain_texts(target, PROMPTS, PARAMS, TOKENS, ())

    def decoded(decode: Decode) -> list[int]:
        out = Engine(target, make_proposer(drafter, decode, target, PROMPTS[0])).generate(PROMPTS, PARAMS, TOKENS)
        assert out.tokens == texts
        return [len(rounds) for rounds in out.rounds]

    deep = 4
    temperatures: dict[str, Any] = {"greedy_temperatures": [0.4, 0.7], "sampled_temperatures": [1.5]}
    widest = Decode(tree="dynamic", depth=deep, topk=3, nodes=3 + 9 * (deep - 1), **temperatures)
    trees = survey(target, make_proposer(drafter, widest, target, PROMPTS[0]), PROMPTS, PARAMS, texts, batch=2)
    for depth, nodes in ((1, 2), (2, 5), (3, 3), (3, 9), (4, 6), (4, 12)):
        if depth < deep and method == "dflash":
            continue  # a shorter block is not the beginning of a longer one: its positions see each other
        told = [rounds_of(TOKENS, [offer.kept(depth, nodes) for offer in row]) for row in trees]
        assert told == decoded(Decode(tree="dynamic", depth=depth, topk=3, nodes=nodes, **temperatures)), (depth, nodes)
    chains = survey(target, make_proposer(drafter, Decode(depth=deep), target, PROMPTS[0]), PROMPTS, PARAMS, texts)
    for depth in (1, 2, 4) if method != "dflash" else (4,):
        assert [rounds_of(TOKENS, [offer.prefix(depth) for offer in row]) for row in chains] == decoded(Decode(depth=depth))
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    static = survey(target, make_proposer(drafter, Decode(tree="static", paths=paths), target, PROMPTS[0]), PROMPTS, PARAMS, texts)
    for part in (paths, [[0], [1], [1, 0]], [[0], [0, 0], [0, 0, 0]]):
        if method == "dflash" and max(map(len, part)) < 3:
            continue
        known = frozenset(tuple(path) for path in part)
        assert [rounds_of(TOKENS, [offer.within(known) for offer in row]) for row in static] == decoded(Decode(tree="static", paths=part))


def test_rounds_are_counted_by_jumping_and_a_text_ends_within_a_draft() -> None:
    assert rounds_of(1, []) == 0
    assert rounds_of(6, [2, 9, 9, 0, 0]) == 3  # 0 -> 3 -> 4 -> 5
    assert rounds_of(6, [7, 0, 0, 0, 0]) == 1
    offer = Offer(3, (0, 0, 1), ((1, 1, 1), (3, 4), (9,)))
    assert [offer.prefix(d) for d in (1, 2, 3)] == [1, 2, 2]
    assert [offer.kept(2, 2), offer.kept(2, 3), offer.kept(3, 3), offer.kept(3, 4), offer.kept(3, 9)] == [1, 2, 1, 2, 3]
    assert offer.within(frozenset({(0,), (1,), (0, 0)})) == 2


class Fixed:
    """A drafter of one level, whose scores are given whatever the text."""

    taps: tuple[int, ...] = ()
    max_depth, num_nodes, temperatures = 1, 5, Temperatures()

    def __init__(self, logits_V: Tensor) -> None:
        self.logits_V = logits_V

    def _draft_ids(self) -> None:
        return None

    def reset(self, batch: int, capacity: int) -> None:
        pass

    def observe(self, accepted: Any) -> None:
        pass

    def propose(self, root_B: Tensor, sampler: Any, noise_BDV: Tensor | None) -> Any:
        from draftsmith.decode.factorised import keep_best

        scores_BV = self.logits_V.expand(len(root_B), -1)
        values, index = self.temperatures.log_p(scores_BV, sampler, 0).topk(4, dim=-1)
        return keep_best(root_B, index, values, torch.zeros_like(index), 4, 1)


def test_the_temperature_found_is_the_likeliest() -> None:
    """Against the loss written out, on a fine grid."""
    target = tiny()
    params = [SamplingParams(temperature=1.0, seed=i) for i in range(4)] + [SamplingParams()] * 4
    prompts = PROMPTS * 2
    texts = plain_texts(target, prompts, params, TOKENS, ())
    torch.manual_seed(0)
    logits_V = 6 * torch.randn(97, dtype=torch.float64)
    for text in texts[:4]:
        for token in text:
            logits_V[token] += 0.7
    found = calibrate(target, Fixed(logits_V), prompts, params, texts)
    for kind, rows in ((found.sampled, texts[:4]), (found.greedy, texts[4:])):
        tokens = torch.tensor([token for text in rows for token in text[1:]])
        fine = [min(GRID) * (max(GRID) / min(GRID)) ** (i / 2000) for i in range(2001)]
        best = min(fine, key=lambda t: float(torch.nn.functional.cross_entropy((logits_V / t).expand(len(tokens), -1), tokens)))
        assert kind[0] == pytest.approx(best, rel=0.02) and len(kind) == 1
    assert calibrate(target, object(), prompts, params, texts) == Temperatures()
