"""How likely a draft token is to be accepted, told by the draft model's own hidden state before the token is drawn (SpecDec++, 2405.19715).

    a = sigmoid(scale * out(f(h)) + shift)        h: the last hidden state that predicts the token; f: residual layers
It is trained on 1 - TV(p, q), which is the acceptance of a sampled token; scale and shift are set on other texts than the layers were trained on, so
that a share a of the tokens of which it says a is accepted. A draft goes on while the product of its tokens' a is above a threshold. It looks at
nothing that verification will say, and at no token that is then dropped.

Dims: H hidden.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from .. import UserError

FILE = "predictor.safetensors"  # beside a draft model's weights


class AcceptancePredictor(nn.Module):
    """blocks: residual layers of the hidden state's width."""

    def __init__(self, hidden_size: int, blocks: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(blocks))
        self.out = nn.Linear(hidden_size, 1)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))
        self.scale: Tensor
        self.shift: Tensor

    def raw(self, hidden: Tensor) -> Tensor:
        """[...] logits of hidden states [..., H], not calibrated."""
        x = self.norm(hidden.to(self.out.weight.dtype))
        for block in self.blocks:
            x = x + functional.silu(block(x))
        logits: Tensor = self.out(x).squeeze(-1)
        return logits

    def forward(self, hidden: Tensor) -> Tensor:
        """[...] the probability that the token is accepted."""
        return (self.scale * self.raw(hidden) + self.shift).sigmoid()

    def save(self, folder: Path) -> None:
        """Write it beside a draft model. It appears whole or not at all."""
        draft = folder / f"{FILE}.partial"
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}, draft)
        with draft.open("rb") as handle:
            os.fsync(handle.fileno())
        draft.rename(folder / FILE)

    @classmethod
    def load(cls, folder: Path, hidden_size: int) -> AcceptancePredictor | None:
        """That of a draft model's folder; None if there is none. Raises UserError for one that is damaged, or of another model."""
        if not (folder / FILE).is_file():
            return None
        try:
            tensors = load_file(folder / FILE)
            made = cls(hidden_size, sum(name.startswith("blocks.") for name in tensors) // 2)
            made.load_state_dict(tensors)
        except (SafetensorError, RuntimeError) as error:
            text = " ".join(str(error).split())[:200]
            raise UserError(f"drafter {folder}: {FILE} is damaged, or another model's ({text}); delete it, or train it again") from error
        return made.eval().requires_grad_(False)
