"""From what the attempts of one group returned to one advantage per attempt.

Group-scope: an estimator sees the attempts that are compared with one another and nothing else, so no batching and no
arrival order can change it. Batch-scope stages that may follow are in `outpace.algorithms.normalisers`, and who is
compared with whom is decided in `outpace.algorithms.credit`. No torch here: the worker that closes a group calls these.

For all of them: no attempts give no advantages, and an advantage is always finite. Those that need peers give exactly 0
to an attempt without any, and to attempts that all returned the same: the mean of seven times 0.1 is not exactly 0.1.

Legend: _G one entry per attempt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.algorithms.registry import ADVANTAGES, advantage

Doubles = NDArray[np.float64]

MEAN_EPSILON = 1e-6
"""Added to a mean before dividing by it."""


@dataclass(frozen=True)
class Peers:
    """Attempts at one task in one role (with turn credit: at one turn of it). `lengths_G` counts their trained tokens.

    `parts` are the single rewards by function, NaN where one did not apply; `weights` those of the functions, 1 where
    one has none."""

    returns_G: Doubles
    lengths_G: Doubles
    parts: Mapping[str, Doubles] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@advantage(credits=("episode", "turn", "token"), additive=True, needs_peers=False)
def none(peers: Peers) -> Doubles:
    """R: the return itself."""
    return peers.returns_G


@advantage(credits=("episode", "turn", "token"), additive=True)
def dr_grpo(peers: Peers) -> Doubles:
    """R - mean(R), without dividing by the spread: an easy group is not louder than a hard one."""
    return _centred(peers.returns_G)


@advantage()
def grpo(peers: Peers, *, std_epsilon: float = 1e-4) -> Doubles:
    """(R - mean(R)) / (std(R) + epsilon), with the standard deviation of a sample (G - 1)."""
    return _standardised(peers.returns_G, std_epsilon)


@advantage(credits=("episode", "turn", "token"), additive=True)
def rloo(peers: Peers) -> Doubles:
    """R minus the mean of the other attempts, which is (R - mean(R)) G / (G - 1): a baseline without R itself."""
    count = len(peers.returns_G)
    return _centred(peers.returns_G) * (count / max(count - 1, 1))


@advantage(credits=("token", "episode"), additive=True, needs_peers=False, normalise="whiten_tokens")
def reinforce_pp(peers: Peers) -> Doubles:
    """REINFORCE++: the return, whitened over the tokens of the batch: the baseline is the batch, not the group."""
    return peers.returns_G


@advantage(credits=("episode", "turn", "token"), additive=True, normalise="whiten_tokens")
def reinforce_pp_baseline(peers: Peers) -> Doubles:
    """REINFORCE++ with baseline: R - mean(R), whitened over the tokens of the batch."""
    return _centred(peers.returns_G)


@advantage()
def maxrl(peers: Peers) -> Doubles:
    """(R - mean(R)) / (mean(R) + 1e-6): the rarer the success, the louder it is, as in maximum likelihood.

    Rewards are taken for degrees of success, from 0 up. A group whose mean is not positive gets 0: to divide by a
    negative mean would reward the worse attempts."""
    if len(peers.returns_G) == 0 or (typical := float(peers.returns_G.mean())) <= 0:
        return np.zeros_like(peers.returns_G)
    return _centred(peers.returns_G) / (typical + MEAN_EPSILON)


@advantage(credits=("episode", "turn", "token"), additive=True)
def opo(peers: Peers) -> Doubles:
    """R - sum(T R) / sum(T), T the trained tokens: the baseline of least variance where the squared norm of an
    attempt's gradient grows with its length. Attempts that all have no token count alike."""
    total = float(peers.lengths_G.sum())
    if _all_equal(peers.returns_G):
        return np.zeros_like(peers.returns_G)
    if total == 0:
        return _centred(peers.returns_G)
    return peers.returns_G - float((peers.lengths_G / total * peers.returns_G).sum())


@advantage(credits=("episode",), parts=True, normalise="whiten_sequences")
def gdpo(peers: Peers, *, std_epsilon: float = 1e-4) -> Doubles:
    """Each single reward is normalised in the group as in `grpo`, then they are added by weight: a reward of large
    spread does not drown the others, and attempts whose different rewards add up to the same sum stay apart.

    Where a reward did not apply, it adds 0 and takes no part in its own mean and spread. Without single rewards the
    return is the only one."""
    total_G = np.zeros_like(peers.returns_G)
    for name, values_G in sorted((peers.parts or {"return": peers.returns_G}).items()):
        applies_G = np.isfinite(values_G)
        total_G[applies_G] += peers.weights.get(name, 1.0) * _standardised(values_G[applies_G], std_epsilon)
    return total_G


@advantage(credits=("episode",))
def pass_at_k(peers: Peers, *, pass_k: int | None = None) -> Doubles:
    """How much an attempt adds to the best of k: the mean, over all subsets S of k attempts with this one in it, of
    max(S) - max(S without it). k is the number of attempts when absent or when there are fewer than k.

    The estimate of the best of k is the mean of max(S) over all subsets; its policy gradient gives attempt i the sum of
    max(S) over those with i in them. max(S without i) does not depend on i, so subtracting it leaves the gradient
    unbiased. The whole is that of pass@k divided by k, so that sizes stay comparable. With k = G only the best attempt
    gets anything: its lead over the second. With k = 1 there is no rest to subtract the best of, so the mean of the
    other attempts is subtracted: that is `rloo`.
    """
    count = len(peers.returns_G)
    k = min(pass_k or count, count)
    if k <= 1:
        return rloo(peers)
    # Of the others in ascending order, entry j is the best of a random k - 1 of them with this chance:
    chances = np.array([math.comb(j, k - 2) / math.comb(count - 1, k - 1) for j in range(count - 1)])
    leads_G = np.zeros(count)
    for index, value in enumerate(peers.returns_G):
        others = np.sort(np.delete(peers.returns_G, index))
        leads_G[index] = float((chances * np.maximum(value - others, 0.0)).sum())
    return leads_G


@ADVANTAGES.register(credits=("token",), additive=True, needs_peers=False, critic=True, normalise="whiten_tokens")
def gae(peers: Peers, *, gae_lambda: float = 1.0) -> Doubles:
    """Generalised advantage estimation with learned values: see `outpace.algorithms.gae`. The learner makes these
    advantages, which need its critic; nothing is compared within the group, so here is the return."""
    return peers.returns_G


def is_uniform(rewards: Sequence[float] | Doubles, tolerance: float) -> bool:
    """Whether all rewards are equal up to `tolerance`. The spread is compared, never an advantage with zero:
    the mean of seven rewards of 0.1 is not exactly 0.1."""
    return len(rewards) == 0 or bool(max(rewards) - min(rewards) <= tolerance)


def spread(values: Doubles) -> float:
    """The standard deviation of a sample (N - 1), the same to the last bit in any order; 0 for fewer than two values.
    Squares are taken of deviations scaled to 1, so that none overflows or vanishes."""
    if _all_equal(values):
        return 0.0
    deviations = values - mean(values)
    largest = float(np.abs(deviations).max())
    return largest * math.sqrt(math.fsum(((deviations / largest) ** 2).tolist()) / (len(values) - 1))


def mean(values: Doubles) -> float:
    """The mean, the same to the last bit in any order. There must be a value."""
    return math.fsum(values.tolist()) / len(values)


def _all_equal(values: Doubles) -> bool:
    return len(values) == 0 or bool(values.min() == values.max())


def _centred(values_G: Doubles) -> Doubles:
    return np.zeros_like(values_G) if _all_equal(values_G) else values_G - values_G.mean()


def _standardised(values_G: Doubles, epsilon: float) -> Doubles:
    centred_G: Doubles = _centred(values_G) / (spread(values_G) + epsilon)
    return centred_G
