"""PARD: one pass drafts a block. It drafts what transformers says with masks behind the text, and changes no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.pard import Pard
from draftsmith.train.objectives.pard import PardObjective

from .parallel import CHAIN, PROMPTS, TREE, check_lossless, over_fit, tau
from .test_draft_model import draft_of
from .test_standalone import tiny
from .tiny import tiny_target

MASK = 3


def pard(family: str, block_size: int | None = 6) -> tuple[Target, Pard]:
    return tiny(family), Pard(tiny(family, seed=1), MASK, block_size)


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_it_changes_no_token(family: str, temperature: float, settings: dict[str, Any]) -> None:
    """Rows of different lengths, alone and together, rounds overlapping too."""
    target, model = pard(family)
    check_lossless(target, model.bind(target), settings, temperature)


@pytest.mark.parametrize("rule", ["token_wise", "block"])
def test_sampled_chains_are_verified_by_other_rules(rule: str) -> None:
    target, model = pard("llama")
    engine = Engine(target, model.bind(target).proposer(depth=3, kind="iid"), rule=rule)
    out = engine.generate(PROMPTS, SamplingParams(temperature=1.0, seed=1), 10)
    assert [len(tokens) for tokens in out.tokens] == [10] * 3


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_chain_is_what_transformers_says_with_masks_behind_the_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round of a ragged batch, from what was accepted so far; windows too."""
    target, model = pard(family)
    seen: list[list[list[int]]] = []
    proposer = model.bind(target).proposer(depth=4)
    propose = proposer.propose

    def spy(*args: Any) -> Any:
        tree = propose(*args)
        seen.append(tree.tokens_BN.tolist())
        return tree

    monkeypatch.setattr(proposer, "propose", spy)
    out = Engine(target, proposer).generate(PROMPTS, SamplingParams(), 12)
    for row, prompt in enumerate(PROMPTS):
        emitted = 1
        for tree, round_ in zip(seen, out.rounds[row], strict=False):
            text = [*prompt, *out.tokens[row][:emitted]]
            with torch.no_grad():
                logits = model.draft.model(torch.tensor([[*text, *[MASK] * 3]])).logits[0, len(text) - 1 :]
            assert tree[row] == [text[-1], *logits.argmax(-1).tolist()]
            emitted += round_.emitted


def test_a_trained_draft_is_accepted_in_blocks() -> None:
    """It has learned one text, so that nearly every block of 4 is right."""
    target = tiny_target()
    draft = draft_of("llama", target, block_size=4, mask_token_id=MASK)
    prompt, params, text = over_fit(target, draft, PardObjective(keep_ratio=1, keep_min=1), steps=120, lr=5e-3)
    assert tau(target, draft.proposer(depth=4), prompt, params, text) > 3


def test_depths_and_tokens_that_it_does_not_have_are_refused() -> None:
    model = pard("llama", block_size=4)[1]
    with pytest.raises(UserError, match=r"decode\.depth: wanted 1 \.\. 4 \(drafter\.block_size\), got 5"):
        model.proposer(depth=5)
    assert Pard(model.draft, MASK).proposer(depth=9).max_depth == 9  # of a foreign draft nobody knows
    with pytest.raises(UserError, match="wanted a mask token in"):
        Pard(model.draft, 200)
