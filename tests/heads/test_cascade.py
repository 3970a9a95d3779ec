"""A cascade drafts exactly the chain that its draft model drafts alone, in fewer passes, and generation does not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.free.drafts import continuation
from draftsmith.decode.length import Additive
from draftsmith.decode.proposer import Accepted, Extent
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Step, Target
from draftsmith.decode.tree import DraftTree
from draftsmith.heads.cascade import INNERS, Cascade, CascadeProposer, _Lookup, _Suffix
from draftsmith.heads.registry import open_drafter
from draftsmith.heads.standalone import Standalone
from draftsmith.recipes.schema import TargetRef
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from ..decode.sizes import SIZES

# Repetitive, so that the inner drafters find something; ragged.
PROMPTS = [[5, 9, 33, 2, 5, 9, 33, 2, 5, 9, 33], [7], [44, 3, 3, 18, 44, 3, 3], [12, 6, 6, 6, 19, 12, 6, 6, 6, 19, 50, 51, 12, 6, 6]]
DEPTH, NEW = 6, 24


def tiny(seed: int, gain: float = 4.0, *, windowed: bool = False) -> Target:
    """A random model in float64. A small gain makes text that runs into loops."""
    torch.manual_seed(seed)
    shape = {**SIZES, "num_hidden_layers": 2}
    model = MistralForCausalLM(MistralConfig(**shape, sliding_window=9)) if windowed else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(gain)
    return Target(model.double(), None, "tiny")


class Both:
    """The proposer under test beside the draft model alone: every round's chains must be equal. Counts the passes of both."""

    taps: tuple[int, ...] = ()
    max_positions = None
    asynchronous = False

    def __init__(self, cascade: CascadeProposer, alone: Any) -> None:
        self.cascade, self.alone = cascade, alone
        self.max_depth, self.num_nodes = cascade.max_depth, cascade.num_nodes
        self.passes = {"cascade": 0, "alone": 0}
        self._counted(cascade.draft, "cascade")
        self._counted(alone.draft, "alone")

    def _counted(self, draft: Target, name: str) -> None:
        extend = draft.extend

        def counting(*args: Any, **kwargs: Any) -> Step:
            self.passes[name] += 1
            return extend(*args, **kwargs)

        draft.extend = counting  # type: ignore[method-assign]

    @property
    def extent(self) -> Extent:
        return self.cascade.extent

    @extent.setter
    def extent(self, extent: Extent) -> None:
        self.cascade.extent = self.alone.extent = extent

    def tensors(self) -> list[Tensor]:
        return []

    def reset(self, batch: int, capacity: int) -> None:
        self.cascade.reset(batch, capacity)
        self.alone.reset(batch, capacity)

    def observe(self, accepted: Accepted) -> None:
        self.live_B = accepted.count_B > 0
        self.cascade.observe(accepted)
        self.alone.observe(accepted)

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        tree, want = self.cascade.propose(root_B, sampler, noise_BDV), self.alone.propose(root_B, sampler, noise_BDV)
        assert tree.is_chain and torch.equal(tree.tokens_BN[self.live_B], want.tokens_BN[self.live_B])
        return tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("inner", sorted(INNERS))
def test_the_chain_is_the_one_that_the_draft_drafts_alone(inner: str, temperature: float) -> None:
    """In a ragged batch, through rounds of which the target rejects some tokens; rows end at different times. With fewer passes."""
    target = tiny(0)
    both = Both(Cascade(inner, Standalone(tiny(1)).bind(target)).proposer(depth=DEPTH), Standalone(tiny(1)).bind(target).proposer(depth=DEPTH))
    with torch.no_grad():  # the draft is the target with some noise, so that some tokens are accepted and some not
        for model in (both.cascade.draft.model, both.alone.draft.model):
            model.load_state_dict(target.model.state_dict())
            generator = torch.Generator().manual_seed(5)
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
    params = [SamplingParams(temperature=temperature, seed=20 + row, top_p=0.9) for row in range(len(PROMPTS))]
    plain = Engine(target).generate(PROMPTS, params, NEW, eos_ids=[1])
    out = Engine(target, both).generate(PROMPTS, params, NEW, eos_ids=[1])
    assert out.tokens == plain.tokens
    if temperature == 0:  # sampled text does not repeat itself
        assert both.passes["cascade"] < both.passes["alone"]
    counts = [r.accepted for rounds in out.rounds for r in rounds]
    assert 0 < sum(counts) < DEPTH * len(counts)
    alone = [Engine(target, both.cascade).generate([p], s, NEW, eos_ids=[1]).rounds[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert alone == out.rounds


@pytest.mark.parametrize("inner", sorted(INNERS))
@pytest.mark.parametrize("windowed", [False, True])
def test_repetitive_text_takes_few_passes(inner: str, windowed: bool) -> None:
    """A draft that runs into a loop: once the inner drafter knows it, a round's chain takes one pass, and `observe` one more."""
    target, draft, other = (tiny(4, 0.5, windowed=True) if windowed else tiny(0, 1.0) for _ in range(3))
    both = Both(Cascade(inner, Standalone(draft).bind(target)).proposer(depth=DEPTH), Standalone(other).bind(target).proposer(depth=DEPTH))
    out = Engine(target, both).generate([PROMPTS[0]] * 2, SamplingParams(), 71)
    rounds = len(out.rounds[0])
    assert rounds == 10 and both.passes["alone"] == 1 + rounds * DEPTH  # one after the prefill, then depth - 1 and one in each round
    assert both.passes["cascade"] <= 1 + 2 * rounds + 3 * DEPTH


def test_rejected_inner_drafts_leave_no_trace() -> None:
    """An inner drafter that is always wrong, in several ways: every pass then gives one token, and what it wrote is never seen."""

    class Wrong:
        def __init__(self) -> None:
            self.asked: list[list[list[int]]] = []

        def reset(self, batch: int, capacity: int) -> None:
            pass

        def observe(self, accepted: Accepted) -> None:
            pass

        def after(self, drafted: Any) -> list[list[int]]:
            self.asked.append([list(tokens) for tokens in drafted])
            return [[96 - row] * (len(tokens) % 4 + row) for row, tokens in enumerate(drafted)]

    target, wrong = tiny(0), Wrong()
    draft, other = tiny(1), tiny(1)
    with torch.no_grad():  # the tokens that it expects are never chosen
        for model in (draft.model, other.model):
            model.get_output_embeddings().weight[93:] = 0.0
    both = Both(CascadeProposer(Standalone(draft).bind(target), wrong, depth=4), Standalone(other).bind(target).proposer(depth=4))
    out = Engine(target, both).generate(PROMPTS, SamplingParams(), 12)
    assert out.tokens == Engine(target).generate(PROMPTS, SamplingParams(), 12).tokens
    assert both.passes["cascade"] == both.passes["alone"]
    assert [[len(tokens) for tokens in rows] for rows in wrong.asked[:3]] == [[1] * 4, [2] * 4, [3] * 4]


def fed(inner: Any, text: list[int]) -> Any:
    """The inner drafter with one row of this text."""
    inner.reset(1, 0)
    ids, following = torch.tensor([text[:-1]]), torch.tensor([text[1:]])
    inner.observe(Accepted(ids, following, None, torch.zeros(1, dtype=torch.int64), torch.tensor([len(text) - 1])))
    return inner


texts = st.lists(st.integers(0, 2), min_size=2, max_size=30)


@given(texts, st.lists(st.integers(0, 2), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_lookups_ahead_are_those_of_brute_force_and_keep_nothing(text: list[int], drafted: list[int]) -> None:
    """The longest suffix of text + drafted that the text has; and the text afterwards is what it was."""
    whole = text + drafted

    def ends(size: int) -> list[int]:
        return [end for end in range(size, len(text) + 1) if size <= len(whole) and text[end - size : end] == whole[-size:]]

    lookup, suffix = fed(_Lookup(5), text), fed(_Suffix(5), text)
    size = next((n for n in (3, 2, 1) if ends(n)), 0)
    assert lookup.after([drafted]) == [continuation(whole, ends(size)[-1], 5) if size else []]
    longest = next((n for n in range(len(whole), 0, -1) if ends(n)), 0)
    length, found = suffix._walked[0].occurrences_after(drafted, 100)
    assert length == longest and sorted(found) == (ends(longest) if longest else [])
    heaviest = [continuation(whole, end, 5)[:1] for end in found]
    assert suffix.after([drafted])[0][:1] in heaviest or not found
    for inner, fresh in ((lookup, fed(_Lookup(5), text)), (suffix, fed(_Suffix(5), text))):
        got, want = (p.propose(torch.tensor([text[-1]]), Sampler([SamplingParams()], "cpu"), None) for p in (inner, fresh))
        assert torch.equal(got.tokens_BN, want.tokens_BN)


def test_one_level_needs_no_inner_drafter() -> None:
    target = tiny(0)
    proposer = Cascade("prompt_lookup", Standalone(tiny(1)).bind(target)).proposer(depth=1)
    assert proposer.num_nodes == 2
    assert Engine(target, proposer).generate(PROMPTS, SamplingParams(), 8).tokens == Engine(target).generate(PROMPTS, SamplingParams(), 8).tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model's folder, with the tokenizer of the built-in target."""
    path = tmp_path_factory.mktemp("draft")
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 2048})).save_pretrained(path)
    AutoTokenizer.from_pretrained(TargetRef().location).save_pretrained(path)
    yield path


def test_it_is_opened_by_name(folder: Path) -> None:
    target = Target.load(str(folder), dtype="float32", device="cpu")
    drafter, contract = open_drafter(f"cascade:suffix_automaton+{folder}", target)
    assert isinstance(drafter, Cascade) and drafter.method == "cascade:suffix_automaton+draft_model"
    assert contract["draft_model"]["name"] == str(folder)
    assert sum(p.numel() for p in drafter.parameters()) == sum(p.numel() for p in target.model.parameters())
    out = Engine(target, drafter.proposer(tree="dynamic", depth=3)).generate([[5, 6, 7]], SamplingParams(), 9)
    assert out.tokens == Engine(target).generate([[5, 6, 7]], SamplingParams(), 9).tokens
    assert all(r.accepted == 3 for r in out.rounds[0])  # the target as its own draft


def test_what_cannot_be_a_cascade_is_refused(folder: Path) -> None:
    target = Target.load(str(folder), dtype="float32", device="cpu")
    with pytest.raises(UserError, match=r"^cascade: wanted an inner drafter that can draft from tokens .*token_recycling\), got lookahead$"):
        open_drafter("cascade:lookahead+no/such/model", target)
    with pytest.raises(UserError, match="wanted cascade:INNER"):
        open_drafter("cascade:prompt_lookup", target)
    with pytest.raises(UserError, match=r"wanted a causal LM .* got suffix_automaton"):
        open_drafter("cascade:prompt_lookup+suffix_automaton", target)
    proposer = Cascade("prompt_lookup", Standalone(target)).proposer(depth=3)
    with pytest.raises(UserError, match="wanted no policy for a cascade"):
        proposer.length = Additive()
    with pytest.raises(UserError, match=r"decode\.depth: wanted at least 1, got 0"):
        Cascade("prompt_lookup", Standalone(target)).proposer(depth=0)
