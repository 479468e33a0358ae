"""Reference policy losses on padded [S, T] tensors, for autograd. Unbounded, so log-ratios must be moderate.

Suffix _S_T: one entry per position of each sequence, real or padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.reference import Pass


@dataclass
class Dense:
    logp_S_T: Tensor
    old_S_T: Tensor
    sampler_S_T: Tensor
    advantages_S_T: Tensor
    real_S_T: Tensor

    @property
    def log_r(self) -> Tensor:
        return (self.logp_S_T - self.old_S_T) * self.real_S_T

    @property
    def r(self) -> Tensor:
        return torch.exp(self.log_r)

    def mean(self, values_S_T: Tensor) -> Tensor:
        """Return the mean over each sequence, as a column."""
        count = self.real_S_T.sum(1, keepdim=True).clamp(min=1)
        return (values_S_T * self.real_S_T).sum(1, keepdim=True) / count


def pad(sequences: Pass) -> Dense:
    longest = max((len(sequence) for sequence in sequences), default=0)
    table = torch.zeros(len(sequences), longest, 5, dtype=torch.float64)
    for i, sequence in enumerate(sequences):
        for t, token in enumerate(sequence):
            table[i, t] = torch.tensor([*token, 1.0], dtype=torch.float64)
    columns = [column.clone() for column in table.unbind(2)]
    columns[0].requires_grad_()
    return Dense(*columns)


def reinforce(x: Dense) -> Tensor:
    return -x.advantages_S_T * x.logp_S_T


def truncated_is(x: Dense, cap: float) -> Tensor:
    return -torch.clamp(x.r, max=cap).detach() * x.advantages_S_T * x.logp_S_T


cispo = truncated_is


def importance(x: Dense) -> Tensor:
    return -x.r * x.advantages_S_T


def _clip(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-r * advantages, -torch.clamp(r, 1 - low, 1 + high) * advantages)


def ppo(x: Dense, clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    loss = _clip(x.r, x.advantages_S_T, clip_low, clip_high)
    if dual_clip is None:
        return loss
    return torch.where(x.advantages_S_T < 0, torch.minimum(loss, -dual_clip * x.advantages_S_T), loss)


def gspo(x: Dense, clip_low: float, clip_high: float) -> Tensor:
    """Token form: the value of the sequence ratio times pi / stop_gradient(pi)."""
    ratio = torch.exp(x.mean(x.log_r)).detach() * torch.exp(x.logp_S_T - x.logp_S_T.detach())
    return _clip(ratio, x.advantages_S_T, clip_low, clip_high)


def _gmpo_logs(x: Dense, low: float, high: float) -> Tensor:
    clipped = torch.clamp(x.log_r, -low, high)
    return torch.where(x.advantages_S_T > 0, torch.minimum(x.log_r, clipped), torch.maximum(x.log_r, clipped))


def gmpo(x: Dense, clip_low: float, clip_high: float) -> Tensor:
    logs = _gmpo_logs(x, clip_low, clip_high)
    return -torch.exp(x.mean(logs)).detach() * torch.exp(logs - logs.detach()) * x.advantages_S_T


def gspo_of_sequences(x: Dense, clip_low: float, clip_high: float) -> Tensor:
    """Return the loss of each whole sequence, which has one advantage."""
    return _clip(torch.exp(x.mean(x.log_r)), x.advantages_S_T[:, :1], clip_low, clip_high)


def gmpo_of_sequences(x: Dense, clip_low: float, clip_high: float) -> Tensor:
    return -torch.exp(x.mean(_gmpo_logs(x, clip_low, clip_high))) * x.advantages_S_T[:, :1]


def sapo(x: Dense, tau_positive: float, tau_negative: float) -> Tensor:
    tau = tau_negative + (tau_positive - tau_negative) * (x.advantages_S_T > 0).double()
    return -4 / tau / (1 + torch.exp(-tau * (x.r - 1))) * x.advantages_S_T


def vespo(x: Dense) -> Tensor:
    weight = torch.exp(x.log_r.sum(1, keepdim=True)).detach()
    positive = torch.e**3 * weight**2 * torch.exp(-3 * weight)
    negative = torch.e**2 * weight**3 * torch.exp(-2 * weight)
    return -torch.where(x.advantages_S_T >= 0, positive, negative) * x.advantages_S_T * x.logp_S_T


def dppo(x: Dense, divergence: str, trust_low: float, trust_high: float, ratio_penalty: float) -> Tensor:
    p, q = torch.exp(x.logp_S_T.detach()), torch.exp(x.sampler_S_T)
    distance = (p - q).abs() if divergence == "tv" else q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    drop = torch.where(x.advantages_S_T > 0, (p > q) & (distance > trust_high), (p < q) & (distance > trust_low))
    return torch.where(drop, 0.0, -x.r * x.advantages_S_T) + ratio_penalty * x.log_r**2


POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (reinforce, truncated_is, importance, ppo, gspo, gmpo, sapo, vespo, dppo)
} | {"cispo": cispo}


# Corrections: factors on the loss, [S, T].


def log_rho(x: Dense) -> Tensor:
    return (x.old_S_T - x.sampler_S_T) * x.real_S_T


def weights(x: Dense, level: str, floor: float, cap: float | None) -> Tensor:
    if level == "none":
        return torch.ones_like(x.real_S_T)
    logs = log_rho(x) if level == "token" else log_rho(x).sum(1, keepdim=True).expand_as(x.real_S_T)
    return torch.clamp(torch.exp(logs), floor, cap)


def _between(values: Tensor, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)


MASKS: dict[str, Callable[..., Tensor]] = {
    "token": lambda x, token_low, token_high: _between(log_rho(x).exp(), token_low, token_high),
    "sequence": lambda x, sequence_low, sequence_high: _between(
        log_rho(x).exp().prod(1, keepdim=True), sequence_low, sequence_high
    ),
    "geometric": lambda x, geometric_low, geometric_high: _between(
        x.mean(log_rho(x)).exp(), geometric_low, geometric_high
    ),
    "veto": lambda x, veto_below: (log_rho(x).exp() >= veto_below).all(1, keepdim=True),
    "opsm": lambda x, opsm_delta: (
        ~((x.mean(x.sampler_S_T - x.logp_S_T.detach()) > opsm_delta) & (x.advantages_S_T < 0))
    ),
}


def flatten(values_S_T: Tensor, x: Dense) -> Tensor:
    """Return the entries that are not padding, concatenated."""
    return values_S_T[x.real_S_T.bool()]


def gradient(total: Tensor, x: Dense) -> Tensor:
    if not x.logp_S_T.numel():
        return torch.zeros(0, dtype=torch.float64)
    (grad,) = torch.autograd.grad(total, x.logp_S_T)
    return flatten(grad, x)
