"""An independent ledger of a simulated run, kept from its events and actions over all starts of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy

from outpace.controller.events import (
    Action,
    Admit,
    BatchTrained,
    Checkpoint,
    CloseBatch,
    EngineJoined,
    EngineLost,
    Event,
    Finalize,
    GroupClosed,
)
from outpace.controller.scheduler import Scheduler
from outpace.simulator.cluster import SimulatedCluster
from outpace.simulator.driver import SimulationObserver
from simulator.checks import InvariantChecker

Visit = tuple[int, int]
"""Epoch and task."""


class VisitLedger(SimulationObserver):
    """How each visit ended; rolled back to the newest checkpoint when a start of the run ends."""

    def __init__(self) -> None:
        self.ends: dict[Visit, list[str]] = {}
        self.starts = 0
        self.losses: Counter[str] = Counter()  # by engine, within this start
        self.worst_excess = -1  # largest lag minus the max_lag of the start that trained it
        self._max_lag = 0
        self._saved: dict[Visit, list[str]] = {}
        self._visits: dict[int, Visit] = {}
        self._oldest: dict[int, int] = {}
        self._batch: tuple[int, ...] = ()

    def start_observers(self, scheduler: Scheduler, cluster: SimulatedCluster) -> Sequence[SimulationObserver]:
        """Begin a start of the run and return its observers."""
        self.starts += 1
        self._max_lag = scheduler.settings.max_lag
        self.ends = deepcopy(self._saved)
        self.losses.clear()
        pooled = set(scheduler.replay.groups)
        finished = set(cluster.groups) - pooled
        return [self, InvariantChecker(scheduler, finished, pooled), SlotChecker(cluster)]

    def trained(self, tasks: Iterable[int]) -> Counter[int]:
        """Return how often each task was trained."""
        counts = Counter(dict.fromkeys(tasks, 0))
        counts.update(task for (_, task), ends in self.ends.items() for end in ends if end == "trained")
        return counts

    def on_event(self, event: Event) -> None:
        match event:
            case GroupClosed(group, "finished"):
                self._oldest[group] = event.oldest
            case BatchTrained(version):
                for group in self._batch:
                    self._end(self._visits[group], "trained")
                    self.worst_excess = max(self.worst_excess, version - 1 - self._oldest[group] - self._max_lag)
            case EngineLost(engine):
                self.losses[engine] += 1
            case EngineJoined():
                pass

    def on_action(self, action: Action) -> None:
        match action:
            case Admit(group, task, epoch):
                self._visits[group] = (epoch, task)
            case CloseBatch(_, groups):
                self._batch = groups
            case Finalize(task, epoch, outcome):
                self._end((epoch, task), outcome)
            case Checkpoint():
                self._saved = deepcopy(self.ends)

    def _end(self, visit: Visit, end: str) -> None:
        ends = self.ends.setdefault(visit, [])
        ends.append(end)
        assert len(ends) == 1, f"visit {visit} ended more than once: {ends}"


class SlotChecker(SimulationObserver):
    """Checks that no request is lost or duplicated among engines and that no engine exceeds its slots."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def after_event(self) -> None:
        fleet, cluster = self._cluster.fleet, self._cluster
        running = [group for group in cluster.groups.values() if not group.over]
        in_flight = {episode for group in running for episode in group.episodes if episode.asking}
        assert sum(engine.load for engine in fleet.engines.values()) + len(fleet.unassigned) == len(in_flight)
        assert cluster.episodes_running == sum(group.left for group in running)
        for engine in fleet.engines.values():
            assert engine.running <= fleet.slots
            assert engine.serves or not engine.load
