"""The policy loss, per trained token, and what it tells about staleness.

REINFORCE with truncated importance weights, anchored on the rollout: every token keeps the logprob it was sampled with
(mu), so the weight w = pi / mu corrects for everything that lies between sampler and learner at once (lag, kernels,
rounding). No second policy, no second clip, no extra forward pass.

Losses are sums to be: nothing here divides by a token count. The step divides once, by the count of the whole batch,
which makes the gradient independent of chunking and packing.

Legend: _N one entry per trained token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios beyond this are clamped before `exp`: e^20 is far above any cap, and its square still fits a float32."""


def importance_weights(logp_N: Tensor, sampler_logp_N: Tensor) -> Tensor:
    """w = pi / mu, without gradient."""
    log_ratio_N = (logp_N.detach() - sampler_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio_N.exp()


def truncated_importance(logp_N: Tensor, sampler_logp_N: Tensor, advantages_N: Tensor, cap: float) -> Tensor:
    """-sg(min(w, cap)) * A * log pi. The gradient flows through log pi alone."""
    weights_N = importance_weights(logp_N, sampler_logp_N).clamp(max=cap)
    return -weights_N * advantages_N * logp_N


def mismatch(logp_N: Tensor, sampler_logp_N: Tensor, cap: float) -> tuple[dict[str, float], float]:
    """Sums over tokens that say how far the policy has moved from the sampler, and the largest weight seen.

    `weight` and `weight_sq` make the effective sample size (sum w)^2 / (N sum w^2); `kl` is the k3 estimate of
    KL(mu || pi), never negative; `truncated` counts the weights above the cap.
    """
    weights_N = importance_weights(logp_N, sampler_logp_N).double()
    if weights_N.numel() == 0:
        return {"weight": 0.0, "weight_sq": 0.0, "kl": 0.0, "truncated": 0.0}, 0.0
    sums = torch.stack(
        [
            weights_N.sum(),
            weights_N.square().sum(),
            (weights_N - 1 - weights_N.log()).sum(),
            (weights_N > cap).sum().double(),
            weights_N.max(),
        ]
    ).tolist()  # one transfer from the device, not five
    return dict(zip(("weight", "weight_sq", "kl", "truncated"), sums[:4], strict=True)), sums[4]


def effective_sample_size(sums: Mapping[str, float], tokens: int) -> float:
    """The share of the tokens that the weighted batch is worth: 1 when all weights are equal."""
    weight_sq = sums.get("weight_sq", 0.0)
    return sums.get("weight", 0.0) ** 2 / (tokens * weight_sq) if tokens and weight_sq > 0 else 1.0
