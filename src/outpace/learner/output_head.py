"""Logprobs and entropies of trained tokens from hidden states, without keeping the logits.

The output head is applied to one slice of tokens at a time, in forward and again in backward, so memory is bounded by
one slice of logits. On a GPU the work on a slice is compiled: a few kernels read and write its logits, instead of a
dozen.

Precision: matrix products in the dtype of the hidden states, everything from the logits on in at least float32. Logits
are divided by the sampling temperature, because tokens were drawn from that distribution. At temperature 0 the sampler
records logprobs of the softmax at temperature 1, and so does this module.

Legend: _N target tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_PER_SLICE = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits in memory at once: 64 MiB in float32 on a CPU, larger matrix products on a GPU. `outpace.hardware.memory`
has the same values and must be kept in sync."""


def token_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target and the entropy of its distribution. The entropy has a gradient only with
    `entropy_gradient`."""
    scale = _logit_scale(temperature)
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, bias_V, targets_N, scale, entropy_gradient, compiled
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


def _slices(count: int, vocabulary: int, device: torch.device) -> list[slice]:
    size = max(1, LOGITS_PER_SLICE.get(device.type, 1 << 24) // vocabulary)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


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
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        head = head_VD.to(hidden_ND.dtype)
        logp_N = _at_least_float32(hidden_ND.new_empty(len(targets_N)))
        entropy_N, log_total_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
        evaluate = _compiled(_evaluate_slice) if compiled else _evaluate_slice
        for part in _slices(len(targets_N), len(head_VD), head.device):
            logits = hidden_ND[part] @ head.t()
            logp_N[part], entropy_N[part], log_total_N[part] = evaluate(logits, bias_V, targets_N[part], scale)
        ctx.save_for_backward(hidden_ND, head_VD, bias_V, targets_N, log_total_N, entropy_N)
        ctx.settings = scale, entropy_gradient, compiled
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None]:
        hidden_ND, head_VD, bias_V, targets_N, log_total_N, entropy_N = ctx.saved_tensors
        scale, entropy_gradient, compiled = ctx.settings
        head = head_VD.to(hidden_ND.dtype)
        grad_hidden = torch.empty_like(hidden_ND)
        _, trains_head, trains_bias, *_ = ctx.needs_input_grad
        grad_head = torch.zeros_like(head_VD, dtype=logits_dtype(head_VD)) if trains_head else None
        grad_bias = torch.zeros_like(bias_V) if trains_bias else None
        differentiate = _compiled(_differentiate_slice) if compiled else _differentiate_slice
        for part in _slices(len(targets_N), len(head), head.device):
            logits = hidden_ND[part] @ head.t()
            of_entropy = (grad_entropy_N[part], entropy_N[part]) if entropy_gradient else None
            grad_logits = differentiate(
                logits, bias_V, targets_N[part], scale, log_total_N[part], grad_N[part], of_entropy
            )
            grad_logits.scatter_add_(-1, targets_N[part, None], (scale * grad_N[part, None]).to(grad_logits.dtype))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0).to(grad_bias.dtype)
            grad_logits = grad_logits.to(hidden_ND.dtype)
            grad_hidden[part] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.t() @ hidden_ND[part]
        grad_head = None if grad_head is None else grad_head.to(head_VD.dtype)
        return grad_hidden, grad_head, grad_bias, None, None, None, None


def logits_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype that logits and sums over slices are computed in."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _evaluate_slice(
    logits: Tensor, bias_V: Tensor | None, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs, entropies and the logarithms of the partition functions."""
    logits = _scaled(logits, bias_V, scale)
    log_total = logits.logsumexp(-1)
    probs = (logits - log_total[:, None]).exp_()
    entropy = log_total - probs.mul_(logits).sum(-1)
    return logits.gather(-1, targets[:, None]).squeeze(-1) - log_total, entropy, log_total


def _differentiate_slice(
    logits: Tensor,
    bias_V: Tensor | None,
    targets: Tensor,
    scale: float,
    log_total: Tensor,
    grad: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the gradient with respect to the unscaled logits, without the `onehot` term:

    d logp / d logits = scale * (onehot - softmax)
    d entropy / d logits = -scale * softmax * (log softmax + entropy)"""
    log_probs = _scaled(logits, bias_V, scale).sub_(log_total[:, None])
    if of_entropy is None:
        return log_probs.exp_().mul_(-scale * grad[:, None])
    grad_entropy, entropy = of_entropy
    probs = log_probs.exp()
    return probs.mul_(log_probs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None]).mul_(-scale))


def _scaled(logits: Tensor, bias_V: Tensor | None, scale: float) -> Tensor:
    logits = _at_least_float32(logits)
    if bias_V is not None:
        logits = logits + _at_least_float32(bias_V)
    return logits.mul_(scale)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
