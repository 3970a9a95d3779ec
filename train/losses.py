"""Losses between the target's distribution p and the drafter's q = softmax(z), by name in LOSSES: a plain formula, and a chunked form.

    loss = chunked_loss("lk_lambda", hidden_SNH, weight_VH, weights_SN, probs, chunk, decay=3.0)

Names and sources: "ce", "kl", "reverse_kl", "jsd", "tv" (DistillSpec, 2310.08461), "lk_alpha", "lk_lambda" (2602.23881), "mixed" (2607.05147).
For the rule that is deployed: "tv" for sampled chains, "topk_mass" for trees of the drafter's best tokens, "match" for shared noise.
The chunked form never holds [steps, tokens, vocabulary]: it forms logits, loss and gradient chunk by chunk in the forward pass.

Dims: S unrolled steps, N tokens, C chunk, H hidden, V (draft) vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import UserError
from ..decode.halves import fast_dtype, row_parts

# On a CPU a chunk of logits that fits into the cache is passed over faster, but with few tokens matrix products are slow. So products take this many
# tokens, and what is done token by token takes as many of them at once as one core's own cache holds.
_CPU_CHUNK_BYTES, _CPU_CHUNK_TOKENS = 2**24, 512
_CPU_CORE_BYTES, _CPU_CORE_TOKENS = 2**19, 8


def soft_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """-sum_v p_v log softmax(logits)_v, over the last dimension, at least in float32: the plain formula, and the test's oracle."""
    return -(target_probs * _wide(logits).log_softmax(-1)).sum(-1)


def position_weights(count: int, decay: float) -> Tensor:
    """[count] float32 weights of draft positions, decay^k over their sum. DFlash's exp(-k / 4) is decay = exp(-1 / 4)."""
    weights = decay ** torch.arange(count, dtype=torch.float32)
    return weights / weights.sum()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """A loss of one distribution. The fields are its settings. p sums to one; it may be zero in places, q may underflow."""

    name: ClassVar[str]

    @abstractmethod
    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        """[...] the loss of logits [..., V] and p [..., V], written out; differentiable."""

    def gradient(self, logits_CV: Tensor, probs_CV: Tensor) -> tuple[Tensor, Tensor]:
        """(loss [C], its gradient with respect to the logits [C, V]), free of NaN. May overwrite logits_CV, and give the gradient there."""
        with torch.enable_grad():
            leaf = logits_CV.detach().requires_grad_()
            loss_C = self.plain(leaf, probs_CV)
            (gradient_CV,) = torch.autograd.grad(loss_C.sum(), leaf)
        return loss_C.detach(), gradient_CV


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """-sum_v p_v log q_v."""

    name: ClassVar[str] = "ce"

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        return soft_cross_entropy(logits, probs)

    def gradient(self, logits_CV: Tensor, probs_CV: Tensor) -> tuple[Tensor, Tensor]:
        # log sum exp z - p . z, the former read off the largest logit and its q: fewer passes than by log q.
        top_C, dot_C = logits_CV.amax(-1), torch.linalg.vecdot(probs_CV, logits_CV)
        q_CV = logits_CV.softmax(-1)
        return top_C - q_CV.amax(-1).log() - dot_C, torch.sub(q_CV, probs_CV, out=logits_CV)


@dataclass(frozen=True, kw_only=True)
class KL(Loss):
    """sum_v p_v log(p_v / q_v), the forward divergence: cross-entropy less the entropy of p, so that zero is the best."""

    name: ClassVar[str] = "kl"

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        return soft_cross_entropy(logits, probs) - entropy(probs)

    def gradient(self, logits_CV: Tensor, probs_CV: Tensor) -> tuple[Tensor, Tensor]:
        loss_C, gradient_CV = CrossEntropy().gradient(logits_CV, probs_CV)
        return loss_C - entropy(probs_CV), gradient_CV


def entropy(probs: Tensor) -> Tensor:
    """-sum_v p_v log p_v over the last dimension; 0 log 0 = 0."""
    return -torch.xlogy(probs, probs).sum(-1)


@dataclass(frozen=True, kw_only=True)
class ReverseKL(Loss):
    """sum_v q_v log(q_v / p_v), p raised to `floor` where it is smaller: without one, a token that the target never says costs infinitely much."""

    name: ClassVar[str] = "reverse_kl"
    floor: float = 1e-8

    def __post_init__(self) -> None:
        _check(self, "floor", 0 < self.floor < 1, "between 0 and 1")

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        log_q = _wide(logits).log_softmax(-1)
        return (log_q.exp() * (log_q - probs.clamp(min=self.floor).log())).sum(-1)


@dataclass(frozen=True, kw_only=True)
class JSD(Loss):
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q: the generalised Jensen-Shannon divergence."""

    name: ClassVar[str] = "jsd"
    beta: float = 0.5

    def __post_init__(self) -> None:
        _check(self, "beta", 0 < self.beta < 1, "between 0 and 1")

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        log_q = _wide(logits).log_softmax(-1)
        q, rest = log_q.exp(), 1 - self.beta
        log_m = torch.logaddexp((self.beta * probs).log(), log_q + math.log(rest))  # finite, unlike log(m), where both underflow
        return self.beta * (torch.xlogy(probs, probs) - probs * log_m).sum(-1) + rest * (q * (log_q - log_m)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class _Overlap(Loss):
    """A loss of the cross-entropy and the acceptance probability of a sampled draft token, acc = sum_v min(p_v, q_v) (2211.17192)."""

    @abstractmethod
    def of(self, ce: Tensor, log_acc: Tensor, entropy: Callable[[], Tensor]) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """(loss, its derivative by ce, its derivative by log acc), all [...]. entropy() is that of p."""

    def gradient(self, logits_CV: Tensor, probs_CV: Tensor) -> tuple[Tensor, Tensor]:
        log_q_CV = logits_CV.log_softmax(-1)
        ce_C = -torch.mul(probs_CV, log_q_CV, out=logits_CV).sum(-1)
        # In logarithms, as acc is a single q_v where p is one-hot, which may underflow.
        log_p_CV = probs_CV.log()
        least_CV = torch.minimum(log_p_CV, log_q_CV)
        log_acc_C = least_CV.logsumexp(-1)
        loss_C, by_ce, by_acc = self.of(ce_C, log_acc_C, lambda: entropy(probs_CV))
        # d log acc / dz = s - q sum(s), s_v = min(p_v, q_v) / acc where q_v < p_v (half of that where they are equal), else 0.
        share_CV = least_CV.sub_(log_acc_C.unsqueeze(-1)).exp_()
        share_CV.mul_(torch.sub(log_p_CV, log_q_CV, out=log_p_CV).sign_().add_(1).mul_(0.5))
        q_CV = torch.exp(log_q_CV, out=logits_CV)
        towards_acc_CV = share_CV.sub_(q_CV * share_CV.sum(-1, keepdim=True))
        gradient_CV = q_CV.sub_(probs_CV).mul_(_column(by_ce)).add_(towards_acc_CV.mul_(_column(by_acc)))
        return loss_C, gradient_CV


def _column(value: Tensor | float) -> Tensor | float:
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value


def acceptance(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_v min(p_v, q_v) over the last dimension: how often a sampled draft token is accepted."""
    return torch.minimum(probs, _wide(logits).softmax(-1)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class TotalVariation(_Overlap):
    """1/2 sum_v |p_v - q_v| = 1 - acc. It has no gradient where q is far off."""

    name: ClassVar[str] = "tv"

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        return (probs - _wide(logits).softmax(-1)).abs().sum(-1) / 2

    def of(self, ce: Tensor, log_acc: Tensor, entropy: Callable[[], Tensor]) -> tuple[Tensor, Tensor | float, Tensor | float]:
        acc = log_acc.exp()
        return 1 - acc, 0.0, -acc


@dataclass(frozen=True, kw_only=True)
class LKAlpha(_Overlap):
    """-log acc."""

    name: ClassVar[str] = "lk_alpha"

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        return -acceptance(logits, probs).log()

    def of(self, ce: Tensor, log_acc: Tensor, entropy: Callable[[], Tensor]) -> tuple[Tensor, Tensor | float, Tensor | float]:
        return -log_acc, 0.0, -1.0


@dataclass(frozen=True, kw_only=True)
class LKLambda(_Overlap):
    """w KL + (1 - w) (1 - acc) with w = exp(-decay acc) held constant: from the divergence to acceptance as that grows."""

    name: ClassVar[str] = "lk_lambda"
    decay: float = 3.0

    def __post_init__(self) -> None:
        _check(self, "decay", self.decay >= 0, "at least 0")

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        acc = acceptance(logits, probs)
        w = (-self.decay * acc.detach()).exp()
        return w * KL().plain(logits, probs) + (1 - w) * (1 - acc)

    def of(self, ce: Tensor, log_acc: Tensor, entropy: Callable[[], Tensor]) -> tuple[Tensor, Tensor | float, Tensor | float]:
        acc = log_acc.exp()
        w = (-self.decay * acc).exp()
        return w * (ce - entropy()) + (1 - w) * (1 - acc), w, (w - 1) * acc


@dataclass(frozen=True, kw_only=True)
class Mixed(_Overlap):
    """ce CE + tv TV."""

    name: ClassVar[str] = "mixed"
    ce: float = 0.1
    tv: float = 0.9

    def __post_init__(self) -> None:
        _check(self, "ce", self.ce >= 0, "at least 0")
        _check(self, "tv", self.tv >= 0, "at least 0")

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        return self.ce * soft_cross_entropy(logits, probs) + self.tv * TotalVariation().plain(logits, probs)

    def of(self, ce: Tensor, log_acc: Tensor, entropy: Callable[[], Tensor]) -> tuple[Tensor, Tensor | float, Tensor | float]:
        acc = log_acc.exp()
        return self.ce * ce + self.tv * (1 - acc), self.ce, -self.tv * acc


@dataclass(frozen=True, kw_only=True)
class TopKMass(Loss):
    """1 - sum_v p_v sigmoid((z_v - t) / temperature) + ce CE, t half-way between the k-th and the next largest logit.

    As the temperature falls, the first part becomes the probability that the target's token is none of the drafter's k best, which is what a node
    with those k children is rejected with. It is flat where q is far off: hence the cross-entropy.
    """

    name: ClassVar[str] = "topk_mass"
    k: int = 4
    temperature: float = 0.5
    ce: float = 0.1

    def __post_init__(self) -> None:
        _check(self, "k", self.k >= 1, "at least 1")
        _check(self, "temperature", self.temperature > 0, "more than 0")
        _check(self, "ce", self.ce >= 0, "at least 0")

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        z = _wide(logits)
        if z.shape[-1] <= self.k:
            missed = 1 - probs.sum(-1) + 0 * z.sum(-1)  # all are children
        else:
            border = z.topk(self.k + 1, dim=-1).values[..., -2:].mean(-1, keepdim=True)
            missed = 1 - (probs * ((z - border) / self.temperature).sigmoid()).sum(-1)
        return missed + self.ce * soft_cross_entropy(z, probs)


@dataclass(frozen=True, kw_only=True)
class Match(Loss):
    """-log of the probability that argmax(log p + g) = argmax(log q + g) under shared Gumbel noise g: sum_v 1 / sum_u max(p_u / p_v, q_u / q_v).

    v is both choices if g_u - g_v < min(log p_v / p_u, log q_v / q_u) for all other u. With the tokens sorted by p / q the inner sum is
    A_v / p_v + B_v / q_v, A_v = sum p_u over those with no smaller ratio than v, B_v = sum q_u over the others: V log V in place of V x V.
    """

    name: ClassVar[str] = "match"

    def plain(self, logits: Tensor, probs: Tensor) -> Tensor:
        q = _wide(logits).softmax(-1)
        ratios = torch.maximum(probs.unsqueeze(-2) / probs.unsqueeze(-1), q.unsqueeze(-2) / q.unsqueeze(-1))  # [..., v, u]
        return -(1 / ratios.sum(-1)).sum(-1).log()

    def gradient(self, logits_CV: Tensor, probs_CV: Tensor) -> tuple[Tensor, Tensor]:
        log_q_CV = logits_CV.log_softmax(-1)
        log_ratio_CV, order_CV = (probs_CV.log() - log_q_CV).sort(dim=-1, descending=True)
        log_q_CV = log_q_CV.gather(-1, order_CV)
        q_CV = log_q_CV.exp()
        a_CV = probs_CV.gather(-1, order_CV).cumsum(-1)
        b_CV = q_CV.flip(-1).cumsum(-1).flip(-1) - q_CV
        c_CV = 1 / (a_CV * (-log_ratio_CV).exp() + b_CV.clamp_(min=0))  # m_v / q_v <= 1, m_v being v's share of the match probability
        log_m_CV = log_q_CV + c_CV.log()  # in logarithms, as q may underflow
        log_match_C = log_m_CV.logsumexp(-1)
        share_c_CV = (log_m_CV - log_match_C.unsqueeze(-1)).exp() * c_CV
        earlier_CV = share_c_CV.cumsum(-1) - share_c_CV
        by_log_q_CV = share_c_CV * b_CV - q_CV * earlier_CV
        sorted_CV = q_CV * by_log_q_CV.sum(-1, keepdim=True) - by_log_q_CV
        return -log_match_C, torch.empty_like(sorted_CV).scatter_(-1, order_CV, sorted_CV)


LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (CrossEntropy, KL, ReverseKL, JSD, TotalVariation, LKAlpha, LKLambda, Mixed, TopKMass, Match)
}


def _check(loss: Loss, field: str, good: bool, wanted: str) -> None:
    if not good:
        raise UserError(f"loss {loss.name}: wanted {field} {wanted}, got {getattr(loss, field)}")


def make_loss(name: str, **settings: Any) -> Loss:
    """The loss of that name. Raises UserError if there is none, or for settings that it does not have."""
    if name not in LOSSES:
        raise UserError(f"objective.loss: wanted one of {', '.join(LOSSES)}, got {name}")
    known = [field.name for field in dataclasses.fields(LOSSES[name])]
    for setting in settings:
        if setting not in known:
            raise UserError(f"loss {name}: wanted settings among {', '.join(known) or 'none'}, got {setting}")
    return LOSSES[name](**settings)


class _Output:
    """Products with the output layer's weight [V, H] in autocast's dtype, or its own; in float32, some rows at a time, where that is faster."""

    def __init__(self, weight_VH: Tensor) -> None:
        device = weight_VH.device.type
        wanted = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VH.dtype
        self.dtype = fast_dtype(wanted, device)
        widened = self.dtype.itemsize > weight_VH.dtype.itemsize
        parts = row_parts(weight_VH) if widened else [weight_VH]
        self._parts = parts if len(parts) > 1 else [weight_VH.to(self.dtype)]
        self._sizes = [len(part) for part in self._parts]

    def logits(self, hidden_CH: Tensor, out_CV: Tensor) -> Tensor:
        """[C, V], written to out_CV."""
        for part_RH, part_CR in zip(self._parts, torch.split(out_CV, self._sizes, dim=1), strict=True):
            torch.mm(hidden_CH, part_RH.to(self.dtype).t(), out=part_CR)
        return out_CV

    def back(self, gradient_CV: Tensor) -> Tensor:
        """[C, H] gradient of the hidden states."""
        total = gradient_CV.new_zeros(len(gradient_CV), self._parts[0].shape[1])
        for part_RH, part_CR in zip(self._parts, torch.split(gradient_CV, self._sizes, dim=1), strict=True):
            total.addmm_(part_CR, part_RH.to(self.dtype))
        return total


def _in_place(loss: Loss, logits_CV: Tensor, probs_CV: Tensor) -> tuple[Tensor, Tensor]:
    """`loss.gradient`; on a CPU some tokens at a time, and the gradient in place of the logits."""
    if logits_CV.device.type != "cpu":
        return loss.gradient(logits_CV, probs_CV)
    rows = max(_CPU_CORE_TOKENS, _CPU_CORE_BYTES // (logits_CV.element_size() * logits_CV.shape[1]))
    losses = []
    for logits_RV, probs_RV in zip(torch.split(logits_CV, rows), torch.split(probs_CV, rows), strict=True):
        loss_R, gradient_RV = loss.gradient(logits_RV, probs_RV)
        if gradient_RV.data_ptr() != logits_RV.data_ptr():
            logits_RV.copy_(gradient_RV)
        losses.append(loss_R)
    return torch.cat(losses), logits_CV


class _ChunkedLoss(torch.autograd.Function):
    """sum of weights * loss; the gradients are formed chunk by chunk in the forward pass, and summed at least in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden_SNH: Tensor, weight_VH: Tensor, weights_SN: Tensor, probs: Callable[[int, int], Tensor], chunk: int, loss: Loss
    ) -> Tensor:
        """See `chunked_loss`."""
        output, (tokens, vocabulary) = _Output(weight_VH), (weights_SN.shape[1], weight_VH.shape[0])
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden_SNH) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=wide, device=hidden_SNH.device)
        if hidden_SNH.device.type == "cpu":
            chunk = min(chunk, max(_CPU_CHUNK_TOKENS, _CPU_CHUNK_BYTES // (4 * vocabulary)))
        buffer_CV = torch.empty(min(chunk, tokens), vocabulary, dtype=output.dtype, device=hidden_SNH.device)
        live = (weights_SN != 0).tolist()
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            steps = [step for step, row in enumerate(live) if any(row[start:stop])]
            target_CV = probs(start, stop).to(wide) if steps else weights_SN
            for step in steps:
                weight_C = weights_SN[step, start:stop].to(wide)
                hidden_CH = hidden_SNH[step, start:stop].to(output.dtype)
                dead = torch.tensor([n for n, kept in enumerate(live[step][start:stop]) if not kept], dtype=torch.int64, device=hidden_CH.device)
                hidden_CH = hidden_CH.index_fill(0, dead, 0) if len(dead) else hidden_CH  # whatever stands there, NaN too
                with torch.autocast(hidden_SNH.device.type, enabled=False):
                    loss_C, grad_CV = _in_place(loss, output.logits(hidden_CH, buffer_CV[: stop - start]).to(wide), target_CV)
                    if len(dead):
                        loss_C, grad_CV = loss_C.index_fill(0, dead, 0), grad_CV.index_fill_(0, dead, 0)
                    total += torch.dot(loss_C, weight_C)
                    grad_CV = grad_CV.to(output.dtype)
                    # A token's weight goes to the narrow side of each product.
                    if grad_hidden is not None:
                        grad_hidden[step, start:stop] = output.back(grad_CV).mul_(weight_C.unsqueeze(1))
                    weighed_CH = hidden_CH * weight_C.unsqueeze(1).to(output.dtype)
                    if grad_weight is not None and output.dtype == wide:
                        grad_weight.addmm_(grad_CV.t(), weighed_CH)
                    elif grad_weight is not None:
                        grad_weight += grad_CV.t() @ weighed_CH
        ctx.gradients = [grad_hidden, None if grad_weight is None else grad_weight.to(weight_VH.dtype)]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Hand out the stored gradients, scaled in place: once, so that they need no second copy."""
        if ctx.gradients is None:
            raise RuntimeError("chunked_loss: its gradients were handed out already; compute the loss again instead of retain_graph=True")
        hidden, weight = (None if gradient is None else gradient.mul_(grads[0]) for gradient in ctx.gradients)
        ctx.gradients = None
        return hidden, weight, None, None, None, None


def chunked_loss(
    name: str, hidden_SNH: Tensor, weight_VH: Tensor, weights_SN: Tensor, probs: Callable[[int, int], Tensor], chunk: int = 1024, **settings: Any
) -> Tensor:
    """Scalar sum over steps s and tokens n of weights[s, n] * loss(p[n], softmax(weight @ hidden[s, n])), for the loss of that name.

    probs(a, b) gives the target's distributions [b - a, V] (float32, rows sum to one) of tokens a .. b - 1, at most `chunk` of them; it is asked
    once a chunk, for all steps. Where weights[s, n] is 0, hidden[s, n] and p[n] are ignored. Raises UserError as `make_loss` does.
    """
    result: Tensor = _ChunkedLoss.apply(hidden_SNH, weight_VH, weights_SN, probs, chunk, make_loss(name, **settings))  # type: ignore[no-untyped-call]
    return result


def chunked_soft_cross_entropy(
    hidden_SNH: Tensor, weight_VH: Tensor, weights_SN: Tensor, probs: Callable[[int, int], Tensor], chunk: int = 1024
) -> Tensor:
    """`chunked_loss` of the cross-entropy."""
    return chunked_loss("ce", hidden_SNH, weight_VH, weights_SN, probs, chunk)
