"""MERGED"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from outpace.algorithms.tokens import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from torch import Tensor

RATIO_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""Edges of the ratio histogram; an edge belongs to the bin above it."""

RATIO_BINS = (
    f"ratio_below_{RATIO_EDGES[0]:g}",
    *(f"ratio_{low:g}_{high:g}" for low, high in pairwise(RATIO_EDGES)),
    f"ratio_above_{RATIO_EDGES[-1]:g}",
)
"""Names of the sums that count the tokens per bin."""


def staleness_sums(
    logp_N: Tensor,
    sampler_logp_N: Tensor,
    advantages_N: Tensor,
    coefficient_N: Tensor,
    keep_N: Tensor,
    fresh_N: Tensor,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return sums and maxima over the tokens of one pass, with a single device-to-host transfer.

    `coefficient_N` is d(policy loss) / d log pi per token before aggregation. `keep_N` marks tokens that no mask
    rejected. `fresh_N` marks tokens sampled by the version being trained; their mismatch is due to the engine alone.

    - weight, weight_sq: of w = current / sampler, for `effective_sample_size`
    - kl, kl_fresh: k3 estimate of KL(sampler || current), never negative
    - tokens_fresh, tokens_positive, tokens_negative: token counts; positive and negative by the sign of the advantage
    - masked, masked_positive, masked_negative: rejected tokens
    - clipped_positive, clipped_negative: kept tokens with a non-zero advantage but no gradient in its direction
    - `RATIO_BINS`: histogram of w
    - maximum: ratio, the largest w
    """
    log_ratio_N = (logp_N.detach().double() - sampler_logp_N.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weights_N = log_ratio_N.exp()
    kl_N = log_ratio_N.expm1() - log_ratio_N
    positive_N, negative_N = advantages_N > 0, advantages_N < 0
    clipped_N = keep_N & (coefficient_N * advantages_N >= 0)
    terms = {
        "weight": weights_N,
        "weight_sq": weights_N.square(),
        "kl": kl_N,
        "kl_fresh": kl_N * fresh_N,
        "tokens_fresh": fresh_N,
        "tokens_positive": positive_N,
        "tokens_negative": negative_N,
        "masked": ~keep_N,
        "masked_positive": ~keep_N & positive_N,
        "masked_negative": ~keep_N & negative_N,
        "clipped_positive": clipped_N & positive_N,
        "clipped_negative": clipped_N & negative_N,
        **_ratio_bins(weights_N),
    }
    largest = weights_N.max() if weights_N.numel() else weights_N.new_zeros(())
    *sums, ratio = _fetch([*(values_N.sum() for values_N in terms.values()), largest], weights_N)
    return dict(zip(terms, sums, strict=True)), {"ratio": ratio}


def effective_sample_size(sums: Mapping[str, float], tokens: int) -> float:
    """Return the normalized effective sample size, (sum w)^2 / (N sum w^2): 1 if all weights are equal."""
    weight_sq = sums.get("weight_sq", 0.0)
    return sums.get("weight", 0.0) ** 2 / (tokens * weight_sq) if tokens and weight_sq > 0 else 1.0


def _ratio_bins(weights_N: Tensor) -> dict[str, Tensor]:
    """Return which tokens are in each bin. Every token is in exactly one."""
    above = [weights_N >= edge for edge in RATIO_EDGES]
    inner = [low & ~high for low, high in pairwise(above)]
    return dict(zip(RATIO_BINS, [~above[0], *inner, above[-1]], strict=True))


def _fetch(scalars: list[Tensor], like: Tensor) -> list[float]:
    """Copy all scalars to the host in one transfer."""
    gathered = like.new_zeros(len(scalars))
    for index, scalar in enumerate(scalars):
        gathered[index] = scalar
    return [float(number) for number in gathered.tolist()]
