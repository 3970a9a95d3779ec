"""What all heads share: sizes that do not fit, and what they take of a target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from draftsmith import UserError
from draftsmith.heads.dflash import DFlash, mask_token
from draftsmith.heads.registry import METHODS, new_head
from draftsmith.heads.standalone import Standalone

from .tiny import VOCAB, tiny_target


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"draft_model"}))
def test_more_children_than_the_draft_vocabulary_has_tokens_are_refused(method: str) -> None:
    """Not by an error of the first round."""
    target = tiny_target()
    head = new_head(method, target, {"draft_vocab_size": 12}).bind(target)
    with pytest.raises(UserError, match=r"decode.topk: wanted 1 \.\. 12 .*got 13"):
        head.proposer(tree="dynamic", depth=2, topk=13, nodes=20)
    head.proposer(tree="dynamic", depth=2, topk=12, nodes=20)
    head.proposer(tree="chain", depth=2, topk=13)  # a chain has no children to count


def test_so_are_they_for_a_draft_model() -> None:
    target = tiny_target()
    with pytest.raises(UserError, match=r"decode.topk: wanted 1 \.\. 97 .*got 98"):
        Standalone(tiny_target()).bind(target).proposer(tree="dynamic", depth=2, topk=98, nodes=120)


@pytest.mark.parametrize("factor", [{"logits_scaling": 8.0}, {"logit_scale": 0.125}])
@pytest.mark.parametrize("method", ["medusa", "dflash"])
def test_output_rows_have_the_factor_that_the_family_puts_on_its_logits(method: str, factor: dict[str, float]) -> None:
    """Granite divides its logits, Cohere multiplies them. Output layers that start from the target's rows then give its logits."""
    target = tiny_target()
    vars(target.config).update(factor)
    ids = torch.arange(30, 30 + VOCAB)
    head = new_head(method, target, {"draft_vocab_size": VOCAB}).bind(target)
    head.set_draft_vocabulary(ids, target)
    hidden = torch.randn(5, target.hidden_size)
    rows = head.output_rows() if isinstance(head, DFlash) else head.output_layers()[-1].weight
    torch.testing.assert_close(hidden @ rows.detach().t(), target.logits(hidden, ids))


def test_a_mask_token_is_none_that_texts_end_with() -> None:
    """Models without a padding token of their own pad with the one that ends a text."""
    target = tiny_target()
    for ends, tokenizer, wanted in (
        (2, None, 96),
        ([2, 7], None, 96),
        (5, None, 2),
        (None, SimpleNamespace(mask_token_id=None, pad_token_id=2, eos_token_id=2), 96),
        (None, SimpleNamespace(mask_token_id=11, pad_token_id=2, eos_token_id=2), 11),
    ):
        target.config.pad_token_id, target.config.eos_token_id, target.tokenizer = 2, ends, tokenizer
        assert mask_token(target) == wanted
