"""Logprobs of chosen tokens without ever holding all their logits.

The head is applied to a slice of the tokens at a time, forward and again in backward: memory is one slice of logits,
whatever the batch. Only positions that are trained reach this module.

Arithmetic: matrix products in the dtype of the hidden states, everything from the logits on in float32 at least.
Logits are divided by the sampling temperature, because that is the distribution the tokens were drawn from; at
temperature 0 the sampler records the logprobs of the softmax at 1, and so does this.

Legend: _N chosen tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_PER_SLICE = 1 << 24
"""Logits held at once: 64 MiB in float32."""


def chosen_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target, and the entropy of its distribution (the latter without gradient unless asked for)."""
    scale = sampling_scale(temperature)
    results: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, bias_V, targets_N, scale, entropy_gradient
    )
    return results


def logprobs_of_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """The same by the plain formula, for models whose logits are not simply head times hidden state."""
    log_probs_NV = (wide(logits_NV) * sampling_scale(temperature)).log_softmax(-1)
    measured_NV = log_probs_NV if entropy_gradient else log_probs_NV.detach()
    entropy_N = -(measured_NV.exp() * measured_NV).sum(-1)
    return log_probs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


def wide(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


def sampling_scale(temperature: float) -> float:
    return 1.0 / temperature if temperature > 0 else 1.0


def _slices(count: int, vocabulary: int) -> list[slice]:
    size = max(1, LOGITS_PER_SLICE // vocabulary)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled_logits(hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None, scale: float) -> Tensor:
    logits_NV = wide(hidden_ND @ head_VD.t())
    if bias_V is not None:
        logits_NV = logits_NV + wide(bias_V)
    return logits_NV.mul_(scale)


class _ChosenLogprobs(torch.autograd.Function):
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
        logp_N = wide(hidden_ND.new_empty(len(targets_N)))
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
            surprise = _entropy_part(logits, grad_entropy_N[part]) if ctx.entropy_gradient else None
            # d logp / d logits = scale * (onehot - softmax)
            grad_logits = logits.softmax(-1).neg_()
            grad_logits.scatter_add_(-1, targets_N[part, None], torch.ones_like(grad_logits[:, :1]))
            grad_logits.mul_((grad_N[part] * ctx.scale)[:, None])
            if surprise is not None:
                grad_logits.add_(surprise, alpha=ctx.scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0).to(grad_bias.dtype)
            grad_logits = grad_logits.to(hidden_ND.dtype)
            grad_hidden[part] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.t() @ hidden_ND[part]
        return grad_hidden, grad_head, grad_bias, None, None, None


def _entropy_part(logits_NV: Tensor, grad_N: Tensor) -> Tensor:
    """d entropy / d logits = -softmax * (log softmax + entropy), times the gradient that arrives."""
    log_probs_NV = logits_NV.log_softmax(-1)
    probs_NV = log_probs_NV.exp()
    entropy_N = -(probs_NV * log_probs_NV).sum(-1)
    return -probs_NV * (log_probs_NV + entropy_N[:, None]) * grad_N[:, None]
