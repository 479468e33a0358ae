"""Plan for a cluster: find the best split of devices, and compare asynchronous with synchronous training.

Steps per hour as a function of the number of training devices has a single peak: with more of them the learner starves,
with fewer the engines idle. A golden-section search finds it with a few short runs of the same workload and seed.

Synchronous training is the same scheduler with `max_lag = 0`, simulated in two ways: with the devices split into two
pools that work alternately, at the best split for this mode; and colocated, where all devices generate, then all train
on the whole batch, and switching costs `run.switch_s` per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from outpace.errors import ComponentFailed, plural
from outpace.simulator.metrics import SimulationResult
from outpace.simulator.run import SimulatedRun
from outpace.simulator.settings import SimulationSettings

GOLDEN = (5**0.5 - 1) / 2
SEARCH_RESOLUTION = 64
"""The search resolves 1/64 of all splits, so a larger cluster needs no more runs."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class SimulationPlan:
    """Results of the simulations behind one report."""

    result: SimulationResult
    searched: dict[int, float]  # training devices -> seconds per step; empty if the split was given
    two_pools: SimulationResult | None = None  # synchronous
    colocated: SimulationResult | None = None

    @property
    def synchronous(self) -> SimulationResult | None:
        """The faster of the two synchronous runs."""
        both = [result for result in (self.two_pools, self.colocated) if result is not None]
        return min(both, key=lambda result: result.step_s, default=None)

    @property
    def factor(self) -> float | None:
        """Speedup of asynchronous over synchronous training."""
        return None if self.synchronous is None else self.synchronous.step_s / self.result.step_s

    def as_json(self) -> dict[str, object]:
        rows = {"asynchronous": self.result, "two_pools": self.two_pools, "colocated": self.colocated}
        runs = {name: None if row is None else asdict(row) for name, row in rows.items()}
        return {**runs, "searched": self.searched, "factor": self.factor}


def make_plan(settings: SimulationSettings, report: Report = lambda _: None) -> SimulationPlan:
    """Run all simulations. `report` is called with progress lines."""
    searched: dict[int, float] = {}
    if settings.cluster.training is None:
        settings, searched = with_best_split(settings, report)
    result = _run(settings, "asynchronous", report)
    if not settings.run.compare:
        return SimulationPlan(result, searched)
    synchronous = settings.changed("pacing", max_lag=0).changed("weights", every=1)
    if searched:
        two_pools, _ = with_best_split(synchronous, report)
    else:
        two_pools = synchronous
    return SimulationPlan(
        result,
        searched,
        _run(two_pools, "synchronous, two pools", report),
        _colocated_figures(_run(colocated(synchronous), "synchronous, colocated", report)),
    )


def colocated(settings: SimulationSettings) -> SimulationSettings:
    """Return settings in which learner and engines each have all devices, and use them alternately."""
    devices = settings.cluster.devices
    both = settings.changed("cluster", devices=2 * devices, training=devices)
    both = both.changed("pacing", chunk_groups=settings.pacing.groups_per_step)
    return both.changed("engine", load_s=settings.run.switch_s)


def _colocated_figures(result: SimulationResult) -> SimulationResult:
    """Correct the figures for the doubled number of devices in `colocated`."""
    return replace(result, in_turns=True, ideal_s=2 * result.ideal_s, efficiency=2 * result.efficiency)


def with_best_split(
    settings: SimulationSettings, report: Report = lambda _: None
) -> tuple[SimulationSettings, dict[int, float]]:
    """Return the settings with the number of training devices that minimizes step time, and all step times tried."""
    probe = settings.changed("run", steps=settings.run.probe_steps)
    tried: dict[int, float] = {}
    kind = "synchronous" if settings.pacing.max_lag == 0 else "asynchronous"

    def step_s(engines: int) -> float:
        training = settings.cluster.devices - engines * settings.cluster.per_engine
        if training not in tried:
            result = _run(
                probe.changed("cluster", training=training),
                f"searching: {kind}, {plural(training, 'training device')}",
                report,
            )
            tried[training] = result.step_s
        return tried[training]

    _search_minimum(step_s, 1, (settings.cluster.devices - 1) // settings.cluster.per_engine)
    best = min(tried, key=tried.__getitem__)
    return settings.changed("cluster", training=best), dict(sorted(tried.items()))


def _search_minimum(value: Callable[[int], float], low: int, high: int) -> None:
    """Golden-section search over integers, followed by a local search. `value` records its calls."""
    lowest, highest, stride = low, high, max(1, (high - low) // SEARCH_RESOLUTION)
    while high - low > 2 * stride:
        reach = round((high - low) * GOLDEN)
        left, right = high - reach, low + reach
        if value(left) <= value(right):
            high = right
        else:
            low = left
    best = min(range(low, high + 1, stride), key=value)
    while nearby := [each for each in (best - stride, best + stride) if lowest <= each <= highest]:
        nearest = min(nearby, key=value)
        if value(nearest) >= value(best):
            return
        best = nearest


def _run(settings: SimulationSettings, name: str, report: Report) -> SimulationResult:
    progress = _ProgressReporter(name, settings.run.steps, report)
    run = SimulatedRun(settings, progress=progress.tick)
    result = run.run()
    if result is None:
        raise ComponentFailed("simulated run", f"ended before anything was measured: {run.ended}")
    report(f"{name}: {result.step_s:.1f} s per step")
    return result


class _ProgressReporter:
    """Reports the progress of a long run every few seconds."""

    EVERY_S = 5.0

    def __init__(self, name: str, steps: int, report: Report) -> None:
        self._name, self._steps, self._report = name, steps, report
        self._next = time.monotonic() + self.EVERY_S

    def tick(self, version: int, seconds: float) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self.EVERY_S
            self._report(f"{self._name}: step {version} of {self._steps}, {seconds:,.0f} s simulated")
