"""Generalised advantage estimation over the trained tokens of one row.

Tokens that the policy did not sample are no steps: after the last token of a turn comes the first of the next one.
After the last trained token nothing follows, and the value of nothing is 0.

Legend: _T one entry per trained token.
"""

from __future__ import annotations

import numpy as np

from outpace.algorithms.advantages import Doubles


def gae(rewards_T: Doubles, values_T: Doubles, gamma: float, lam: float) -> tuple[Doubles, Doubles]:
    """Advantages A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t, and returns A_t + V_t: what the
    critic should have said."""
    assert len(rewards_T) == len(values_T)
    values_T = values_T.astype(np.float64)
    next_T = np.append(values_T[1:], 0.0)[: len(values_T)]
    errors_T = rewards_T + gamma * next_T - values_T
    return (advantages_T := discounted(errors_T, gamma * lam)), advantages_T + values_T


def discounted(values_T: Doubles, factor: float) -> Doubles:
    """sum over j >= t of factor^(j - t) values_j: what is still to come at each place."""
    sums_T = np.array(values_T, dtype=np.float64)
    if factor == 1:
        return np.cumsum(sums_T[::-1])[::-1]
    for t in range(len(sums_T) - 2, -1, -1):
        sums_T[t] += factor * sums_T[t + 1]
    return sums_T
