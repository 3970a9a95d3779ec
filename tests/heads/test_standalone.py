"""A draft model as drafter: the target as its own draft is always accepted, any other changes nothing but the speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine, Round
from draftsmith.decode.proposer import Accepted, Extent
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.registry import FREE, open_drafter, open_others
from draftsmith.heads.standalone import Standalone, early_exit
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig

from ..decode.sizes import SIZES

PROMPTS = [[5, 9, 33, 2, 71, 8, 15, 60, 4], [7], [44, 3, 3, 18, 90, 11], [12, 80, 6, 6, 6, 19, 21, 20, 50, 51, 52, 53]]
CHAIN: dict[str, Any] = {"tree": "chain", "depth": 4}
TREE: dict[str, Any] = {"tree": "dynamic", "depth": 3, "topk": 3, "nodes": 12}


def tiny(family: str, seed: int = 0, **sizes: int) -> Target:
    torch.manual_seed(seed)
    config = {
        "llama": lambda: LlamaConfig(**{**SIZES, **sizes}),
        "mistral": lambda: MistralConfig(**SIZES, sliding_window=7),
        "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2),
    }[family]()
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that attention matters and text is not constant
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model, None, family)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_target_as_its_own_draft_is_always_accepted(family: str, temperature: float) -> None:
    """Acceptance is exactly 1 only if the draft sees exactly what the target sees: slots, positions, masks, windows, noise."""
    target = tiny(family)
    params = [SamplingParams(temperature=temperature, seed=20 + i) for i in range(len(PROMPTS))]
    plain = Engine(target).generate(PROMPTS, params, 31)
    out = Engine(target, Standalone(tiny(family)).bind(target).proposer(**CHAIN)).generate(PROMPTS, params, 31)
    assert out.tokens == plain.tokens
    assert all(r == Round(4, 5, 4) for rounds in out.rounds for r in rounds) and len(out.rounds[0]) == 6


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_grown_tree_is_the_one_found_without_a_cache(family: str) -> None:
    """Beam by beam, each path's probability from a whole forward pass of its own."""
    draft = tiny(family)
    k, depth, nodes = 3, 3, 12
    proposer = Standalone(draft).proposer(tree="dynamic", depth=depth, topk=k, nodes=nodes)
    prompts = [PROMPTS[0], PROMPTS[3]]
    length_B, root_B = torch.tensor([len(p) for p in prompts]), torch.tensor([17, 40])
    ids = torch.zeros(2, 12, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    following = torch.cat([ids[:, 1:], root_B[:, None]], 1).scatter(1, (length_B - 1)[:, None], root_B[:, None])
    with torch.no_grad():
        proposer.reset(2, 64)
        proposer.observe(Accepted(ids, following, None, torch.zeros_like(length_B), length_B))
        proposer.extent = Extent(int(length_B.max()), False)
        tree = proposer.propose(root_B, Sampler([SamplingParams()] * 2, "cpu"), None)
        for row, prompt in enumerate(prompts):
            level: dict[tuple[int, ...], float] = {(): 0.0}
            made: dict[tuple[int, ...], float] = {}
            for _ in range(depth):
                children: dict[tuple[int, ...], float] = {}
                for path in sorted(level, key=lambda p: -level[p])[:k]:
                    logits = draft.model(torch.tensor([[*prompt, int(root_B[row]), *path]])).logits[0, -1]
                    best = logits.log_softmax(-1).topk(k)
                    children |= {(*path, int(t)): level[path] + float(v) for v, t in zip(best.values, best.indices, strict=True)}
                made, level = made | children, children
            paths: list[tuple[int, ...]] = [()]
            for node in range(1, nodes + 1):
                paths.append((*paths[int(tree.parents_BN[row, node])], int(tree.tokens_BN[row, node])))
            assert set(paths[1:]) == set(sorted(made, key=lambda p: -made[p])[:nodes])


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [97, 90, 104])
def test_another_draft_changes_no_token(vocab: int, temperature: float, settings: dict[str, Any]) -> None:
    """Padded embedding tables of another size too. Rows of a ragged batch draft what they draft alone."""
    target, draft = tiny("llama"), tiny("llama", seed=1, vocab_size=vocab, num_hidden_layers=2)
    with torch.no_grad():  # half of its layers are the target's, so that something is accepted
        weight = target.model.get_input_embeddings().weight
        draft.model.get_input_embeddings().weight[:90] = weight[:90]
        draft.model.get_output_embeddings().weight[:90] = target.model.get_output_embeddings().weight[:90]
        draft.layers.load_state_dict(target.layers[:2].state_dict())
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    proposer = Standalone(draft).bind(target).proposer(**settings)
    out = Engine(target, proposer).generate(PROMPTS, params, 24)
    assert out.tokens == Engine(target).generate(PROMPTS, params, 24).tokens
    alone = [Engine(target, proposer).generate([p], s, 24).rounds[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert alone == out.rounds


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_target_drafts_with_some_of_its_layers(family: str) -> None:
    target = tiny(family)
    whole = early_exit(target, [0, 1, 2, 3]).proposer(**CHAIN)
    params = [SamplingParams(temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    plain = Engine(target).generate(PROMPTS, params, 16).tokens
    out = Engine(target, whole).generate(PROMPTS, params, 16)
    assert out.tokens == plain and all(r == Round(4, 5, 4) for rounds in out.rounds for r in rounds)  # all layers: the target itself
    part = early_exit(target, [1, 3])
    assert Engine(target, part.proposer(**CHAIN)).generate(PROMPTS, params, 16).tokens == plain
    # The layers are the target's second and fourth, not copies.
    ours, theirs = part.draft.layers.state_dict(keep_vars=True), target.layers.state_dict(keep_vars=True)
    assert all(ours[f"{i}.mlp.up_proj.weight"].data_ptr() == theirs[f"{layer}.mlp.up_proj.weight"].data_ptr() for i, layer in enumerate((1, 3)))
    with pytest.raises(UserError, match=r"wanted ascending layers in 0 \.\. 3, got \[2, 4\]"):
        early_exit(target, [2, 4])


def test_bad_drafts_are_refused() -> None:
    class Tokens:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    target, draft = tiny("llama"), tiny("llama", max_position_embeddings=32)
    target.tokenizer, draft.tokenizer = Tokens({"a": 1, "b": 2}), Tokens({"a": 1, "b": 3})
    with pytest.raises(UserError, match=r"wanted the tokenizer of target llama, got one in which 1 tokens differ \(such as 'b'\)"):
        Standalone(draft).bind(target)
    draft.tokenizer = target.tokenizer
    with pytest.raises(UserError, match="at most the drafter's 32 positions, got 49"):
        Engine(target, Standalone(draft).bind(target).proposer(depth=2)).generate([PROMPTS[0]], SamplingParams(), 40)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{damaged")
    with pytest.raises(UserError, match=r"wanted a readable config\.json, got a damaged one"):
        open_drafter(tmp_path, tiny("llama"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="wanted a drafter's folder"):
        open_drafter(tmp_path, tiny("llama"))


def test_layers_are_named_on_the_command_line() -> None:
    target = tiny("llama")
    for text, layers in (("0-1", [0, 1]), ("1,3", [1, 3]), ("0,2-3", [0, 2, 3])):
        drafter, contract = open_drafter(f"early_exit:{text}", target)
        assert contract == {"layers": layers} and isinstance(drafter, Standalone) and drafter.draft.num_layers == len(layers)
    for text, says in (
        ("", "wanted layers such as"),
        ("a", "wanted layers such as"),
        ("0-9", r"wanted ascending layers in 0 \.\. 3"),
        ("2,1", "wanted ascending"),
    ):
        with pytest.raises(UserError, match=says):
            open_drafter(f"early_exit:{text}", target)


def test_free_names_every_drafter_that_needs_nothing_each_once() -> None:
    target = tiny("llama")
    others = open_others(["lookahead", "free"], target)
    assert list(others) == ["lookahead", *(name for name in FREE if name != "lookahead")] and len(FREE) >= 4
    with pytest.raises(UserError, match="drafter fre: wanted"):
        open_others(["fre"], target)
    plain = Engine(target).generate(PROMPTS, SamplingParams(), 8).tokens
    for drafter in others.values():
        assert Engine(target, drafter.proposer(depth=3)).generate(PROMPTS, SamplingParams(), 8).tokens == plain
