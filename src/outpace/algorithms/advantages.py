"""Advantage estimators per group, generalized advantage estimation, and normalizers over the batch.

Estimators see only the attempts compared with each other (`token_advantages` selects them), so batching and arrival
order do not affect the result. Normalizers see the advantages of the whole batch and round each sum once, so neither
row order nor arrival order changes a bit. No torch: rollout workers call estimators when they score a group.

Invariants
- No attempts give no advantages. Advantages are always finite.
- Estimators with `needs_peers` give exactly 0 to a lone attempt and to attempts with equal returns. That needs a check:
  the mean of seven times 0.1 is not exactly 0.1.
- Normalizers turn advantages without variation into 0, never NaN.
- GAE runs over trained tokens only: the last token of a turn is followed by the first of the next turn, and the value
  after the last trained token is 0.

Legend: _G one entry per attempt, _T one per trained token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outpace.algorithms.registry import ADVANTAGES, NORMALIZERS, advantage, normalizer

Doubles = NDArray[np.float64]

MEAN_EPSILON = 1e-6
"""Added to a mean before dividing by it."""

StdEpsilon = Annotated[float, Field(gt=0, description="Added to a standard deviation before dividing by it.")]
Attempts = Annotated[int | None, Field(ge=1, description="k of pass@k. Default: all attempts of the group.")]
GaeLambda = Annotated[float, Field(ge=0, le=1, description="Lower values trade variance for bias.")]
"""Types of the settings of estimators and normalizers, with limits and help text."""


@dataclass(frozen=True)
class GroupReturns:
    """Attempts at one task in one role (with turn credit: at one turn). `lengths_G` counts their trained tokens.

    `parts` holds the individual rewards by reward function, NaN where a function did not apply; `weights` holds the
    functions' weights, 1 if absent."""

    returns_G: Doubles
    lengths_G: Doubles
    parts: Mapping[str, Doubles] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@advantage(credits=("episode", "turn", "token"), additive=True, needs_peers=False)
def none(group: GroupReturns) -> Doubles:
    """R: the return itself."""
    return group.returns_G


@advantage(credits=("episode", "turn", "token"), additive=True)
def dr_grpo(group: GroupReturns) -> Doubles:
    """R - mean(R), not divided by the standard deviation, so groups of low variance are not amplified."""
    return _centered(group.returns_G)


@advantage()
def grpo(group: GroupReturns, *, std_epsilon: StdEpsilon = 1e-4) -> Doubles:
    """(R - mean(R)) / (std(R) + epsilon), with the sample standard deviation (G - 1)."""
    return _standardized(group.returns_G, std_epsilon)


@advantage(credits=("episode", "turn", "token"), additive=True)
def rloo(group: GroupReturns) -> Doubles:
    """R minus the mean of the other attempts, which equals (R - mean(R)) G / (G - 1)."""
    count = len(group.returns_G)
    return _centered(group.returns_G) * (count / max(count - 1, 1))


@advantage(credits=("token", "episode"), additive=True, needs_peers=False, normalizer="whiten_tokens")
def reinforce_pp(group: GroupReturns) -> Doubles:
    """REINFORCE++: the return, whitened over the tokens of the batch. The baseline is the batch, not the group."""
    return group.returns_G


@advantage(credits=("episode", "turn", "token"), additive=True, normalizer="whiten_tokens")
def reinforce_pp_baseline(group: GroupReturns) -> Doubles:
    """REINFORCE++ with baseline: R - mean(R), whitened over the tokens of the batch."""
    return _centered(group.returns_G)


@advantage()
def maxrl(group: GroupReturns) -> Doubles:
    """(R - mean(R)) / (mean(R) + 1e-6): rare successes weigh more, as in maximum likelihood.

    Assumes rewards that measure success from 0 up. A group with a mean of 0 or less gets 0: dividing by a negative mean
    would reward the worse attempts."""
    if len(group.returns_G) == 0 or (average := float(group.returns_G.mean())) <= 0:
        return np.zeros_like(group.returns_G)
    return _centered(group.returns_G) / (average + MEAN_EPSILON)


@advantage(credits=("episode", "turn", "token"), additive=True)
def opo(group: GroupReturns) -> Doubles:
    """R - sum(T R) / sum(T), with T trained tokens: the minimum-variance baseline if the squared norm of an attempt's
    gradient is proportional to its length. If no attempt has tokens, all weigh the same."""
    total = float(group.lengths_G.sum())
    if _all_equal(group.returns_G):
        return np.zeros_like(group.returns_G)
    if total == 0:
        return _centered(group.returns_G)
    return group.returns_G - float((group.lengths_G / total * group.returns_G).sum())


@advantage(credits=("episode",), parts=True, normalizer="whiten_sequences")
def gdpo(group: GroupReturns, *, std_epsilon: StdEpsilon = 1e-4) -> Doubles:
    """Normalize each individual reward within the group as in `grpo`, then sum them by weight. A high-variance reward
    does not dominate, and attempts with different rewards of equal sum remain distinguishable.

    A reward that did not apply adds 0 and is left out of its mean and standard deviation. Without individual rewards,
    the return is used."""
    total_G = np.zeros_like(group.returns_G)
    for name, values_G in sorted((group.parts or {"return": group.returns_G}).items()):
        applies_G = np.isfinite(values_G)
        total_G[applies_G] += group.weights.get(name, 1.0) * _standardized(values_G[applies_G], std_epsilon)
    return total_G


@advantage(credits=("episode",))
def pass_at_k(group: GroupReturns, *, k: Attempts = None) -> Doubles:
    """An attempt's contribution to the best of k: the mean of max(S) - max(S without it) over all subsets S of k
    attempts that contain it. k is the number of attempts if not set, or if there are fewer than k.

    The best-of-k estimate is the mean of max(S) over all subsets; its policy gradient gives attempt i the sum of max(S)
    over the subsets that contain i. max(S without i) does not depend on i, so subtracting it keeps the gradient
    unbiased. The result is the pass@k gradient divided by k, so magnitudes stay comparable. With k = G only the best
    attempt gets an advantage: its lead over the second. With k = 1 the rest of S is empty; the mean of the other
    attempts is subtracted instead, which is `rloo`.
    """
    count = len(group.returns_G)
    k = min(k or count, count)
    if k <= 1:
        return rloo(group)
    # Probability that entry j of the others, in ascending order, is the best of k - 1 drawn at random:
    probabilities = np.array([math.comb(j, k - 2) / math.comb(count - 1, k - 1) for j in range(count - 1)])
    leads_G = np.zeros(count)
    for index, value in enumerate(group.returns_G):
        others = np.sort(np.delete(group.returns_G, index))
        leads_G[index] = float((probabilities * np.maximum(value - others, 0.0)).sum())
    return leads_G


@ADVANTAGES.with_options(credits=("token",), additive=True, needs_peers=False, critic=True, normalizer="whiten_tokens")
def gae(group: GroupReturns, *, gae_lambda: GaeLambda = 1.0) -> Doubles:
    """Generalized advantage estimation with a learned critic. The learner computes these advantages (`compute_gae`);
    there is no comparison within the group, so the result here is the plain return."""
    return group.returns_G


def is_uniform(rewards: Sequence[float] | Doubles, tolerance: float) -> bool:
    """Return whether all rewards are equal up to `tolerance`. Compares max - min, not advantages with zero: the mean of
    seven rewards of 0.1 is not exactly 0.1."""
    return len(rewards) == 0 or bool(max(rewards) - min(rewards) <= tolerance)


def sample_std(values: Doubles) -> float:
    """Sample standard deviation (N - 1), bit-identical in any order; 0 for fewer than two values. Deviations are scaled
    to 1 before squaring, so that no square overflows or underflows."""
    if _all_equal(values):
        return 0.0
    deviations = values - mean(values)
    largest = float(np.abs(deviations).max())
    return largest * math.sqrt(math.fsum(((deviations / largest) ** 2).tolist()) / (len(values) - 1))


def mean(values: Doubles) -> float:
    """Mean, bit-identical in any order. `values` must not be empty."""
    return math.fsum(values.tolist()) / len(values)


def _all_equal(values: Doubles) -> bool:
    return len(values) == 0 or bool(values.min() == values.max())


def _centered(values_G: Doubles) -> Doubles:
    return np.zeros_like(values_G) if _all_equal(values_G) else values_G - values_G.mean()


def _standardized(values_G: Doubles, epsilon: float) -> Doubles:
    scaled_G: Doubles = _centered(values_G) / (sample_std(values_G) + epsilon)
    return scaled_G


def compute_gae(rewards_T: Doubles, values_T: Doubles, gamma: float, lam: float) -> tuple[Doubles, Doubles]:
    """Return the advantages A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t, and the critic's
    targets A_t + V_t."""
    assert len(rewards_T) == len(values_T)
    values_T = values_T.astype(np.float64)
    next_T = np.append(values_T[1:], 0.0)[: len(values_T)]
    errors_T = rewards_T + gamma * next_T - values_T
    return (advantages_T := discounted_sums(errors_T, gamma * lam)), advantages_T + values_T


def discounted_sums(values_T: Doubles, factor: float) -> Doubles:
    """Return sum over j >= t of factor^(j - t) values_j for every t."""
    sums_T = np.array(values_T, dtype=np.float64)
    if factor == 1:
        return np.cumsum(sums_T[::-1])[::-1]
    for t in range(len(sums_T) - 2, -1, -1):
        sums_T[t] += factor * sums_T[t + 1]
    return sums_T


@dataclass(frozen=True)
class BatchAdvantages:
    """The advantages of a whole batch: one array per row with one value per trained token. `rewards` has one value per
    attempt."""

    advantages: list[Doubles]
    rewards: Doubles


@NORMALIZERS.with_options(alias="none")
def no_normalizer(batch: BatchAdvantages) -> list[Doubles]:
    """Leave advantages unchanged. The only normalizer that does not need the whole batch; it is never called."""
    return batch.advantages


@normalizer()
def batch_std(batch: BatchAdvantages, *, std_epsilon: StdEpsilon = 1e-4) -> list[Doubles]:
    """Divide by the standard deviation of the rewards of all attempts in the batch: one scale for all groups."""
    return _scaled(batch.advantages, 0.0, sample_std(batch.rewards), std_epsilon)


@normalizer()
def whiten_tokens(batch: BatchAdvantages, *, std_epsilon: StdEpsilon = 1e-4) -> list[Doubles]:
    """Mean 0 and standard deviation 1 over all trained tokens of the batch. Longer rows weigh more."""
    return _whitened(batch.advantages, _joined(batch.advantages), std_epsilon)


@normalizer()
def whiten_sequences(batch: BatchAdvantages, *, std_epsilon: StdEpsilon = 1e-4) -> list[Doubles]:
    """Mean 0 and standard deviation 1 over the rows of the batch, each counted once by its mean advantage."""
    means = np.array([mean(row_T) for row_T in batch.advantages if len(row_T)], dtype=np.float64)
    return _whitened(batch.advantages, means, std_epsilon)


def _joined(rows: list[Doubles]) -> Doubles:
    return np.concatenate(rows) if rows else np.zeros(0)


def _whitened(rows: list[Doubles], values: Doubles, epsilon: float) -> list[Doubles]:
    return _scaled(rows, mean(values) if len(values) else 0.0, sample_std(values), epsilon)


def _scaled(rows: list[Doubles], center: float, scale: float, epsilon: float) -> list[Doubles]:
    if scale == 0:
        return [np.zeros_like(row_T) for row_T in rows]
    return [(row_T - center) / (scale + epsilon) for row_T in rows]
