"""A draft model in training: it computes what transformers computes, and is stored as transformers stores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.pard import Pard
from draftsmith.heads.registry import load_drafter, new_head, open_drafter, save_drafter
from draftsmith.heads.standalone import Standalone
from draftsmith.recipes.schema import TargetRef
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig, MistralConfig

from ..decode.sizes import SIZES
from .tiny import random_ids, tiny_target, whole

PROMPTS = [[5, 9, 33, 2, 71, 8], [7], [12, 80, 6, 6, 6, 19]]


def draft_of(family: str, target: Target, **settings: int) -> DraftModel:
    """A random model of that family; weights that are larger than usual, so that attention matters."""
    torch.manual_seed(7)
    config = {
        "llama": lambda: LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": True}),
        "mistral": lambda: MistralConfig(**{**SIZES, "num_hidden_layers": 2}, sliding_window=7),
        "gemma3": lambda: Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 2}, sliding_window=6, layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=None
        ),
    }[family]()
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return DraftModel.of(model, None, target, **settings)


def logits(draft: DraftModel, ids: torch.Tensor) -> torch.Tensor:
    batch = whole(ids)
    return draft.training_outputs(batch.ids_BT, batch.position_BT, batch.document_BT) @ draft.output_rows().t()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_documents_and_mask_entries_are_what_transformers_computes_of_each_text_alone(family: str) -> None:
    """Two documents side by side; entries of two places, each computed by transformers on the prefix followed by masks. Windows too."""
    draft, ids = draft_of(family, tiny_target(), block_size=4, mask_token_id=3), random_ids(1, 20)
    document = torch.tensor([[0] * 9 + [1] * 11])
    position = torch.tensor([[*range(9), *range(11)]])
    anchor, depth = torch.tensor([[4, 4, 15, 15, 15, -1]]), torch.tensor([[1, 2, 1, 2, 3, 0]])
    with torch.no_grad():
        out = draft.training_outputs(ids, position, document, anchor, depth) @ draft.output_rows().t()
        for first, stop in ((0, 9), (9, 20)):
            want = draft.causal_lm(ids[:, first:stop]).logits[0]
            torch.testing.assert_close(out[0, first:stop], want, atol=2e-4, rtol=1e-3)
        for first, last, entries in ((0, 4, [20, 21]), (9, 15, [22, 23, 24])):
            text = torch.cat([ids[:, first : last + 1], torch.full((1, len(entries)), 3)], dim=1)
            want = draft.causal_lm(text).logits[0, -len(entries) :]
            torch.testing.assert_close(out[0, entries], want, atol=2e-4, rtol=1e-3)
    assert torch.isfinite(out).all()


def test_adapters_merged_and_unmerged_give_the_same_logits() -> None:
    target, ids = tiny_target(), random_ids(2, 12)
    draft = draft_of("llama", target)
    before = logits(draft, ids).detach()
    draft.adapt(rank=3)
    trained = [name for name, p in draft.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    torch.testing.assert_close(logits(draft, ids).detach(), before)  # adapters begin with nothing
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    unmerged = logits(draft, ids).detach()
    assert float((unmerged - before).abs().max()) > 0.1
    with torch.no_grad():
        torch.testing.assert_close(draft.merged()(ids).logits, unmerged, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits(draft, ids), unmerged)  # merging a copy leaves the draft in training as it was


def test_adapters_train_the_mask_token_s_embedding_too() -> None:
    draft = draft_of("llama", tiny_target(), block_size=3, mask_token_id=5).adapt(rank=2)
    ids = random_ids(1, 8)
    batch = whole(ids)
    out = draft.training_outputs(batch.ids_BT, batch.position_BT, batch.document_BT, torch.tensor([[3]]), torch.tensor([[1]]))
    out.sum().backward()  # type: ignore[no-untyped-call]
    trained = {name: p for name, p in draft.named_parameters() if p.requires_grad and "lora_" not in name}
    assert len(trained) == 1 and float(next(iter(trained.values())).grad.abs().sum()) > 0  # type: ignore[union-attr]
    before = logits(draft, ids).detach()
    with torch.no_grad():
        torch.testing.assert_close(draft.merged()(ids).logits, before, atol=1e-4, rtol=1e-4)


def test_training_on_does_not_change_a_snapshot() -> None:
    target = tiny_target()
    draft = draft_of("llama", target)
    snapshot, ids = draft.snapshot(), random_ids(1, 8)
    batch = whole(ids)
    with torch.no_grad():
        before = snapshot.features(batch.ids_BT, batch.position_BT, batch.document_BT).hidden_BNH.clone()
        torch.testing.assert_close(snapshot.logits(before), logits(draft, ids), atol=1e-4, rtol=1e-4)
        for parameter in draft.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(snapshot.features(batch.ids_BT, batch.position_BT, batch.document_BT).hidden_BNH, before)
    assert all(p.requires_grad for p in draft.parameters())


@pytest.mark.parametrize("block_size", [None, 4])
def test_the_saved_draft_is_a_folder_of_transformers(block_size: int | None, tmp_path: Path) -> None:
    """With the built-in target, whose tokenizer goes along: AutoModelForCausalLM, generate(assistant_model=...), and our own loaders."""
    target = Target.load(TargetRef().location)
    sizes = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "block_size": block_size}
    torch.manual_seed(0)
    draft = new_head("draft_model", target, sizes)
    assert isinstance(draft, DraftModel)
    contract = {"target": {"name": "builtin:quickstart", "fingerprint": target.fingerprint()}}
    save_drafter(draft, tmp_path / "d", contract)
    assert {path.name for path in tmp_path.iterdir()} == {"d"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "d"), AutoTokenizer.from_pretrained(tmp_path / "d")
    ids = torch.tensor([[5, 9, 33, 2, 71, 8]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, logits(draft, ids), atol=1e-5, rtol=1e-5)
    assert target.tokenizer is not None and tokenizer.get_vocab() == target.tokenizer.get_vocab()
    theirs = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, assistant_model=model, pad_token_id=1
    )
    ours, read = open_drafter(tmp_path / "d", target)
    assert type(ours) is (Standalone if block_size is None else Pard) and read["target"] == contract["target"]
    assert Engine(target, ours.proposer(depth=3)).generate(ids.tolist(), SamplingParams(), 12).tokens[0] == theirs[0, 6:].tolist()
    again, _ = load_drafter(tmp_path / "d", target, dtype=torch.float32)
    assert isinstance(again, DraftModel) and again.config.block_size == block_size
    torch.testing.assert_close(logits(again, ids), logits(draft, ids))
    assert json.loads((tmp_path / "d" / "config.json").read_text()).get("pard_token") == (1 if block_size else None)
    with pytest.raises(UserError, match="belongs to another target"):
        open_drafter(tmp_path / "d", tiny_target())
    (tmp_path / "d" / "contract.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        open_drafter(tmp_path / "d", target)


def test_a_draft_with_more_rows_than_the_target_learns_the_shared_ones() -> None:
    target = tiny_target()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": 104, "num_hidden_layers": 1}))
    draft = DraftModel.of(model, None, target)
    assert draft.output_rows().shape[0] == 97 and draft.draft_ids.tolist() == list(range(97))
    params = SamplingParams(temperature=1.0, seed=1)
    assert Engine(target, draft.proposer(depth=2)).generate(PROMPTS, params, 8).tokens == Engine(target).generate(PROMPTS, params, 8).tokens


def test_what_cannot_be_a_draft_in_training_is_refused() -> None:
    target = tiny_target()
    with pytest.raises(UserError, match=r"drafter\.init: wanted a causal LM whose logits .* final_logit_softcapping"):
        DraftModel.of(
            AutoModelForCausalLM.from_config(Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 1}, final_logit_softcapping=3.0)), None, target
        )
    for settings, says in (
        ({"block_size": 1}, r"drafter\.block_size: wanted null, or at least 2"),
        ({"mask_token_id": 1}, r"drafter\.mask_token_id: wanted null, as no drafter\.block_size"),
        ({"block_size": 2, "mask_token_id": 97}, r"drafter\.mask_token_id: wanted 0 \.\. 96"),
        ({"num_heads": 3}, r"drafter\.num_heads: wanted a multiple of the 2 key heads, got 3"),
        ({"taps": [1]}, r"drafter\.taps: wanted null, as the method draft_model has no such setting"),
    ):
        with pytest.raises(UserError, match=says):
            new_head("draft_model", target, settings)
