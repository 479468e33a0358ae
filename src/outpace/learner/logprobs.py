"""Logprobs and entropies of target tokens without materializing all logits.

The output head is applied to one slice of tokens at a time, in forward and again in backward, so memory is bounded by
one slice of logits. Only trained positions get here.

Precision: matrix products in the dtype of the hidden states, everything from the logits on in at least float32. Logits
are divided by the sampling temperature, because tokens were drawn from that distribution. At temperature 0 the sampler
records logprobs of the softmax at temperature 1, and so does this module.

Legend: _N target tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_PER_SLICE = 1 << 24
"""Logits in memory at once: 64 MiB in float32."""


def token_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target and the entropy of its distribution, the latter without gradient unless
    `entropy_gradient`."""
    scale = _logit_scale(temperature)
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, bias_V, targets_N, scale, entropy_gradient
    )
    return results


def logprobs_from_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, from logits: for models whose logits are not just head times hidden state."""
    log_probs_NV = (_at_least_float32(logits_NV) * _logit_scale(temperature)).log_softmax(-1)
    measured_NV = log_probs_NV if entropy_gradient else log_probs_NV.detach()
    entropy_N = -(measured_NV.exp() * measured_NV).sum(-1)
    return log_probs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


def _at_least_float32(values: Tensor) -> Tensor:
    """Cast to at least float32."""
    return values if values.dtype == torch.float64 else values.float()


def _logit_scale(temperature: float) -> float:
    return 1.0 / temperature if temperature > 0 else 1.0


def _slices(count: int, vocabulary: int) -> list[slice]:
    size = max(1, LOGITS_PER_SLICE // vocabulary)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled_logits(hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None, scale: float) -> Tensor:
    logits_NV = _at_least_float32(hidden_ND @ head_VD.t())
    if bias_V is not None:
        logits_NV = logits_NV + _at_least_float32(bias_V)
    return logits_NV.mul_(scale)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        scale: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, head_VD, bias_V, targets_N)
        ctx.scale = scale
        ctx.entropy_gradient = entropy_gradient
        logp_N = _at_least_float32(hidden_ND.new_empty(len(targets_N)))
        entropy_N = torch.empty_like(logp_N)
        for part in _slices(len(targets_N), len(head_VD)):
            logits = _scaled_logits(hidden_ND[part], head_VD.to(hidden_ND.dtype), bias_V, scale)
            log_total = logits.logsumexp(-1)
            logp_N[part] = logits.gather(-1, targets_N[part, None]).squeeze(-1) - log_total
            probs = (logits - log_total[:, None]).exp_()
            entropy_N[part] = log_total - (probs.mul_(logits)).sum(-1)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        hidden_ND, head_VD, bias_V, targets_N = ctx.saved_tensors
        head = head_VD.to(hidden_ND.dtype)
        grad_hidden = torch.empty_like(hidden_ND)
        _, trains_head, trains_bias, *_ = ctx.needs_input_grad
        grad_head = torch.zeros_like(head_VD) if trains_head else None
        grad_bias = torch.zeros_like(bias_V) if trains_bias else None
        for part in _slices(len(targets_N), len(head)):
            logits = _scaled_logits(hidden_ND[part], head, bias_V, ctx.scale)
            grad_entropy = _entropy_gradient(logits, grad_entropy_N[part]) if ctx.entropy_gradient else None
            # d logp / d logits = scale * (onehot - softmax)
            grad_logits = logits.softmax(-1).neg_()
            grad_logits.scatter_add_(-1, targets_N[part, None], torch.ones_like(grad_logits[:, :1]))
            grad_logits.mul_((grad_N[part] * ctx.scale)[:, None])
            if grad_entropy is not None:
                grad_logits.add_(grad_entropy, alpha=ctx.scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0).to(grad_bias.dtype)
            grad_logits = grad_logits.to(hidden_ND.dtype)
            grad_hidden[part] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.t() @ hidden_ND[part]
        return grad_hidden, grad_head, grad_bias, None, None, None


def _entropy_gradient(logits_NV: Tensor, grad_N: Tensor) -> Tensor:
    """Return the incoming gradient times d entropy / d logits = -softmax * (log softmax + entropy)."""
    log_probs_NV = logits_NV.log_softmax(-1)
    probs_NV = log_probs_NV.exp()
    entropy_N = -(probs_NV * log_probs_NV).sum(-1)
    return -probs_NV * (log_probs_NV + entropy_N[:, None]) * grad_N[:, None]
