"""The divergence of the current policy from a reference, estimated at the sampled tokens.

    d = log(current / reference)        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

All three estimate the same number, KL(current || reference), when the current policy sampled; they differ as losses:

- k1: its gradient, d log pi, has expectation zero: it adds noise and pulls nowhere. Use it in the reward, where it is
  unbiased.
- k2: its gradient has the expectation of the divergence's own gradient.
- k3: never negative and of low variance; its gradient is that of KL(reference || current).
- unbiased: k3 weighted by current / sampler, with the gradient through both: value and gradient are those of
  KL(current || reference) whoever sampled, lag included.

Bounds: d is clamped at 20 on both sides, and k3 at 10 (d below about -2.6, or above 11). Inside, value and gradient are
exact; outside, the value stays at the bound. A token beyond the bound of k3 pulls no more: its gradient grows like
exp(-d), so a single token could rule the step. That of unbiased is w d, which does not, and goes on.

Legend: _N one entry per trained token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from outpace.algorithms.tokens import LOG_RATIO_BOUND, bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "unbiased"]

K3_BOUND = 10.0


def penalty(estimator: Estimator, logp_N: Tensor, reference_logp_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    """The estimate per token, with gradient. `log_ratio_N` is log(current / sampler), with gradient; only `unbiased`
    looks at it."""
    distance_N = (logp_N - reference_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return distance_N
    if estimator == "k2":
        return distance_N.square() / 2
    k3_N = ((-distance_N).expm1() + distance_N).clamp(max=K3_BOUND)
    return k3_N if estimator == "k3" else _weighted(k3_N, distance_N, bounded_exp(log_ratio_N), logp_N)


def _weighted(k3_N: Tensor, distance_N: Tensor, weight_N: Tensor, logp_N: Tensor) -> Tensor:
    """w k3, with its gradient w d put in by hand: exact inside the bound of k3, and beyond it still a pull towards the
    reference, where the gradient through w alone would push away from it."""
    gradient_N = (weight_N * distance_N).detach()
    return (weight_N * k3_N).detach() + gradient_N * (logp_N - logp_N.detach())
