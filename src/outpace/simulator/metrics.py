"""Metrics of a simulated run.

Measured between two steps, after the pipeline has filled:

    T    seconds per step
    T*   = (W_g + W_t) / N, a lower bound of T for any schedule on N devices
    W_g  device-seconds to generate the step's tokens on engines with all slots in use, including filtered groups: no
         schedule can tell that a group is uniform without sampling it
    W_t  device-seconds to train on the step's tokens

Waste is sampled tokens that are never used: failed groups, cancelled groups, and completions lost with their engine or
worker. A step that is redone after a learner failure counts once; the time of the first try is included in T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outpace.controller import events as ev
from outpace.simulator.cluster import SamplingCost, SimulatedGroup
from outpace.simulator.driver import SimulationObserver
from outpace.simulator.settings import SimulationSettings
from outpace.types import Version


@dataclass(frozen=True)
class ClusterTotals:
    """Cumulative totals at one time."""

    moment: float
    engine_busy_s: float
    engine_up_s: float  # total engine-seconds with devices
    slot_s: float
    learner_busy_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """One trained batch."""

    trained: float
    work: SamplingCost
    lags: tuple[int, ...]  # lag of each group's oldest token
    lag_sum: float  # sum over sampled tokens


class RunMetrics(SimulationObserver):
    """Measures a run. `read` returns the current totals. `groups` holds the known groups, until they are over."""

    def __init__(self, first: Version, read: Callable[[], ClusterTotals]) -> None:
        self._first = first  # measurement starts after this step
        self._read = read
        self.groups: dict[int, SimulatedGroup] = {}
        self.steps: dict[Version, SimulatedStep] = {}
        self.began: ClusterTotals | None = None
        self.ended: ClusterTotals | None = None
        self.filtered = SamplingCost()
        self.waste: dict[str, float] = {"failed": 0.0, "given up": 0.0, "lost": 0.0}
        self._batch: tuple[int, ...] = ()

    @property
    def measured(self) -> list[SimulatedStep]:
        return [step for version, step in self.steps.items() if version > self._first]

    def on_action(self, action: ev.Action) -> None:
        if isinstance(action, ev.CloseBatch):
            self._batch = action.groups

    def on_event(self, event: ev.Event) -> None:
        match event:
            case ev.BatchTrained(version):
                self._trained(version)
            case ev.GroupClosed(group, outcome) if outcome != "finished" and group in self.groups:
                over = self.groups.pop(group)
                self._count_lost(over)
                if self.began is None:
                    return
                if outcome == "failed":
                    self.waste["failed"] += over.useful.sampled
                else:
                    self.filtered.add(over.useful)

    def record_cancelled(self, group: SimulatedGroup) -> None:
        self._count_lost(group)
        if self.began is not None:
            self.waste["given up"] += group.useful.sampled

    def record_abandoned(self, groups: Iterable[SimulatedGroup]) -> None:
        """Count the unfinished groups of an ended start as lost."""
        for group in groups:
            if not group.over:
                group.lost.add(group.useful)
                self._count_lost(group)

    def _count_lost(self, group: SimulatedGroup) -> None:
        if self.began is not None:
            self.waste["lost"] += group.lost.sampled
        group.lost = SamplingCost()

    def _trained(self, version: Version) -> None:
        groups = [self.groups.pop(group) for group in self._batch]
        work = SamplingCost()
        for group in groups:
            self._count_lost(group)
            work.add(group.useful)
        lag_sum = sum((version - 1) * group.useful.sampled - group.versions for group in groups)
        trained = sum(group.trained_tokens for group in groups)
        lags = tuple(version - 1 - group.oldest for group in groups)
        self.steps[version] = SimulatedStep(trained, work, lags, lag_sum)
        self.ended = self._read()
        if self.began is None and version >= self._first:
            self.began = self.ended


@dataclass(frozen=True)
class SimulationResult:
    """Results of one simulated run."""

    generating: int  # devices
    training: int  # devices
    engines: int
    steps: int  # measured steps
    seconds: float  # duration of the measured steps
    step_s: float  # T
    ideal_s: float  # T*
    efficiency: float
    sampled_tok_s: float
    trained_tok_s: float
    lag_mean: float  # mean over tokens
    lag_p95: int  # over groups, by oldest token
    lag_max: int
    waste: float  # fraction of sampled tokens
    waste_by: dict[str, float]
    learner_wait: float  # fraction of time
    engine_wait: float
    slots_used: float
    running_mean: float  # concurrent sequences
    running_most: int  # concurrent episodes
    deaths: dict[str, int]
    restarts: int
    ended: str  # reason
    simulated_s: float
    cpu_s: float
    in_turns: bool = False  # colocated: all devices generate, then all train

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.step_s


def compute_result(metrics: RunMetrics, settings: SimulationSettings, **rest: object) -> SimulationResult | None:
    """Compute the results of a run, or None if it ended before anything was measured."""
    measured, began, ended = metrics.measured, metrics.began, metrics.ended
    if not measured or began is None or ended is None or ended.moment <= began.moment:
        return None
    seconds = ended.moment - began.moment
    useful = SamplingCost(metrics.filtered.sampled, metrics.filtered.prefilled)
    for step in measured:
        useful.add(step.work)
    trained = sum(step.trained for step in measured)
    up_s = ended.engine_up_s - began.engine_up_s
    devices = settings.cluster.training or 0
    work_s = _generation_s(useful, settings) + trained * settings.learner.token_s
    ideal_s = work_s / (devices + up_s / seconds * settings.cluster.per_engine)
    lags = sorted(lag for step in measured for lag in step.lags)
    sampled = sum(step.work.sampled for step in measured)
    wasted = sum(metrics.waste.values())
    return SimulationResult(
        generating=settings.cluster.devices - devices,
        training=devices,
        steps=len(measured),
        seconds=seconds,
        step_s=seconds / len(measured),
        ideal_s=ideal_s / len(measured),
        efficiency=ideal_s / seconds,
        sampled_tok_s=(useful.sampled + wasted) / seconds,
        trained_tok_s=trained / seconds,
        lag_mean=max(0.0, sum(step.lag_sum for step in measured) / sampled),  # rounding can make it -0
        lag_p95=lags[min(len(lags) - 1, int(0.95 * len(lags)))],
        lag_max=lags[-1],
        waste=wasted / (useful.sampled + wasted),
        waste_by={kind: tokens / (useful.sampled + wasted) for kind, tokens in metrics.waste.items()},
        learner_wait=1 - (ended.learner_busy_s - began.learner_busy_s) / seconds,
        engine_wait=1 - (ended.engine_busy_s - began.engine_busy_s) / up_s if up_s else 0.0,  # 0 if no engine was up
        slots_used=(ended.slot_s - began.slot_s) / (up_s * settings.engine.slots) if up_s else 0.0,
        running_mean=(ended.slot_s - began.slot_s) / seconds,
        **rest,  # type: ignore[arg-type]
    )


def _generation_s(cost: SamplingCost, settings: SimulationSettings) -> float:
    """Return the device-seconds on engines with all slots in use."""
    engine = settings.engine
    token_s = (engine.step_s + engine.sequence_s * engine.slots) / engine.slots
    return (cost.sampled * token_s + cost.prefilled / engine.prefill_tok_s) * settings.cluster.per_engine
