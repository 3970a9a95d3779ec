"""Losses, chunked over tokens so that no full [steps, tokens, vocabulary] tensor lives.

Dims: S unrolled steps, N tokens, C chunk, H hidden, V (draft) vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def soft_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """-sum_v p_v log softmax(logits)_v in float32, over the last dimension: the plain formula, and the test's oracle."""
    return -(target_probs * logits.float().log_softmax(-1)).sum(-1)


class _ChunkedSoftCrossEntropy(torch.autograd.Function):
    """sum_i w_i CE(p_i, softmax(W h_i)); the gradient is formed chunk by chunk in the forward pass: dlogits = w (softmax - p)."""

    @staticmethod
    def forward(ctx: Any, hidden_SNH: Tensor, weight_VH: Tensor, weights_SN: Tensor, probs: Callable[[int, int], Tensor], chunk: int) -> Tensor:
        """See `chunked_soft_cross_entropy`."""
        grad_hidden, grad_weight = torch.zeros_like(hidden_SNH), torch.zeros_like(weight_VH)
        total = torch.zeros((), dtype=torch.float32, device=hidden_SNH.device)
        for start in range(0, weights_SN.shape[1], chunk):
            stop = min(start + chunk, weights_SN.shape[1])
            target_CV = probs(start, stop)
            for step in range(hidden_SNH.shape[0]):
                weight_C = weights_SN[step, start:stop]
                hidden_CH = hidden_SNH[step, start:stop]
                log_q_CV = (hidden_CH @ weight_VH.t()).float().log_softmax(-1)
                total -= (weight_C * (target_CV * log_q_CV).sum(-1)).sum()
                # softmax - p holds for a p that sums to one; where it sums to zero the weight is zero too.
                grad_CV = ((log_q_CV.exp() - target_CV) * weight_C.unsqueeze(-1)).to(hidden_SNH.dtype)
                grad_hidden[step, start:stop] = grad_CV @ weight_VH
                grad_weight += grad_CV.t() @ hidden_CH
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the stored gradients."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None, None


def chunked_soft_cross_entropy(
    hidden_SNH: Tensor, weight_VH: Tensor, weights_SN: Tensor, probs: Callable[[int, int], Tensor], chunk: int = 1024
) -> Tensor:
    """Scalar sum over steps s and tokens n of weights[s, n] * CE(p[n], softmax(weight @ hidden[s, n])).

    probs(a, b) gives the target's distributions [b - a, V] (float32, rows sum to one) of tokens a .. b - 1; it is asked once a chunk, for all steps.
    """
    result: Tensor = _ChunkedSoftCrossEntropy.apply(hidden_SNH, weight_VH, weights_SN, probs, chunk)  # type: ignore[no-untyped-call]
    return result
