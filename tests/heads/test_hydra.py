"""Hydra and Hydra++ on a tiny target: training pass against drafting with the cache, objective against its formula, over-fit, folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.heads.hydra import Hydra, HydraConfig, PrefixProposer
from draftsmith.heads.registry import new_head
from draftsmith.heads.stepwise import StepwiseHead
from draftsmith.train.objectives.common import Batch
from draftsmith.train.objectives.hydra import HydraObjective

from .stepwise import (
    CHAIN,
    TREE,
    acquainted,
    check_drafting,
    check_lossless,
    check_objective,
    check_refusals,
    learnt,
    make,
    tau,
)
from .tiny import check_folder, features, random_ids, tiny_target, whole


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def known(target: Target) -> dict[bool, StepwiseHead]:
    return {plus: acquainted("hydra", target, HydraObjective(), prefix_attention=plus) for plus in (False, True)}


def hydra(target: Target, plus: bool) -> Hydra:
    head = make("hydra", target, num_layers=2, prefix_attention=plus, num_heads=2, num_kv_heads=1 if plus else None)
    assert isinstance(head, Hydra)
    return head


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def plain_prefix(head: Hydra, hidden_TH: torch.Tensor, first: int) -> torch.Tensor:
    """The decoder layer for one document whose first position is `first`, written out."""
    p, width = dict(head.named_parameters()), head.config.head_dim
    x = rms(hidden_TH) * p["prefix.input_layernorm.weight"]
    angle = (first + torch.arange(len(x)))[:, None] * head.config.rope_theta ** (-torch.arange(0, width, 2) / width)[None]
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(y: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(y[:, : width // 2], y[:, width // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], dim=1)

    key, value = rotated(x @ p["prefix.self_attn.k_proj.weight"].t()), x @ p["prefix.self_attn.v_proj.weight"].t()
    mixed = []
    for query in torch.split(x @ p["prefix.self_attn.q_proj.weight"].t(), width, dim=1):
        scores = rotated(query) @ key.t() / width**0.5
        mixed.append(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ value)
    hidden_TH = hidden_TH + torch.cat(mixed, dim=1) @ p["prefix.self_attn.o_proj.weight"].t()
    x = rms(hidden_TH) * p["prefix.post_attention_layernorm.weight"]
    gate, up = x @ p["prefix.mlp.gate_proj.weight"].t(), x @ p["prefix.mlp.up_proj.weight"].t()
    return hidden_TH + (gate * gate.sigmoid() * up) @ p["prefix.mlp.down_proj.weight"].t()


def plain_outputs(head: Hydra, taps: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """The formula, position by position."""
    p, (rows, total, size) = dict(head.named_parameters()), taps.shape
    hidden = taps
    if head.prefix is not None:
        parts = []
        for row in range(rows):
            for document in sorted(set(batch.document_BT[row].tolist()), key=batch.document_BT[row].tolist().index):
                places = (batch.document_BT[row] == document).nonzero().squeeze(1)
                parts.append(plain_prefix(head, taps[row, places], int(batch.position_BT[row, places[0]])))
        hidden = torch.cat(parts).view(rows, total, size)
    table = head.target.embeddings.weight
    assert isinstance(table, torch.Tensor)
    scale = table.pow(2).mean().sqrt()  # of the whole vocabulary, which is a small one
    outputs = []
    for k in range(head.heads):
        x = torch.zeros(rows, total, size)
        for t in range(total - 1 - k):
            z = torch.cat([hidden[:, t], *(table[batch.ids_BT[:, t + 1 + j]] / scale for j in range(k + 1))], dim=-1)
            pre = z @ p[f"hydra_mlp.{k}.0.linear.weight"].t() + p[f"hydra_mlp.{k}.0.linear.bias"]
            y = z @ p[f"hydra_mlp.{k}.0.res_connection.weight"].t() + pre * pre.sigmoid()
            pre = y @ p[f"hydra_mlp.{k}.1.linear.weight"].t() + p[f"hydra_mlp.{k}.1.linear.bias"]
            x = x.index_put((torch.arange(rows), torch.tensor(t)), y + pre * pre.sigmoid())
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("plus", [False, True], ids=["hydra", "plus"])
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_the_objective_equals_the_formula_in_value_and_gradient(target: Target, labels: str, plus: bool) -> None:
    head = hydra(target, plus)

    def outputs(taps: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        return plain_outputs(head, taps, batch)

    check_objective(head, outputs, target, HydraObjective(labels=labels, chunk_tokens=5))  # type: ignore[arg-type]


@pytest.mark.parametrize("plus", [False, True], ids=["hydra", "plus"])
def test_the_training_pass_equals_step_by_step_drafting_with_the_cache(target: Target, plus: bool) -> None:
    check_drafting(target, hydra(target, plus))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "dynamic"])
@pytest.mark.parametrize("plus", [False, True], ids=["hydra", "plus"])
def test_decoding_is_token_identical_in_a_ragged_batch(
    target: Target, known: dict[bool, StepwiseHead], plus: bool, settings: dict[str, int], temperature: float
) -> None:
    head = known[plus]
    check_lossless(target, lambda: head.proposer(**settings), temperature)  # type: ignore[arg-type]


def test_an_untrained_head_starts_as_the_target_itself(target: Target) -> None:
    head = new_head("hydra", target, {"num_layers": 2})
    head.set_draft_vocabulary(torch.arange(target.vocab_size), target)
    assert isinstance(head, Hydra)
    batch = whole(random_ids(1, 12))
    taps = features(target, head, batch)
    for k, hidden in enumerate(head.training_outputs(taps, batch.ids_BT, batch.position_BT, batch.document_BT)):
        torch.testing.assert_close(head.lm_head(k)(hidden), target.logits(taps))


@pytest.mark.parametrize("plus", [False, True], ids=["hydra", "plus"])
def test_over_fitted_heads_draft_nearly_all(target: Target, plus: bool) -> None:
    head, prompt, text = learnt("hydra", target, HydraObjective(labels="hard"), steps=60, prefix_attention=plus)
    assert tau(target, head.proposer(), prompt, text) > 4  # of 5
    assert tau(target, head.proposer(tree="dynamic", nodes=8, topk=2), prompt, text) > 4


def test_the_prefix_cache_is_told_before_it_is_made(target: Target) -> None:
    proposer = hydra(target, True).proposer()
    assert isinstance(proposer, PrefixProposer)
    wanted = proposer.memory(3, 50)
    proposer.reset(3, 50)
    assert wanted == sum(t.numel() * t.element_size() for t in (proposer._keys, proposer._values))
    assert proposer.memory(3, 50) == 0


@pytest.mark.parametrize("plus", [False, True], ids=["hydra", "plus"])
def test_folder_round_trip(target: Target, plus: bool, tmp_path: Path) -> None:
    check_folder(hydra(target, plus), target, tmp_path / "d")


def test_wrong_input_is_refused(target: Target) -> None:
    check_refusals("hydra", target)
    with pytest.raises(UserError, match=r"drafter\.num_heads: wanted a multiple of num_kv_heads 2"):
        HydraConfig.for_target(target, prefix_attention=True, num_heads=3, num_kv_heads=2)
