"""Our Muon against torch's, and the iteration against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from draftsmith.train.optimizers import Muon, muon_and_adamw, orthogonalise
from torch import nn


def test_the_iteration_brings_all_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 24, 40), (2, 40, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_updates_equal_those_of_torch_up_to_its_bfloat16() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(s)) for s in ((16, 48), (16, 48), (48, 16))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    mine = Muon(ours, lr=0.1, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step()
        reference.step()  # type: ignore[no-untyped-call]
    for mine_p, their_p, before in zip(ours, theirs, start, strict=True):
        got, wanted = mine_p.detach() - before, their_p.detach() - before
        assert float((got - wanted).norm() / wanted.norm()) < 0.02


def test_only_matrices_inside_the_layers_go_to_muon() -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 4), "layer": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5, bias=False)})
    muon, adamw = muon_and_adamw(model, 0.1, (0.9, 0.95), 0.0)
    assert [tuple(p.shape) for group in muon.param_groups for p in group["params"]] == [(4, 4)]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 3
    with pytest.raises(ValueError, match="matrices only"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)
