"""The engine against transformers' own generation, and every proposer against plain decoding, on tiny random models in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.proposer import Accepted
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.decode.tree import DraftTree
from draftsmith.recipes.schema import TargetRef
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from .sizes import SIZES

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=7),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt2": lambda: GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=128,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
        resid_pdrop=0,
        attn_pdrop=0,
        embd_pdrop=0,
    ),
}


def tiny(family: str) -> Target:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    eager = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, **eager).double()
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that attention matters and text is not constant
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model, None, family)


class Guesser:
    """A proposer that needs no features: random trees whose tokens are the true continuation with probability one half."""

    taps: tuple[int, ...] = ()

    def __init__(self, truth: Sequence[Sequence[int]], nodes: int, chain: bool) -> None:
        self.truth, self.num_nodes, self.chain, self.max_depth = truth, nodes, chain, nodes - 1
        self.random = torch.Generator().manual_seed(1)
        self.done: list[int] = []
        self.accepted: list[int] = []

    def reset(self, batch: int, capacity: int) -> None:
        self.done = [0] * batch

    def observe(self, accepted: Accepted) -> None:
        first = not any(self.done)
        for row, count in enumerate(accepted.count_B.tolist()):
            self.done[row] += 1 if first else count

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        batch, n = root_B.shape[0], self.num_nodes
        parents, tokens = torch.zeros(batch, n, dtype=torch.int64), torch.zeros(batch, n, dtype=torch.int64)
        for row in range(batch):
            depth = [0]
            tokens[row, 0] = root_B[row]
            for node in range(1, n):
                parent = node - 1 if self.chain else int(torch.randint(max(0, node - 3), node, (1,), generator=self.random))
                depth.append(depth[parent] + 1)
                parents[row, node] = parent
                right = self.done[row] + depth[node] - 1
                true = self.truth[row][right] if right < len(self.truth[row]) else 0
                lucky = bool(torch.rand(1, generator=self.random) < 0.6)
                tokens[row, node] = true if lucky else torch.randint(97, (1,), generator=self.random)
        tree = DraftTree.chain(tokens) if self.chain else DraftTree.from_parents(tokens, parents, self.max_depth)
        tree.check_integrity()
        return tree


PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11], [12, 80, 6, 6, 6, 19, 21, 20, 50, 51, 52, 53]]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_greedy_equals_transformers_generate(family: str) -> None:
    target = tiny(family)
    ours = Engine(target).generate(PROMPTS, SamplingParams(), 24, eos_ids=[1]).tokens
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert tokens == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_is_token_identical_in_a_ragged_batch(family: str, temperature: float, chain: bool) -> None:
    target = tiny(family)
    params = [SamplingParams(temperature=temperature, seed=10 + i, top_p=0.95) for i in range(len(PROMPTS))]
    plain = [Engine(target).generate([p], s, 24, eos_ids=[1]).tokens[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert Engine(target).generate(PROMPTS, params, 24, eos_ids=[1]).tokens == plain  # padding rows change nothing
    out = Engine(target, Guesser(plain, 7, chain)).generate(PROMPTS, params, 24, eos_ids=[1])
    assert out.tokens == plain
    assert sum(r.accepted for rounds in out.rounds for r in rounds) > 10  # the guesses were really used
    for tokens, rounds in zip(out.tokens, out.rounds, strict=True):
        assert 1 + sum(r.emitted for r in rounds) == len(tokens)


def test_eos_and_limit_cut_inside_an_accepted_block() -> None:
    target = tiny("llama")
    plain = Engine(target).generate([PROMPTS[0]], SamplingParams(temperature=1.0, seed=3), 24).tokens
    for stop in (5, 6, 7, 8):
        eos = plain[0][stop]
        end = plain[0].index(eos) + 1
        out = Engine(target, Guesser(plain, 6, True)).generate([PROMPTS[0]], SamplingParams(temperature=1.0, seed=3), 24, eos_ids=[eos])
        assert out.tokens[0] == plain[0][:end]
        out = Engine(target, Guesser(plain, 6, True)).generate([PROMPTS[0]], SamplingParams(temperature=1.0, seed=3), stop)
        assert out.tokens[0] == plain[0][:stop]


def test_repetition_penalty_is_that_of_transformers() -> None:
    target = tiny("llama")
    ours = Engine(target).generate(PROMPTS, SamplingParams(repetition_penalty=1.7), 24, eos_ids=[1]).tokens
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        settings: dict[str, Any] = {"do_sample": False, "eos_token_id": 1, "pad_token_id": 0, "repetition_penalty": 1.7}
        theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **settings)
        assert tokens == theirs[0, len(prompt) :].tolist()
    assert ours != Engine(target).generate(PROMPTS, SamplingParams(), 24, eos_ids=[1]).tokens


def test_presence_and_frequency_penalty_and_bias_are_the_formula() -> None:
    target = tiny("llama")
    bias = {5: 1.5, 7: float("-inf"), 30: 2.0}
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.9, logit_bias=bias)
    for prompt in PROMPTS:
        out: list[int] = []
        for _ in range(20):
            logits = target.model(torch.tensor([[*prompt, *out]])).logits[0, -1].float()
            for token in set(out):
                logits[token] -= 0.7 + 0.9 * out.count(token)
            for token, value in bias.items():
                logits[token] += value
            out.append(int(logits.argmax()))
        assert Engine(target).generate([prompt], params, 20).tokens[0] == out


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_is_token_identical_under_penalties(temperature: float, chain: bool) -> None:
    """Each node's penalties count its own path: rows with different penalties, one without, share a batch."""
    target = tiny("llama")
    penalties: list[dict[str, Any]] = [{"repetition_penalty": 1.8}, {}, {"presence_penalty": 1.5, "logit_bias": {9: 3.0}}, {"frequency_penalty": 1.2}]
    params = [SamplingParams(temperature=temperature, seed=i, **p) for i, p in enumerate(penalties)]
    plain = [Engine(target).generate([p], s, 40).tokens[0] for p, s in zip(PROMPTS, params, strict=True)]
    out = Engine(target, Guesser(plain, 7, chain)).generate(PROMPTS, params, 40)
    assert out.tokens == plain
    assert sum(r.accepted for rounds in out.rounds for r in rounds) > 20


def test_rows_may_do_without_speculation() -> None:
    target = tiny("llama")
    plain = Engine(target).generate(PROMPTS, SamplingParams(), 24).tokens
    wanted = [True, False, True, False]
    for chain in (True, False):
        out = Engine(target, Guesser(plain, 6, chain)).generate(PROMPTS, SamplingParams(), 24, speculate=wanted)
        assert out.tokens == plain and set(out.finish) == {"length"}
        assert [any(r.accepted for r in rounds) for rounds in out.rounds] == wanted


def test_a_stop_string_ends_a_row_where_it_is_complete() -> None:
    """Also where one token holds the end of the string and more, and where the string was in the text before."""
    target = Target.load(TargetRef().location)
    assert target.tokenizer is not None
    prompts = [target.tokenizer("def main(")["input_ids"], target.tokenizer("import os\nclass A")["input_ids"]]
    plain = Engine(target).generate(prompts, SamplingParams(), 60).tokens
    texts = [target.tokenizer.decode(tokens) for tokens in plain]
    for stop in (texts[0][10:14], texts[1][3:5], texts[0][-9:-4], "no such text"):
        out = Engine(target, Guesser(plain, 6, True)).generate(prompts, SamplingParams(), 60, stop_strings=[stop])
        for tokens, whole, why in zip(out.tokens, plain, out.finish, strict=True):
            ends = [n for n in range(1, 61) if stop in target.tokenizer.decode(whole[:n])]
            assert tokens == whole[: ends[0] if ends else 60] and why == ("stop" if ends else "length")


def test_taps_are_hugging_face_hidden_states() -> None:
    target = tiny("qwen3")
    target.set_taps([0, 1, 3])
    ids = torch.tensor([PROMPTS[0]])
    step = target.features(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids))
    want = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    assert step.taps_BNF is not None
    torch.testing.assert_close(step.taps_BNF, torch.cat([want[0], want[1], want[3]], -1))
    torch.testing.assert_close(step.hidden_BNH, want[-1])


def test_documents_in_one_row_do_not_see_each_other() -> None:
    target = tiny("llama")
    a, b = PROMPTS[0], PROMPTS[2]
    packed = torch.tensor([a + b])
    position = torch.tensor([[*range(len(a)), *range(len(b))]])
    document = torch.tensor([[0] * len(a) + [1] * len(b)])
    together = target.features(packed, position, document).hidden_BNH[0, len(a) :]
    alone = target.features(torch.tensor([b]), torch.arange(len(b))[None], torch.zeros(1, len(b), dtype=torch.int64)).hidden_BNH[0]
    torch.testing.assert_close(together, alone)


def test_bad_input_is_refused() -> None:
    target = tiny("llama")
    with pytest.raises(UserError, match="at most the target's 128 positions, got 209"):
        Engine(target).generate([PROMPTS[0]], SamplingParams(), 200)
    with pytest.raises(UserError, match="at least one token"):
        Engine(target).generate([[]], SamplingParams(), 2)
    with pytest.raises(UserError, match="below the vocabulary's size 97, got 400"):
        Engine(target).generate([PROMPTS[0]], SamplingParams(logit_bias={400: 1.0}), 2)
    with pytest.raises(UserError, match="wanted a target with a tokenizer"):
        Engine(target).generate([PROMPTS[0]], SamplingParams(), 2, stop_strings=["x"])
    with pytest.raises(UserError, match="temperature: wanted a finite number >= 0, got -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(UserError, match=r"wanted ascending layer indices in 0 \.\. 5, got \[3, 9\]"):
        target.set_taps([3, 9])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_of_some_tokens_are_those_of_all(family: str) -> None:
    target, hidden = tiny(family), torch.randn(2, 3, 32, dtype=torch.float64)
    for ids in (torch.tensor([90, 3, 17]), torch.arange(target.vocab_size)):
        torch.testing.assert_close(target.logits(hidden, ids), target.logits(hidden)[..., ids])
