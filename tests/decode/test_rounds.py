"""Random trees through real models: each verified node is what a whole pass over its path gives, and so is what follows a committed path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Engine
from draftsmith.decode.proposer import Accepted, Extent
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.decode.tree import DraftTree
from draftsmith.decode.verify import path_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

VOCAB = 5  # duplicate siblings are common
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 96,
}


def tiny(windowed: bool) -> Target:
    torch.manual_seed(0)
    layers: dict[str, Any] = {"num_hidden_layers": 2}
    config: Any = LlamaConfig(**SIZES, **layers)
    if windowed:
        config = Gemma3TextConfig(**SIZES, **layers, sliding_window=5, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return Target(model, None, "tiny")


TARGETS = {windowed: tiny(windowed) for windowed in (False, True)}


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]:
    """Of up to three rows of their own lengths: committed texts, the trees' tokens and parents, and a leaf in each."""
    nodes = draw(st.integers(1, 10))
    texts, tokens, parents, leaves = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        texts.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)))
        tokens.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=nodes, max_size=nodes)))
        parents.append([0, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))])
        leaves.append(draw(st.integers(0, nodes - 1)))
    return texts, tokens, parents, leaves


def whole_pass(target: Target, sequences: list[list[int]]) -> Tensor:
    """Hidden state of each sequence's last token, without a cache."""
    longest = max(len(s) for s in sequences)
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    length = torch.tensor([len(s) for s in sequences])
    position = torch.arange(longest).expand_as(ids)
    hidden = target.features(ids, position, torch.where(position < length[:, None], 0, -1)).hidden_BNH
    return hidden[torch.arange(len(sequences)), length - 1]


@pytest.mark.parametrize("windowed", TARGETS)
@settings(max_examples=250)
@given(drawn=rounds())
def test_a_round_is_what_whole_passes_give(windowed: bool, drawn: tuple[Any, ...]) -> None:
    texts, tokens, parents, leaves = drawn
    target, batch, nodes = TARGETS[windowed], len(texts), len(tokens[0])
    lengths = [len(text) for text in texts]
    length_B = torch.tensor(lengths)
    target.set_taps(())
    target.allocate(batch, max(lengths) + nodes + 12)
    with torch.no_grad():
        target.prefill(torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts]), length_B)
        tree = DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents), nodes - 1)
        tree.check_integrity()
        got = target.verify(tree, length_B, Extent(max(lengths), len(set(lengths)) == 1)).hidden_BNH
        paths: list[list[list[int]]] = []
        for row in range(batch):
            paths.append([[tokens[row][0]]])
            for node in range(1, nodes):
                paths[row].append([*paths[row][parents[row][node]], tokens[row][node]])
        want = whole_pass(target, [texts[row] + path for row in range(batch) for path in paths[row]]).view(batch, nodes, -1)
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
        # Keep one path of each row; what comes next sees it, and nothing of the rest of the tree.
        leaf_B = torch.tensor(leaves)
        path_BP = path_to(tree, leaf_B)
        target.commit(tree, path_BP, length_B)
        kept = [len(paths[row][leaves[row]]) for row in range(batch)]
        after_B = length_B + torch.tensor(kept)
        after = after_B.tolist()
        got = target.verify(DraftTree.root_only(torch.full((batch,), 3)), after_B, Extent(max(after), len(set(after)) == 1)).hidden_BNH[:, 0]
        want = whole_pass(target, [[*texts[row], *paths[row][leaves[row]], 3] for row in range(batch)])
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


class Random:
    """Any tree at all, some of its nodes invalid; `lucky` of its tokens are what the target will say."""

    taps: tuple[int, ...] = ()
    num_nodes, max_depth = 9, 8

    def __init__(self, truth: list[list[int]], seed: int) -> None:
        self.truth, self.random = truth, torch.Generator().manual_seed(seed)

    def reset(self, batch: int, capacity: int) -> None:
        self.done = [0] * batch

    def observe(self, accepted: Accepted) -> None:
        first = not any(self.done)
        self.done = [done + (1 if first else count) for done, count in zip(self.done, accepted.count_B.tolist(), strict=True)]

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        batch = len(root_B)
        parents = torch.zeros(batch, 9, dtype=torch.int64)
        for node in range(1, 9):
            parents[:, node] = torch.randint(max(0, node - 3), node, (batch,), generator=self.random)
        tokens = torch.randint(VOCAB, (batch, 9), generator=self.random)
        tokens[:, 0] = root_B
        valid = torch.rand(batch, 9, generator=self.random) < 0.9
        valid[:, 0] = True
        tree = DraftTree.from_parents(tokens, parents, 8, valid)
        for row in range(batch):
            for node in range(1, 9):
                at = self.done[row] + int(tree.depth_BN[row, node]) - 1
                if torch.rand(1, generator=self.random) < 0.7 and at < len(self.truth[row]):
                    tokens[row, node] = self.truth[row][at]
        return tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_a_ragged_batch_of_eight_gives_each_row_what_it_gets_alone(temperature: float, seed: int, data: st.DataObject) -> None:
    target = TARGETS[bool(seed % 2)]
    prompts = [data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)) for _ in range(8)]
    params = [SamplingParams(temperature=temperature, seed=seed + row) for row in range(8)]
    stop = data.draw(st.integers(0, VOCAB - 1))
    plain = [Engine(target).generate([p], s, 14, eos_ids=[stop]) for p, s in zip(prompts, params, strict=True)]
    out = Engine(target, Random([g.tokens[0] for g in plain], seed)).generate(prompts, params, 14, eos_ids=[stop])
    assert out.tokens == [g.tokens[0] for g in plain] and out.finish == [g.finish[0] for g in plain]
