"""MERGED"""

from __future__ import annotations

import numpy as np

from outpace.algorithms.advantages import Doubles


def gae(rewards_T: Doubles, values_T: Doubles, gamma: float, lam: float) -> tuple[Doubles, Doubles]:
    """Return the advantages A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t, and the critic's
    targets A_t + V_t."""
    assert len(rewards_T) == len(values_T)
    values_T = values_T.astype(np.float64)
    next_T = np.append(values_T[1:], 0.0)[: len(values_T)]
    errors_T = rewards_T + gamma * next_T - values_T
    return (advantages_T := discounted(errors_T, gamma * lam)), advantages_T + values_T


def discounted(values_T: Doubles, factor: float) -> Doubles:
    """Return sum over j >= t of factor^(j - t) values_j for every t."""
    sums_T = np.array(values_T, dtype=np.float64)
    if factor == 1:
        return np.cumsum(sums_T[::-1])[::-1]
    for t in range(len(sums_T) - 2, -1, -1):
        sums_T[t] += factor * sums_T[t + 1]
    return sums_T
