"""Policy losses, the tokens they work on, aggregation over a step, and the KL penalty.

    r = current / old        w = current / sampler        A = advantage        sg = stop-gradient

The old policy is chosen by `policy_loss.old_policy`: the policy at the start of the step (`recomputed`), the
sampler (`rollout`), or a log-linear interpolation of the two (`interpolated`).

Invariants
- Losses are per token, even where the ratio is per sequence, so advantages may differ between tokens.
- Nothing divides by a batch count. A step is sum(weight x loss) / denominator over everything it trains on. A token's
  weight depends only on its own sequence and the division happens once, so the gradient does not depend on how the step
  is split into passes. Masked tokens count in every denominator.
- Each token's log-ratio is clamped (`LOG_RATIO_BOUND`). Beyond the bound the ratio is constant and its gradient zero,
  so no input makes a loss or a gradient infinite.
- This module does not import torch: losses only use methods of the tensors they receive.

KL(current || reference), estimated at the sampled tokens:

    d = log(current / reference)        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

All three have the same expectation if the current policy sampled; they differ as losses:

- k1: its gradient is grad log pi, with expectation zero: pure noise. Use k1 in the reward, where it is unbiased.
- k2: its gradient has the expectation of the KL gradient.
- k3: never negative, low variance; its gradient is that of KL(reference || current).
- unbiased: k3 weighted by current / sampler, with gradient through both. Value and gradient are those of
  KL(current || reference) for any sampler, stale ones included.

Clamping: d at 20 on both sides, k3 at 10 (d below about -2.6 or above 11). Inside the bounds value and gradient are
exact; outside the value is constant. A token beyond the k3 bound has no KL gradient: the gradient grows like exp(-d),
so a single token could dominate the step. The gradient of `unbiased`, w d, does not grow like this and is kept.

Legend: _N one entry per trained token, _S one per sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from outpace.algorithms.registry import Aggregation, policy_loss

if TYPE_CHECKING:
    from torch import Tensor


LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 is far above any cap, and its square still fits in float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a clamped log-ratio: never overflows, never leads to NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of one forward pass, concatenated: the input of a policy loss.

    `logp_N` is from the current policy and carries the gradient; everything else is constant. `old_logp_N` is from the
    old policy of the ratio (`policy_loss.old_policy`), `sampler_logp_N` from the policy that sampled the token.
    `sequence_N` is the index of each token's sequence. A pass always contains whole sequences.
    """

    logp_N: Tensor
    old_logp_N: Tensor
    sampler_logp_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    sequences: int

    @cached_property
    def log_ratio_N(self) -> Tensor:
        """log(current / old), with gradient, clamped."""
        return (self.logp_N - self.old_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio_N(self) -> Tensor:
        """current / old, with gradient."""
        return self.log_ratio_N.exp()

    @cached_property
    def lengths_S(self) -> Tensor:
        """Trained tokens of each sequence, at least 1."""
        return self.sum_by_sequence(self.advantages_N.new_ones(self.advantages_N.shape)).clamp(min=1)

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        return values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)

    def mean_by_sequence(self, values_N: Tensor) -> Tensor:
        return self.sum_by_sequence(values_N) / self.lengths_S

    def per_token(self, values_S: Tensor) -> Tensor:
        """Expand values per sequence to values per token."""
        return values_S[self.sequence_N]

    @cached_property
    def position_N(self) -> Tensor:
        """Index of each token among the trained tokens of its sequence."""
        counts_S = self.sequence_N.bincount(minlength=self.sequences)
        first_S = counts_S.cumsum(0) - counts_S
        return self.sequence_N.new_ones(self.sequence_N.shape).cumsum(0) - 1 - first_S[self.sequence_N]

    def padded(self, values_N: Tensor) -> Tensor:
        """Return one row per sequence, padded with 0."""
        width = int(self.position_N.max()) + 1 if len(values_N) else 0
        padded = values_N.new_zeros(self.sequences, width)
        padded[self.sequence_N, self.position_N] = values_N
        return padded

    def unpadded(self, values: Tensor) -> Tensor:
        """Return values per token, from a row per sequence or a single column."""
        return values.expand(self.sequences, -1)[self.sequence_N, self.position_N if values.shape[1] > 1 else 0]


Cap = Annotated[float, Field(gt=0, description="Upper truncation of importance weights.")]
ClipLow = Annotated[
    float, Field(ge=0, le=1, description="The ratio is clipped at 1 - clip_low (gmpo: its log at -clip_low).")
]
ClipHigh = Annotated[
    float, Field(ge=0, description="The ratio is clipped at 1 + clip_high (gmpo: its log at clip_high).")
]
DualClip = Annotated[
    float | None,
    Field(gt=1, description="Bounds the loss of a token with a negative advantage at this multiple of the advantage."),
]
TauPositive = Annotated[float, Field(gt=0, description="Temperature for positive advantages.")]
TauNegative = Annotated[float, Field(gt=0, description="Temperature for negative advantages.")]
Divergence = Annotated[
    Literal["tv", "kl"],
    Field(description="Divergence from the sampler's probability that decides which tokens are masked."),
]
TrustLow = Annotated[
    float, Field(ge=0, description="Mask tokens with a negative advantage whose probability fell by more than this.")
]
TrustHigh = Annotated[
    float, Field(ge=0, description="Mask tokens with a positive advantage whose probability rose by more than this.")
]
RatioPenalty = Annotated[
    float,
    Field(ge=0, description="Coefficient of the squared log-ratio to the sampler that is added to the loss."),
]
Exponent = Annotated[float, Field(ge=0, description="Exponent of the sequence's ratio, by the sign of the advantage.")]
Decay = Annotated[float, Field(gt=0, description="Decay of the weight for large ratios, by the sign of the advantage.")]
"""Types of the settings of policy losses, with limits and help text."""

MIN_REMAINDER = 1e-12
"""dppo: lower bound for the probability of all other tokens, so that its logarithm is finite."""

VESPO_MIN_LOG_WEIGHT = math.log(1e-8)
"""vespo: lower bound for the log of a sequence's weight."""


@policy_loss(old_policies=("recomputed",), ratio=False)
def reinforce(tokens: Tokens) -> Tensor:
    """-A log pi, without a ratio: off-policy tokens are treated as on-policy."""
    return -tokens.advantages_N * tokens.logp_N


@policy_loss(old_policies=("rollout",), masks=("opsm",))
def truncated_is(tokens: Tokens, *, cap: Cap = 2.0) -> Tensor:
    """-sg(min(w, cap)) A log pi: one truncated importance weight corrects for all differences between sampler and
    learner (staleness, kernels, rounding). The gradient flows through log pi only.

    The cap does not help for tokens with A < 0 that the policy has already moved away from: w is small, but log pi can
    fall without limit. The default mask `opsm` rejects those."""
    return _truncated_likelihood(tokens, cap)


@policy_loss()
def cispo(tokens: Tokens, *, cap: Cap = 5.0) -> Tensor:
    """-sg(min(r, cap)) A log pi: `truncated_is` with the ratio to the old policy. `cap` is the largest ratio itself,
    not its distance from 1. Every token keeps its gradient: where ppo clips, the weight here stops growing."""
    return _truncated_likelihood(tokens, cap)


@policy_loss(old_policies=("rollout",), unbounded=True)
def importance(tokens: Tokens) -> Tensor:
    """-w A, with gradient through w: unbiased, but its variance grows without bound with staleness."""
    return -tokens.ratio_N * tokens.advantages_N


@policy_loss()
def ppo(tokens: Tokens, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, dual_clip: DualClip = None) -> Tensor:
    """-min(r A, clip(r) A): a token has no gradient once it has moved far enough in the direction of its advantage.

    The loss is unbounded where A < 0 and r is large; `dual_clip` bounds it by -dual_clip * A."""
    loss_N = _clipped(tokens.ratio_N, tokens.advantages_N, clip_low, clip_high)
    if dual_clip is None:
        return loss_N
    return loss_N.minimum(-dual_clip * tokens.advantages_N).where(tokens.advantages_N < 0, loss_N)


@policy_loss(aggregation="seq_mean_token_mean")
def gspo(tokens: Tokens, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> Tensor:
    """ppo with the sequence ratio s = exp(mean log r): a sequence is clipped as a whole or not at all.

    Each token has the value of s and the gradient s times its own d log pi. Averaged over a sequence with a single
    advantage, this is exactly the sequence loss and its gradient."""
    return _clipped(_sequence_mean(tokens, tokens.log_ratio_N).exp(), tokens.advantages_N, clip_low, clip_high)


@policy_loss(aggregation="seq_mean_token_mean")
def gmpo(tokens: Tokens, *, clip_low: ClipLow = 0.4, clip_high: ClipHigh = 0.4) -> Tensor:
    """-A exp(mean c), where c is log r clipped at clip_high if A > 0, at -clip_low otherwise: the geometric mean of
    ratios clipped per token. The bounds apply to log r. Gradients per token as in `gspo`."""
    log_ratio_N, advantages_N = tokens.log_ratio_N, tokens.advantages_N
    clipped_N = log_ratio_N.clamp(max=clip_high).where(advantages_N > 0, log_ratio_N.clamp(min=-clip_low))
    return -_sequence_mean(tokens, clipped_N).exp() * advantages_N


@policy_loss(aggregation="seq_mean_token_mean")
def sapo(tokens: Tokens, *, tau_positive: TauPositive = 1.0, tau_negative: TauNegative = 1.05) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate instead of a clip. At r = 1 the gradient is that of r A; it decays
    with the distance from 1, faster where A <= 0."""
    advantages_N = tokens.advantages_N
    tau_N = advantages_N.new_full(advantages_N.shape, tau_negative).masked_fill(advantages_N > 0, tau_positive)
    return -(4 / tau_N) * (tau_N * (tokens.ratio_N - 1)).sigmoid() * advantages_N


@policy_loss(old_policies=("rollout", "recomputed", "interpolated"))
def vespo(
    tokens: Tokens,
    *,
    k_positive: Exponent = 2.0,
    lambda_positive: Decay = 3.0,
    k_negative: Exponent = 3.0,
    lambda_negative: Decay = 2.0,
) -> Tensor:
    """-sg(phi(W)) A log pi, phi(W) = exp(lambda) W^k exp(-lambda W), with W the product of r over the sequence: 1 at
    W = 1, at most 1.25 by default, and 0 in both limits, so sequences far from the old policy are weighted down. An
    advantage of zero counts as positive."""
    log_weight_S = tokens.sum_by_sequence(tokens.log_ratio_N.detach()).clamp(VESPO_MIN_LOG_WEIGHT, LOG_RATIO_BOUND)
    positive_S, negative_S = (
        (decay + exponent * log_weight_S - decay * log_weight_S.exp()).exp()
        for exponent, decay in ((k_positive, lambda_positive), (k_negative, lambda_negative))
    )
    phi_N = tokens.per_token(positive_S).where(tokens.advantages_N >= 0, tokens.per_token(negative_S))
    return -phi_N * tokens.advantages_N * tokens.logp_N


@policy_loss(old_policies=("rollout",))
def dppo(
    tokens: Tokens,
    *,
    divergence: Divergence = "tv",
    trust_low: TrustLow = 0.2,
    trust_high: TrustHigh = 0.2,
    ratio_penalty: RatioPenalty = 0.0,
) -> Tensor:
    """-w A inside a trust region of probabilities, 0 outside, plus ratio_penalty (log w)^2 everywhere.

    A token is outside if its probability has moved from the sampler's by more than the bound, in the direction of its
    advantage. The distance is that of two Bernoulli distributions (this token or any other): total variation |pi - mu|,
    or KL(mu || pi). Not declared `unbounded`: a token that has moved gets no gradient, at any staleness. The weight
    itself is only bounded by 1 / mu, so a rare token can have a large gradient; limit it with a token mask or a weight
    in `[correction]`."""
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


def _sequence_mean(tokens: Tokens, log_ratio_N: Tensor) -> Tensor:
    """Return the sequence mean as value, with the gradient of each token's own log-ratio."""
    mean_N = tokens.per_token(tokens.mean_by_sequence(log_ratio_N.detach()))
    return mean_N + (log_ratio_N - log_ratio_N.detach())


def _in_trust_region(tokens: Tokens, divergence: str, low: float, high: float) -> Tensor:
    """Return which tokens are inside. Bounds are inclusive; a zero advantage uses the low bound."""
    logp_N, sampler_logp_N = tokens.logp_N.detach(), tokens.sampler_logp_N
    moved_N = logp_N.exp() - sampler_logp_N.exp()
    distance_N = moved_N.abs() if divergence == "tv" else _bernoulli_kl(sampler_logp_N, logp_N)
    outside_high_N = (moved_N > 0) & (distance_N > high)
    outside_low_N = (moved_N < 0) & (distance_N > low)
    return ~outside_high_N.where(tokens.advantages_N > 0, outside_low_N)


def _bernoulli_kl(from_N: Tensor, to_N: Tensor) -> Tensor:
    """KL between two Bernoulli distributions with these log-probabilities."""
    rest_from_N, rest_to_N = ((-x_N.expm1()).clamp(min=MIN_REMAINDER) for x_N in (from_N, to_N))
    first_N = from_N.exp() * (from_N - to_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return first_N + rest_from_N * (rest_from_N.log() - rest_to_N.log())


def aggregation_weights(aggregation: Aggregation, tokens: Tokens) -> Tensor:
    """Return the weight of each token: 1, or 1 / the trained tokens of its sequence for `seq_mean_token_mean`."""
    if aggregation == "seq_mean_token_mean":
        return tokens.per_token(1 / tokens.lengths_S)
    return tokens.advantages_N.new_ones(tokens.advantages_N.shape)


def loss_denominator(aggregation: Aggregation, tokens: int, sequences: int, max_completion_tokens: int) -> float:
    """Return the denominator of a step's loss.

    `tokens` and `sequences` count the whole step; `max_completion_tokens` is the limit per sequence. Never below 1, so
    a step without tokens has loss 0."""
    if aggregation == "token_mean":
        return float(max(1, tokens))
    return float(max(1, sequences * max_completion_tokens if aggregation == "dr_grpo" else sequences))


KlEstimator = Literal["k1", "k2", "k3", "unbiased"]

K3_BOUND = 10.0


def kl_penalty(estimator: KlEstimator, logp_N: Tensor, reference_logp_N: Tensor, log_ratio_N: Tensor) -> Tensor:
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
    """Return w k3 with its gradient w d set explicitly. It is exact inside the k3 bound. Beyond, it still points
    towards the reference, whereas autograd through w alone would point away from it."""
    gradient_N = (weight_N * distance_N).detach()
    return (weight_N * k3_N).detach() + gradient_N * (logp_N - logp_N.detach())
