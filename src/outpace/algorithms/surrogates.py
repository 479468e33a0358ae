"""The policy loss of each trained token: what is minimised before corrections, KL and aggregation.

    r = current / anchor        w = current / sampler        A = advantage        sg = without gradient

Nothing here divides by a count of the batch: sums over tokens add up however a batch is cut, means do not. Every loss
is a loss of tokens, also where the ratio is that of a sequence, so advantages may differ from token to token. Every
log-ratio of a token is bounded (`LOG_RATIO_BOUND`): beyond, the ratio stays and its gradient is zero, so that no input
makes a loss or a gradient infinite.

Legend: _N one entry per trained token, _S one per sequence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from outpace.algorithms.registry import surrogate
from outpace.algorithms.tokens import LOG_RATIO_BOUND, Tokens

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_REMAINDER = 1e-12
"""dppo: the probability of everything but the sampled token counts as at least this: its logarithm must be finite."""

VESPO_POSITIVE = (2.0, 3.0)
VESPO_NEGATIVE = (3.0, 2.0)
"""vespo's exponent k and decay lambda, by the sign of the advantage (zero counts as positive)."""

VESPO_LOWEST = math.log(1e-8)
"""vespo: the log of a sequence's weight is at least this."""


@surrogate(anchors=("proximal",), ratio=False)
def reinforce(tokens: Tokens) -> Tensor:
    """-A log pi: no ratio at all. What was sampled by another policy is taken as if it had not been."""
    return -tokens.advantages_N * tokens.logp_N


@surrogate(anchors=("rollout",), masks=("opsm",))
def truncated_is(tokens: Tokens, *, cap: float = 2.0) -> Tensor:
    """-sg(min(w, cap)) A log pi: one weight corrects for everything between sampler and learner (lag, kernels,
    rounding), bounded so that no single token can rule the step. The gradient flows through log pi alone.

    A bound from above does nothing for what the policy has already left: there w is small and log pi falls for ever.
    Hence the mask that goes with it."""
    return _truncated_likelihood(tokens, cap)


@surrogate()
def cispo(tokens: Tokens, *, cap: float = 5.0) -> Tensor:
    """-sg(min(r, cap)) A log pi: `truncated_is` with the ratio to the anchor. `cap` is the largest ratio itself, not
    its distance from 1. No token loses its gradient: where ppo clips, this one only stops growing."""
    return _truncated_likelihood(tokens, cap)


@surrogate(anchors=("rollout",), unbounded=True)
def importance(tokens: Tokens) -> Tensor:
    """-w A, with the gradient through w: unbiased, and of a variance that grows without bound with the lag."""
    return -tokens.ratio_N * tokens.advantages_N


@surrogate()
def ppo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Tensor:
    """-min(r A, clip(r) A): a token stops counting once it has moved far enough in the direction of its advantage.

    Against it there is no bound where A < 0 and r is large; `dual_clip` sets one, -dual_clip * A."""
    loss_N = _clipped(tokens.ratio_N, tokens.advantages_N, clip_low, clip_high)
    if dual_clip is None:
        return loss_N
    return loss_N.minimum(-dual_clip * tokens.advantages_N).where(tokens.advantages_N < 0, loss_N)


@surrogate(aggregation="seq_mean_token_mean")
def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """ppo with the ratio of the sequence, s = exp(mean log r): a sequence is clipped as a whole or not at all.

    Each token has the value of s and the gradient s d log pi of its own. Averaged over a sequence with one advantage
    that is exactly the loss of the sequence and its gradient."""
    return _clipped(_of_sequence(tokens, tokens.log_ratio_N).exp(), tokens.advantages_N, clip_low, clip_high)


@surrogate(aggregation="seq_mean_token_mean")
def gmpo(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Tensor:
    """-A exp(mean c), where c is log r clipped at clip_high if A > 0, at -clip_low otherwise: the geometric mean of
    ratios that were clipped one by one. Here the bounds are those of log r. Tokens share it as in `gspo`."""
    log_ratio_N, advantages_N = tokens.log_ratio_N, tokens.advantages_N
    clipped_N = log_ratio_N.clamp(max=clip_high).where(advantages_N > 0, log_ratio_N.clamp(min=-clip_low))
    return -_of_sequence(tokens, clipped_N).exp() * advantages_N


@surrogate(aggregation="seq_mean_token_mean")
def sapo(tokens: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a gate in place of a clip. At r = 1 its gradient is that of r A, and it fades
    with the distance, faster where A is not positive."""
    advantages_N = tokens.advantages_N
    tau_N = advantages_N.new_full(advantages_N.shape, tau_negative).masked_fill(advantages_N > 0, tau_positive)
    return -(4 / tau_N) * (tau_N * (tokens.ratio_N - 1)).sigmoid() * advantages_N


@surrogate(anchors=("rollout", "proximal", "approximate"))
def vespo(tokens: Tokens) -> Tensor:
    """-sg(phi(W)) A log pi, phi(W) = exp(lambda) W^k exp(-lambda W), with W the product of r over the sequence: 1 at
    W = 1, at most 1.25, and falling to 0 on both sides, so sequences far from the anchor are faded out."""
    log_weight_S = tokens.sum_by_sequence(tokens.log_ratio_N.detach()).clamp(VESPO_LOWEST, LOG_RATIO_BOUND)
    positive_S, negative_S = (
        (decay + exponent * log_weight_S - decay * log_weight_S.exp()).exp()
        for exponent, decay in (VESPO_POSITIVE, VESPO_NEGATIVE)
    )
    phi_N = tokens.spread(positive_S).where(tokens.advantages_N >= 0, tokens.spread(negative_S))
    return -phi_N * tokens.advantages_N * tokens.logp_N


@surrogate(anchors=("rollout",))
def dppo(
    tokens: Tokens,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    trust_low: float = 0.2,
    trust_high: float = 0.2,
    ratio_penalty: float = 0.0,
) -> Tensor:
    """-w A inside a trust region of probabilities, 0 outside, plus ratio_penalty (log w)^2 everywhere.

    A token is outside when its probability has already gone further from the sampler's than the bound, in the direction
    that its advantage pushes it. The distance is that between two coins, the token or anything else: total variation,
    |pi - mu|, or KL(mu || pi). Not called unbounded, because a token that has moved stops moving: this holds far from
    the sampler too. The weight itself has no bound other than 1 / mu, so a rare token can be loud; a token mask or a
    weight of `[correction]` limits that."""
    keep_N = _in_trust_region(tokens, divergence, trust_low, trust_high)
    loss_N = -tokens.ratio_N * tokens.advantages_N * keep_N
    return loss_N + ratio_penalty * tokens.log_ratio_N.square() if ratio_penalty else loss_N


def _truncated_likelihood(tokens: Tokens, cap: float) -> Tensor:
    """-sg(min(ratio, cap)) A log pi."""
    weights_N = tokens.ratio_N.detach().clamp(max=cap)
    return -weights_N * tokens.advantages_N * tokens.logp_N


def _clipped(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """-min(ratio A, clip(ratio) A)."""
    return -(ratio_N * advantages_N).minimum(ratio_N.clamp(1 - low, 1 + high) * advantages_N)


def _of_sequence(tokens: Tokens, log_ratio_N: Tensor) -> Tensor:
    """The mean over each token's sequence in value, the token's own log-ratio in gradient."""
    mean_N = tokens.spread(tokens.mean_by_sequence(log_ratio_N.detach()))
    return mean_N + (log_ratio_N - log_ratio_N.detach())


def _in_trust_region(tokens: Tokens, divergence: str, low: float, high: float) -> Tensor:
    """Bounds are inclusive. An advantage of zero is held to the low bound."""
    logp_N, sampler_logp_N = tokens.logp_N.detach(), tokens.sampler_logp_N
    moved_N = logp_N.exp() - sampler_logp_N.exp()
    distance_N = moved_N.abs() if divergence == "tv" else _coin_kl(sampler_logp_N, logp_N)
    outside_high_N = (moved_N > 0) & (distance_N > high)
    outside_low_N = (moved_N < 0) & (distance_N > low)
    return ~outside_high_N.where(tokens.advantages_N > 0, outside_low_N)


def _coin_kl(from_N: Tensor, to_N: Tensor) -> Tensor:
    """KL between two coins that fall heads with these log-probabilities."""
    rest_from_N, rest_to_N = ((-x_N.expm1()).clamp(min=SMALLEST_REMAINDER) for x_N in (from_N, to_N))
    heads_N = from_N.exp() * (from_N - to_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return heads_N + rest_from_N * (rest_from_N.log() - rest_to_N.log())
