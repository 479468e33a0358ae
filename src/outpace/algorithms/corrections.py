"""Off-policy corrections: importance weights and masks, and the statistics of off-policyness.

    rho = old / sampler (current / sampler if the policy loss has no ratio), always without gradient

A weight multiplies the loss of a token. A mask rejects tokens or whole sequences by multiplying their loss by 0.
Denominators still count all tokens, so rejecting some does not amplify the others. Bounds are inclusive (except the
limit of m2po) and compared as logarithms in float64, so rounding does not decide what is rejected.

Each mask is one function. Its keyword-only arguments and those of `correction_weights` are settings of `[correction]`.
Bounds of masks always keep on-policy tokens, whose ratio is 1. Statistics are sums or maxima over tokens, and therefore
independent of how a batch is split.

Legend: _N one entry per trained token, _S one per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outpace.algorithms.losses import LOG_RATIO_BOUND, Tokens, bounded_exp
from outpace.algorithms.registry import ConfiguredFunction, MaskRegistration, mask
from outpace.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor


WeightLevel = Literal["none", "token", "sequence"]

WeightCap = Annotated[
    float,
    Field(ge=0, description="Upper truncation of the weight. 0 disables it, which needs algorithm.allow_unbounded or a "
    "mask if pacing.max_lag is above 1."),
]  # fmt: skip
WeightFloor = Annotated[float, Field(ge=0, description="Lower truncation of the weight.")]
LowRatio = Annotated[float, Field(ge=0, le=1, description="Smallest ratio kept; of a sequence, see the mask.")]
HighRatio = Annotated[float, Field(ge=1, description="Largest ratio kept; of a sequence, see the mask.")]
VetoBelow = Annotated[float, Field(gt=0, le=1, description="Reject sequences in which any ratio is below this.")]
OpsmDelta = Annotated[
    float,
    Field(ge=0, description="Reject sequences with a negative advantage whose mean log(sampler / current) exceeds it."),
]
M2poLimit = Annotated[
    float,
    Field(gt=0, description="Reject the tokens with the largest squared log-ratios of the batch until the mean of the "
    "rest is below this."),
]  # fmt: skip
"""Types of the settings of weights and masks, with limits and help text."""

MAX_LOG_RATIO = 1e6
"""Log-ratios are clamped to this, far beyond every bound, so that sums over infinite log-ratios stay finite."""


def correction_weights(
    tokens: Tokens, log_rho_N: Tensor, level: WeightLevel, *, cap: WeightCap = 2.0, floor: WeightFloor = 0.0
) -> Tensor:
    """Return rho per token, or its product over the sequence, truncated to [floor, cap]; 1 at level `none`. A cap of 0
    means no cap."""
    if level == "none":
        return log_rho_N.new_ones(log_rho_N.shape)
    clamped_N = _clamped(log_rho_N)
    if level == "sequence":
        clamped_N = tokens.per_token(tokens.sum_by_sequence(clamped_N))
    return bounded_exp(clamped_N).clamp(min=floor, max=cap or None).to(log_rho_N.dtype)


def keep_mask(tokens: Tokens, log_rho_N: Tensor, masks: Iterable[ConfiguredFunction[MaskRegistration]]) -> Tensor:
    """Return which tokens all masks keep. Batch masks are not allowed here. A mask may be user code."""
    kept_N = log_rho_N.new_ones(log_rho_N.shape).bool()
    for keep in masks:
        by_mask_N = keep(tokens, log_rho_N)
        if getattr(by_mask_N, "shape", None) != kept_N.shape:
            name = keep.registration.name
            raise BadInput(f"correction.masks: {name} must return a tensor that is true for every token to keep")
        kept_N = kept_N & by_mask_N.bool()
    return kept_N


@mask
def token(tokens: Tokens, log_rho_N: Tensor, *, token_low: LowRatio = 0.5, token_high: HighRatio = 5.0) -> Tensor:
    """Keep tokens whose ratio is within bounds."""
    return _within(_clamped(log_rho_N), token_low, token_high)


@mask(scope="sequence")
def sequence(
    tokens: Tokens, log_rho_N: Tensor, *, sequence_low: LowRatio = 0.5, sequence_high: HighRatio = 2.0
) -> Tensor:
    """Keep sequences whose product of ratios is within bounds. The longer the sequence, the less likely that is."""
    return tokens.per_token(_within(tokens.sum_by_sequence(_clamped(log_rho_N)), sequence_low, sequence_high))


@mask(scope="sequence")
def geometric(
    tokens: Tokens, log_rho_N: Tensor, *, geometric_low: LowRatio = 0.99, geometric_high: HighRatio = 1.01
) -> Tensor:
    """Keep sequences whose geometric mean of ratios is within bounds, equally strict at every length."""
    return tokens.per_token(_within(tokens.mean_by_sequence(_clamped(log_rho_N)), geometric_low, geometric_high))


@mask(scope="sequence")
def veto(tokens: Tokens, log_rho_N: Tensor, *, veto_below: VetoBelow = 1e-4) -> Tensor:
    """Reject sequences with any ratio below the bound: one token that is near-impossible under the old policy."""
    impossible_N = _clamped(log_rho_N) < _log(veto_below)
    return tokens.per_token(tokens.sum_by_sequence(impossible_N.double()) == 0)


@mask(scope="sequence")
def opsm(tokens: Tokens, log_rho_N: Tensor, *, opsm_delta: OpsmDelta = 0.1) -> Tensor:
    """Off-policy sequence masking: reject tokens with A < 0 in sequences where mean log(sampler / current) exceeds the
    bound, i.e. that the current policy has already moved away from. The advantage counts per token.

    Always compares the current policy with the sampler, independent of `log_rho_N`."""
    drift_N = _clamped(tokens.sampler_logp_N) - _clamped(tokens.logp_N.detach())
    far_S = tokens.mean_by_sequence(drift_N) > opsm_delta
    return ~(tokens.per_token(far_S) & (tokens.advantages_N < 0))


@mask(scope="batch")
def m2po(log_rho_N: NDArray[np.floating[Any]], *, m2po_limit: M2poLimit = 0.04) -> NDArray[np.bool_]:
    """Reject the largest squared log-ratios in the batch until the mean of the rest is below the limit.

    Equal values are kept or rejected together, so token order does not matter. At least one token is kept: if even
    the smallest value is not below the limit, all tokens with that value are."""
    squared_N = np.square(np.clip(np.asarray(log_rho_N, dtype=np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if squared_N.size == 0:
        return np.ones(0, dtype=np.bool_)
    ascending = np.sort(squared_N)
    means = np.cumsum(ascending) / np.arange(1, ascending.size + 1)
    below = int(np.searchsorted(means >= m2po_limit, True))  # running means of sorted values never decrease
    if below == ascending.size:
        return np.ones(squared_N.shape, dtype=np.bool_)
    kept_N: NDArray[np.bool_] = squared_N < ascending[below]
    return kept_N if kept_N.any() else squared_N == ascending[0]


def _clamped(values_N: Tensor) -> Tensor:
    return values_N.detach().double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio >= _log(low)) & (log_ratio <= _log(high))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


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
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sums and maxima over the tokens of one pass, on the device.

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
    return {name: values_N.sum() for name, values_N in terms.items()}, {"ratio": largest}


def effective_sample_size(sums: Mapping[str, float], tokens: int) -> float:
    """Return the normalized effective sample size, (sum w)^2 / (N sum w^2): 1 if all weights are equal."""
    weight_sq = sums.get("weight_sq", 0.0)
    return sums.get("weight", 0.0) ** 2 / (tokens * weight_sq) if tokens and weight_sq > 0 else 1.0


def _ratio_bins(weights_N: Tensor) -> dict[str, Tensor]:
    """Return which tokens are in each bin. Every token is in exactly one."""
    above = [weights_N >= edge for edge in RATIO_EDGES]
    inner = [low & ~high for low, high in pairwise(above)]
    return dict(zip(RATIO_BINS, [~above[0], *inner, above[-1]], strict=True))
