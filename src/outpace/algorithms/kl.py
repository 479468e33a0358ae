"""MERGED"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from outpace.algorithms.tokens import LOG_RATIO_BOUND, bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "unbiased"]

K3_BOUND = 10.0


def penalty(estimator: Estimator, logp_N: Tensor, reference_logp_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    """Return the KL estimate per token, with gradient. `log_ratio_N` is log(current / sampler), with gradient; only
    `unbiased` uses it."""
    distance_N = (logp_N - reference_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return distance_N
    if estimator == "k2":
        return distance_N.square() / 2
    k3_N = ((-distance_N).expm1() + distance_N).clamp(max=K3_BOUND)
    return k3_N if estimator == "k3" else _weighted(k3_N, distance_N, bounded_exp(log_ratio_N), logp_N)


def _weighted(k3_N: Tensor, distance_N: Tensor, weight_N: Tensor, logp_N: Tensor) -> Tensor:
    """Return w k3 with its gradient w d set explicitly. Inside the k3 bound it is exact; beyond, it still pulls towards
    the reference, whereas autograd through w alone would push away from it."""
    gradient_N = (weight_N * distance_N).detach()
    return (weight_N * k3_N).detach() + gradient_N * (logp_N - logp_N.detach())
