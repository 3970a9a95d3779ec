"""What the tests of all heads share: a tiny target, batches, features, and the check of a saved folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.head import Head
from draftsmith.heads.registry import load_drafter, save_drafter
from draftsmith.train.objectives.common import Batch
from transformers import AutoModelForCausalLM, LlamaConfig

from ..decode.sizes import SIZES

VOCAB = 60  # of 97


def tiny_target(seed: int = 0, **settings: Any) -> Target:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **settings))
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that attention matters and text is not constant
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model, None, "tiny")


def random_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(ids: torch.Tensor) -> Batch:
    """Every token is to be learnt; rows are documents."""
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(ids.shape[1]).expand_as(ids), torch.zeros_like(ids))


def ragged() -> Batch:
    """Two rows: one with a prompt and a gap that are not learnt, one with two documents and padding."""
    batch = whole(random_ids(2, 24))
    batch.loss_BT[0, :9] = False
    batch.loss_BT[0, 15:17] = False
    batch.document_BT[1, 8:] = 1
    batch.document_BT[1, 17:] = -1
    batch.loss_BT[1, 17:] = False
    return batch


def documents(batch: Batch) -> list[tuple[int, int]]:
    """(row, document) of every sequence."""
    return [(row, document) for row, ids in enumerate(batch.document_BT.tolist()) for document in sorted({*ids} - {-1})]


def features(target: Target, head: Head, batch: Batch) -> torch.Tensor:
    target.set_taps(head.taps)
    taps = target.features(batch.ids_BT, batch.position_BT, batch.document_BT).taps_BNF
    assert taps is not None
    return taps


def check_folder(head: Head, target: Target, folder: Path) -> None:
    """Saved and loaded: the same settings, the same tensors, the same drafts; for another target it is refused."""
    contract = {"target": {"name": "tiny", "fingerprint": target.fingerprint()}}
    save_drafter(head, folder / "d", contract)
    loaded, read = load_drafter(folder / "d", target)
    assert read == contract and type(loaded) is type(head) and loaded.sizes == head.sizes
    state = loaded.state_dict()
    assert state.keys() == head.state_dict().keys() and all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())
    prompts = [[5, 9, 33, 2, 71, 8], [7]]
    rounds = [Engine(target, drafter.proposer(depth=3)).generate(prompts, SamplingParams(), 12).rounds for drafter in (head, loaded)]
    assert rounds[0] == rounds[1]
    with pytest.raises(UserError, match="belongs to another target"):
        load_drafter(folder / "d", tiny_target(seed=1))
