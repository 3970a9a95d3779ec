"""Every verification rule in the engine: what it generates has the target's law, whatever the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.growth import Kind
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.decode.verify import RULES
from draftsmith.heads.standalone import Standalone
from transformers import AutoModelForCausalLM, LlamaConfig

VOCAB, ROWS, PROMPT = 5, 6000, [1, 4, 2, 2, 0]
# Chi-square of 125 cells, fewer where a filter forbids some: beyond this quantile of 124 degrees of freedom lies less than 1e-6.
CRITICAL = 214.0


def tiny(seed: int) -> Target:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=1, head_dim=8, max_position_embeddings=32))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12)
    return Target(model, None, "tiny")


def law(target: Target, params: SamplingParams) -> torch.Tensor:
    """[V, V, V] probability of each three tokens after the prompt, by enumeration."""
    sampler, joint = Sampler([params], "cpu"), torch.ones(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for a in range(VOCAB):
        for b in range(VOCAB):
            with torch.no_grad():
                logits = target.model(torch.tensor([[*PROMPT, a, b]])).logits[:, len(PROMPT) - 1 :]
            p = sampler.warp(logits)[0].double().softmax(-1)
            joint[a, b] = p[0, a] * p[1, b] * p[2]
    return joint


KINDS: tuple[Kind, ...] = ("deterministic", "iid", "without_replacement")
CASES: list[tuple[str, Kind, int]] = [
    (rule, kind, topk)
    for rule in RULES
    for kind in KINDS
    for topk in (1, 2)
    if not rule.startswith(("lossy", "greedy")) and ("chain" if topk == 1 and kind != "deterministic" else kind) in RULES[rule].kinds
]


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}], ids=["T1", "T0.7"])
@pytest.mark.parametrize(("rule", "kind", "topk"), CASES)
def test_the_law_of_what_is_generated_is_the_targets(rule: str, kind: Kind, topk: int, settings: dict[str, Any]) -> None:
    target, draft = tiny(0), tiny(1)
    params = [SamplingParams(seed=7000 + row, **settings) for row in range(ROWS)]
    proposer = Standalone(draft).bind(target).proposer(tree="chain" if topk == 1 else "dynamic", depth=2, topk=topk, nodes=2 * topk, kind=kind)
    out = Engine(target, proposer, rule=rule).generate([PROMPT] * ROWS, params, 3)
    tokens = torch.tensor(out.tokens)
    counts = torch.bincount(tokens[:, 0] * VOCAB**2 + tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**3).double()
    expected = law(target, params[0]).flatten() * ROWS
    assert not counts[expected == 0].any()
    # Cells that expect little are counted as one, so that the chi-square law holds.
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    want = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = want > 0
    assert float(((seen - want)[kept] ** 2 / want[kept]).sum()) < CRITICAL
    assert any(r.accepted for rounds in out.rounds for r in rounds)


def test_a_biased_pair_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the test: a deterministic chain judged as if it had been sampled."""
    target, draft = tiny(0), tiny(1)
    params = [SamplingParams(seed=7000 + row, temperature=1.0) for row in range(ROWS)]
    proposer = Standalone(draft).bind(target).proposer(depth=2)
    engine = Engine(target, proposer)
    engine.rule = "token_wise"  # past the check
    propose = proposer.propose

    def lie(*arguments: Any) -> Any:
        tree = propose(*arguments)
        tree.kind, tree.q_BNV = "iid", torch.full((ROWS, 3, VOCAB), 1 / VOCAB)
        return tree

    monkeypatch.setattr(proposer, "propose", lie)
    tokens = torch.tensor(engine.generate([PROMPT] * ROWS, params, 3).tokens)
    counts = torch.bincount(tokens[:, 0] * VOCAB**2 + tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**3).double()
    expected = law(target, params[0]).flatten() * ROWS
    assert float(((counts - expected) ** 2 / expected).sum()) > 3 * CRITICAL


def test_sampled_drafts_at_temperature_0_are_greedy() -> None:
    target, draft = tiny(0), tiny(1)
    plain = Engine(target).generate([PROMPT], SamplingParams(), 12).tokens
    for rule, kind, topk in CASES:
        proposer = Standalone(draft).bind(target).proposer(tree="chain" if topk == 1 else "dynamic", depth=2, topk=topk, nodes=2 * topk, kind=kind)
        assert Engine(target, proposer, rule=rule).generate([PROMPT], SamplingParams(), 12).tokens == plain, rule


def test_wrong_pairs_are_refused() -> None:
    target, draft = tiny(0), tiny(1)
    drafter = Standalone(draft).bind(target)
    with pytest.raises(UserError, match="valid for deterministic trees"):
        Engine(target, drafter.proposer(depth=2), rule="block")
    with pytest.raises(UserError, match="wanted one of greedy"):
        Engine(target, drafter.proposer(depth=2), rule="guess")
    with pytest.raises(UserError, match="wanted 0 with the verification rule greedy"):
        Engine(target, drafter.proposer(depth=2), rule="greedy").generate([PROMPT], SamplingParams(temperature=1.0), 2)
