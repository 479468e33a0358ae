"""One simulated run, over as many starts as its faults require.

As in a real run, a learner failure ends the current start. After the restart time, the next start resumes from the
latest checkpoint, with the finished groups from the journal and the recorded turns of unfinished groups.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outpace.controller import events as ev
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recovery import RecoveredWork, SchedulerState, choose_recovered, decode_state, recorded
from outpace.controller.scheduler import Scheduler
from outpace.controller.supervisor import RestartPolicy
from outpace.runtime.components import RestartSettings
from outpace.simulator.cluster import SimulatedCluster, SimulatedGroup, engine_count
from outpace.simulator.driver import SimulatedDriver, SimulationObserver, VirtualClock
from outpace.simulator.metrics import ClusterTotals, RunMetrics, SimulationResult, compute_result
from outpace.simulator.settings import SimulationSettings
from outpace.tasks.order import TaskOrder
from outpace.types import FinishedGroup, GroupReport, Version


@dataclass(frozen=True)
class StartState:
    """The state that a start of the run begins with."""

    core: Scheduler
    finished: dict[int, SimulatedGroup] = field(default_factory=dict)  # including those that may be replayed
    unfinished: dict[int, SimulatedGroup] = field(default_factory=dict)  # with recorded turns, by prompt visit


class SimulatedJournal(SimulationObserver):
    """State that survives a learner failure: the latest checkpoint, and finished groups not yet covered by one."""

    def __init__(self) -> None:
        self.checkpoint: ev.Checkpoint | None = None
        self.groups: dict[int, SimulatedGroup] = {}  # groups of the current start
        self._entries: dict[int, SimulatedGroup] = {}  # finished groups
        self._trained: dict[int, Version] = {}  # the version that each of them was trained into, if any
        self._batch: tuple[int, ...] = ()
        self._compacted: Version = 0  # version of the checkpoint at the last compaction

    def on_event(self, event: ev.Event) -> None:
        match event:
            case ev.GroupClosed(number, "finished") if number in self.groups:
                self._entries[number] = self.groups[number]
            case ev.BatchTrained(version):
                self._trained |= dict.fromkeys(self._batch, version)

    def on_action(self, action: ev.Action) -> None:
        match action:
            case ev.CloseBatch():
                self._batch = action.groups
            case ev.Checkpoint():
                self.checkpoint = action
                self._compact(decode_state(_as_on_disk(action)))

    def _compact(self, state: SchedulerState) -> None:
        """Drop groups whose training a checkpoint covers, unless they may be replayed. As in the real, segmented
        journal, they stay until the next checkpoint."""
        for number, version in list(self._trained.items()):
            if version <= self._compacted and number not in state.replay:
                del self._entries[number], self._trained[number]
        self._compacted = state.version

    def resume(self, settings: SchedulerSettings, order: TaskOrder, turns: bool) -> StartState:
        """Return the state to resume from: the latest checkpoint, or a fresh start if there is none. With `turns`, it
        includes the recorded turns of unfinished groups."""
        state = None if self.checkpoint is None else decode_state(_as_on_disk(self.checkpoint))
        known = state or SchedulerState(order.count, order.seed, order.shuffle)
        recovered = choose_recovered(map(_kept, self._entries.values()), known, settings)
        unfinished = self._unfinished(known.version) if turns else {}
        min_versions = {position: group.admit.min_version for position, group in unfinished.items()}
        recovered = replace(recovered, recorded=recorded(min_versions, recovered.finished, known, settings))
        self._retain(recovered)
        return StartState(Scheduler(settings, order, state, recovered), dict(self._entries), unfinished)

    def _unfinished(self, version: Version) -> dict[int, SimulatedGroup]:
        """Return unfinished groups with recorded turns, by prompt visit, without those sampled from versions newer than
        the checkpoint, which no longer exist."""
        return {
            group.admit.position: group
            for group in self.groups.values()
            if not group.over and 0 <= group.newest <= version
        }

    def _retain(self, recovered: RecoveredWork) -> None:
        retained = {kept.order.group for kept in (*recovered.finished, *recovered.pooled)}
        self._entries = {number: group for number, group in self._entries.items() if number in retained}
        self._trained = {kept.order.group: self._trained[kept.order.group] for kept in recovered.pooled}


def _as_on_disk(checkpoint: ev.Checkpoint) -> dict[str, object]:
    stored: dict[str, object] = json.loads(json.dumps(checkpoint.state))
    return stored


def _kept(group: SimulatedGroup) -> FinishedGroup:
    report = GroupReport(
        group.admit.group, "", "finished", oldest=group.oldest, newest=group.newest, rewards=[0.0, 1.0]
    )
    return FinishedGroup(group.admit, report)


MAX_FUTILE_STARTS = 20
"""End the run after this many learner failures without a checkpoint in between: it would never finish."""

CHECK_EVERY = 256
"""Events between two progress checks."""

Progress = Callable[[Version, float], None]
"""Called with completed steps and simulated seconds."""
MakeObservers = Callable[[Scheduler, SimulatedCluster], Sequence[SimulationObserver]]
"""Returns additional observers for one start of the run."""


class SimulatedRun:
    """One simulated run. `run()` returns its result; `ended` is the reason why it ended."""

    def __init__(
        self,
        settings: SimulationSettings,
        make_observers: MakeObservers = lambda *_: (),
        progress: Progress = lambda *_: None,
        core: SchedulerSettings | None = None,
    ) -> None:
        self._settings = settings
        self._core_settings = core or scheduler_settings(settings)
        self._order = TaskOrder(self._core_settings.tasks, settings.run.seed, shuffle=True)
        self._make_observers = make_observers
        self._progress = progress
        self._rng = random.Random(settings.run.seed)
        self._past = ClusterTotals(0.0, 0.0, 0.0, 0.0, 0.0)
        self._deaths = {"engine": 0, "worker": 0, "learner": 0, "taken away": 0}
        self._restarts = 0
        self._most_running = 0
        self._given_up = ""
        self._events_seen = 0
        self._parts: SimulatedCluster
        self.clock = VirtualClock()
        self.journal = SimulatedJournal()
        self.metrics = RunMetrics(max(1, settings.run.steps // 4), self._read)
        self.ended = ""

    def run(self) -> SimulationResult | None:
        """Run to the end. Returns None if the run ended before anything was measured."""
        began = time.process_time()
        start_state = StartState(Scheduler(self._core_settings, self._order))
        futile, checkpoint = 0, None
        while not self.ended:
            self.ended = self._start(start_state)
            self._finish_start()
            if not self.ended:
                futile = futile + 1 if self.journal.checkpoint is checkpoint else 0
                checkpoint = self.journal.checkpoint
                if futile >= MAX_FUTILE_STARTS:
                    self.ended = f"the learner died {futile} times without a checkpoint in between"
                start_state = self._next_start()
        return compute_result(
            self.metrics,
            self._settings,
            engines=engine_count(self._settings),
            running_most=self._most_running,
            deaths=self._deaths,
            restarts=self._restarts,
            ended=self.ended,
            simulated_s=self.clock.now,
            cpu_s=time.process_time() - began,
        )

    def _next_start(self) -> StartState:
        """Resume after a learner failure and the restart time."""
        self.clock = VirtualClock(self.clock.now + self._settings.faults.restart_s)
        start_state = self.journal.resume(self._core_settings, self._order, self._settings.checkpoint.turns)
        kept = {id(group) for group in start_state.unfinished.values()}
        self.metrics.record_abandoned(group for group in self.journal.groups.values() if id(group) not in kept)
        return start_state

    def _start(self, start_state: StartState) -> str:
        """Run one start. Returns why the run ended, or "" if the learner failed."""
        core = start_state.core
        supervise = self._settings.supervise
        supervisor = RestartPolicy(RestartSettings(supervise.restarts, supervise.window_s))
        self._parts = parts = SimulatedCluster(
            self._settings, core.settings, self.clock, supervisor, self._rng, core.version, self._give_up,
            self.metrics.record_cancelled,
        )  # fmt: skip
        parts.groups |= start_state.finished
        parts.recorded |= start_state.unfinished
        self.metrics.groups = self.journal.groups = parts.groups
        observers = (self.journal, self.metrics, *self._make_observers(core, parts))
        self._driver = driver = SimulatedDriver(core, self.clock, parts, observers)
        self._schedule_learner_failure()
        finish = driver.run(until=lambda: self._is_stalled(core))
        self._restarts += supervisor.restarts
        return finish or self._given_up

    def _is_stalled(self, core: Scheduler) -> bool:
        """Return whether no step has completed for `run.stall_s`. Checked only once per CHECK_EVERY events."""
        self._events_seen += 1
        if self._events_seen % CHECK_EVERY:
            return False
        self._progress(core.version, self.clock.now)
        since = self.metrics.ended.moment if self.metrics.ended else 0.0
        if self.clock.now - since <= self._settings.run.stall_s:
            return False
        self._given_up = f"no step completed for {self._settings.run.stall_s:g} s: {core.waiting_reason()}"
        return True

    def _schedule_learner_failure(self) -> None:
        if (mtbf := self._settings.faults.learner_mtbf_s) is not None:
            self.clock.after(self._rng.expovariate(1 / mtbf), self._learner_failed)

    def _learner_failed(self) -> None:
        self._deaths["learner"] += 1
        self._driver.end()

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self._driver.end()

    # --------------------------------------------------------------------------------------------------------- totals

    def _finish_start(self) -> None:
        """Add the totals of this start to those of the run."""
        parts = self._parts
        self._past = self._read()
        self._deaths["engine"] += parts.fleet.deaths
        self._deaths["worker"] += parts.worker_deaths
        self._deaths["taken away"] += parts.fleet.gone
        self._most_running = max(self._most_running, parts.most_running)

    def _read(self) -> ClusterTotals:
        past, fleet = self._past, self._parts.fleet
        for engine in fleet.engines.values():
            engine.update_work()
        engines = fleet.engines.values()
        return ClusterTotals(
            moment=self.clock.now,
            engine_busy_s=past.engine_busy_s + sum(engine.busy_s for engine in engines),
            engine_up_s=past.engine_up_s + fleet.present_s(),
            slot_s=past.slot_s + sum(engine.slot_s for engine in engines),
            learner_busy_s=past.learner_busy_s + self._parts.learner_busy_s,
        )


def scheduler_settings(settings: SimulationSettings) -> SchedulerSettings:
    """Return the scheduler settings of a simulation."""
    slots = settings.engine.slots * engine_count(settings)
    return SchedulerSettings.of(
        settings,
        group_size=settings.workload.group_size,
        max_running=settings.pacing.max_running or 2 * slots,
        tasks=settings.workload.tasks,
        epochs=None,
        eval_every=0,
        eval_enabled=False,
    )
