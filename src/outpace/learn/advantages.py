"""From the rewards of one group to one advantage per episode.

Advantages are group-scope: they need the rewards of one closed group and nothing else, so the worker that closes the
group computes them, and no batching or arrival order can change them. No torch here: workers do not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outpace.errors import BadInput
from outpace.types import Floats

Baseline = Callable[[Sequence[float]], Floats]


def group_mean(rewards: Sequence[float]) -> Floats:
    """Reward minus the group's mean, without dividing by its spread: an easy group is not louder than a hard one."""
    rewards_G = np.asarray(rewards, dtype=np.float64)
    if rewards_G.size == 0:
        return rewards_G.astype(np.float32)
    advantages_G: Floats = (rewards_G - rewards_G.mean()).astype(np.float32)
    return advantages_G


def none(rewards: Sequence[float]) -> Floats:
    """The reward itself."""
    return np.asarray(rewards, dtype=np.float32)


BASELINES: dict[str, Baseline] = {"group_mean": group_mean, "none": none}


def baseline(name: str) -> Baseline:
    if name not in BASELINES:
        raise BadInput(f"algorithm.baseline: no baseline is called {name!r}; there are {', '.join(BASELINES)}")
    return BASELINES[name]


def is_uniform(rewards: Sequence[float], tolerance: float) -> bool:
    """Whether all rewards are equal up to `tolerance`. The spread is compared, never an advantage with zero:
    the mean of seven rewards of 0.1 is not exactly 0.1."""
    return len(rewards) == 0 or max(rewards) - min(rewards) <= tolerance
