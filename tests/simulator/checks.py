"""Scheduler invariants, checked after every event from an independent record of events and actions.

- Slots: the number of running and finished groups matches the scheduler's, and never exceeds its configured limits.
- A group is admitted once, runs, and is closed, cancelled or (if finished) trained on once. Only groups that were
  trained on and not retired are replayed.
- The learner works on one version at a time, in order, and is idle when the run ends.
- A snapshot is kept while an engine loads it or an evaluation reads it.
- Every serving engine can meet a group's `min_version`.
"""

from __future__ import annotations

from collections.abc import Iterable

from outpace.controller import events as ev
from outpace.controller.scheduler import Scheduler
from outpace.simulator.driver import SimulationObserver
from outpace.types import Version


class InvariantChecker(SimulationObserver):
    """Checks the invariants with assertions. `finished` and `trained` are groups carried over from an earlier start, to
    be trained on or replayed."""

    def __init__(self, core: Scheduler, finished: Iterable[int] = (), trained: Iterable[int] = ()) -> None:
        self.core = core
        self.settings = core.settings
        self.most_outstanding = 0
        self._version = core.version
        self._admitted: set[int] = set()
        self._running: set[int] = set()
        self._finished = set(finished)  # finished and not trained on
        self._trained = set(trained)  # trained on and not retired
        self._batch: tuple[int, ...] = ()
        self._learner_busy = 0
        self._buffers: set[Version] = set()
        self._served: dict[str, Version] = {}  # by loaded engines; in deterministic mode also by failed ones
        self._stale: set[str] = set()  # engines that do not serve
        self._loading: dict[str, Version] = {}
        self._behind: set[str] = set()  # engines whose load failed or is late
        self._evaluating: Version | None = None
        self._ended = False
        self._inherited = len(self._finished)

    # ---------------------------------------------------------------------------------------------------------- events

    def on_event(self, event: ev.Event) -> None:
        match event:
            case ev.GroupClosed(group, outcome):
                if group in self._running:  # otherwise it was cancelled
                    self._running.remove(group)
                    self._finished |= {group} if outcome == "finished" else set()
            case ev.BatchTrained(version):
                self._version = version
                self._finished -= set(self._batch)
                self._trained |= set(self._batch)
                self._learner_busy -= 1
            case ev.ChunkTrained() | ev.Published():
                self._learner_busy -= 1
            case ev.EvaluationDone(version):
                assert version in self._buffers, f"version {version} was overwritten while it was being evaluated"
                self._evaluating = None
            case _:
                self._on_engine_event(event)

    def _on_engine_event(self, event: ev.Event) -> None:
        match event:
            case ev.RunStarted(engines):
                self._served = {name: version for name, version in engines.items() if version == self._version}
                self._stale = set(engines) - set(self._served)
            case ev.EngineLoaded(engine, version):
                assert version in self._buffers, f"version {version} was overwritten while it was being loaded"
                assert self._loading.pop(engine) == version
                self._served[engine] = version
                self._stale.discard(engine)
                self._behind.discard(engine)
            case ev.LoadLate(engine, version):
                if self._loading.get(engine) == version:
                    self._behind.add(engine)
            case ev.LoadFailed(engine, version, torn):
                assert self._loading.pop(engine) == version
                self._behind.add(engine)
                if torn:
                    self._stop_serving(engine)
            case ev.EngineLost(engine):
                self._loading.pop(engine, None)
                self._stop_serving(engine)
            case ev.EngineJoined(engine):
                assert engine not in self._loading
                self._stale.add(engine)

    def _stop_serving(self, engine: str) -> None:
        self._behind.discard(engine)
        self._stale.add(engine)
        if not self.settings.deterministic:
            self._served.pop(engine, None)

    # --------------------------------------------------------------------------------------------------------- actions

    def on_action(self, action: ev.Action) -> None:
        assert not self._ended, f"{action} after the end"
        match action:
            case ev.Admit():
                self._check_admission(action)
            case ev.Cancel(group):
                self._running.remove(group)
            case ev.TrainChunk() | ev.CloseBatch() | ev.Publish():
                self._check_learner(action)
            case ev.Retire(groups):
                assert set(groups) <= self._trained
                self._trained -= set(groups)
            case ev.LoadWeights(engine, version):
                self._check_load(engine, version)
            case ev.Evaluate(version):
                assert version in self._buffers
                assert self._evaluating is None
                self._evaluating = version
            case ev.Checkpoint(version):
                assert version <= self._version
            case ev.LagChanged(lag, by):
                assert self.settings.governor is not None
                assert by in (-1, 1)
                assert min(self.settings.governor.min_lag, self.settings.max_lag) <= lag <= self.settings.max_lag
            case ev.Finish(reason):
                assert reason == "stopped" or self._evaluating is None
                assert not self._learner_busy, "the learner was still busy"
                self._ended = True

    def _check_admission(self, admit: ev.Admit) -> None:
        assert admit.group not in self._admitted
        assert not (self._stale and self.settings.deterministic), "in deterministic mode all engines serve, or none"
        oldest = self._oldest_expected()
        assert admit.min_version <= oldest if admit.recorded else admit.min_version == oldest
        self._admitted.add(admit.group)
        self._running.add(admit.group)

    def _oldest_expected(self) -> Version:
        """Return the oldest version that serves, ignoring engines that are both too old and behind if others exist."""
        if self.settings.deterministic:
            return min(self._served.values())
        floor = self._version - (0 if self._version < self.settings.warmup_steps else self.core.max_lag)
        expected = [v for engine, v in self._served.items() if v >= floor or engine not in self._behind]
        return min(expected, default=min(self._served.values()))

    def _check_learner(self, action: ev.TrainChunk | ev.CloseBatch | ev.Publish) -> None:
        assert action.version == self._version
        self._learner_busy += 1
        match action:
            case ev.TrainChunk(_, groups, replayed):
                assert set(groups) <= (self._trained if replayed else self._finished)
            case ev.CloseBatch(_, groups):
                self._batch = groups
            case ev.Publish(version, leased):
                assert set(leased) <= self._buffers
                assert {*self._loading.values()} <= set(leased), "a snapshot that is being loaded is not leased"
                self._buffers = {*leased, version}

    def _check_load(self, engine: str, version: Version) -> None:
        assert version in self._buffers
        assert engine not in self._loading
        self._loading[engine] = version
        serves_already = engine in self._served and self._served[engine] != version
        if serves_already and (self.settings.update == "drain" or self.settings.deterministic):
            assert not self._running, "weights change while groups are running"

    # ----------------------------------------------------------------------------------------------------------- slots

    def after_event(self) -> None:
        settings = self.settings
        assert self.core.running == len(self._running)
        assert self.core.finished == len(self._finished)
        assert len(self._running) * settings.group_size <= max(settings.max_running, settings.group_size)
        outstanding = len(self._running) + len(self._finished)
        self.most_outstanding = max(self.most_outstanding, outstanding)
        assert outstanding <= (settings.max_lag + 1) * settings.groups_per_step
        if not settings.deterministic:
            bound = max((1 + settings.depth) * settings.groups_per_step + 1, self._inherited + 1)
            assert outstanding < bound
