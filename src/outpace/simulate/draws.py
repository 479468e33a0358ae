"""MERGED"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from outpace.simulate.settings import WorkloadSettings
from outpace.types import Outcome

Length = Callable[[random.Random], float]


def length_of(workload: WorkloadSettings) -> Length:
    """Return a sampler of episode lengths in tokens, before truncation."""
    mean = workload.mean_tokens
    match workload.lengths:
        case "fixed":
            return lambda _: mean
        case "list":
            return lambda rng: rng.choice(workload.length_list)
        case "pareto":
            least = mean * (workload.tail - 1) / workload.tail
            return lambda rng: least * rng.paretovariate(workload.tail)
        case _:
            return lambda rng: rng.lognormvariate(_log_mean(mean, workload.sigma), workload.sigma)


def _log_mean(mean: float, sigma: float) -> float:
    return math.log(mean) - sigma * sigma / 2


class Draws:
    """Random draws of the workload. Lengths, outcome and latencies of a group depend only on the seed and the group
    number, never on timing: two simulations of one workload differ only in their schedule."""

    def __init__(self, workload: WorkloadSettings, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._length = length_of(workload)

    def of_group(self, group: int) -> random.Random:
        """Return the random generator of a group. All its draws come from it, in a fixed order."""
        return random.Random(self._seed * 1_000_003 + group)

    def outcome(self, rng: random.Random) -> Outcome:
        draw = rng.random()
        if draw < self._workload.filtered:
            return "filtered"
        return "failed" if draw < self._workload.filtered + self._workload.failed else "finished"

    def tokens(self, rng: random.Random) -> float:
        """Draw the sampled tokens of one episode over all turns, at least one per turn."""
        tokens = min(self._length(rng), float(self._workload.max_tokens))
        return max(tokens, float(self._workload.turns))

    def turn_s(self, rng: random.Random) -> float:
        """Draw the environment latency of one turn, in seconds."""
        if not self._workload.turn_s:
            return 0.0
        return rng.lognormvariate(
            _log_mean(self._workload.turn_s, self._workload.turn_sigma), self._workload.turn_sigma
        )
