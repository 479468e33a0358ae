"""Random draws of the model. What a group is (lengths, outcome, latencies) depends on the seed and on its number, never
on timing: two simulations of one workload differ by their schedule alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from outpace.simulate.settings import WorkloadSettings
from outpace.types import Outcome

Length = Callable[[random.Random], float]


def length_of(workload: WorkloadSettings) -> Length:
    """How many tokens an episode wants to sample, before it is cut."""
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
    def __init__(self, workload: WorkloadSettings, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._length = length_of(workload)

    def of_group(self, group: int) -> random.Random:
        """All that is drawn for a group comes from here, in a fixed order."""
        return random.Random(self._seed * 1_000_003 + group)

    def outcome(self, rng: random.Random) -> Outcome:
        draw = rng.random()
        if draw < self._workload.filtered:
            return "filtered"
        return "failed" if draw < self._workload.filtered + self._workload.failed else "finished"

    def tokens(self, rng: random.Random) -> float:
        """Of one episode, all its turns together: at least one token each."""
        wanted = min(self._length(rng), float(self._workload.max_tokens))
        return max(wanted, float(self._workload.turns))

    def turn_s(self, rng: random.Random) -> float:
        """The environment's answer."""
        if not self._workload.turn_s:
            return 0.0
        return rng.lognormvariate(
            _log_mean(self._workload.turn_s, self._workload.turn_sigma), self._workload.turn_sigma
        )
