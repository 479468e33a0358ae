"""What must hold in every run, looked at after every event, from books that the core has no part in.

- Slots: groups that run or are finished are as many as the core thinks, and never more than its settings allow.
- A group is admitted once, runs, and is closed, cancelled or (finished) trained once; only what was trained and not
  retired is replayed.
- The learner is given one version at a time, in order, and is idle when the run ends.
- A snapshot stays as long as an engine loads it or an evaluation reads it.
- A group's stamp is one that every engine which serves can meet.
"""

from __future__ import annotations

from collections.abc import Iterable

from outpace.pipeline.core import Core
from outpace.pipeline.events import (
    Action,
    Admit,
    BatchTrained,
    Cancel,
    Checkpoint,
    ChunkTrained,
    CloseBatch,
    EngineJoined,
    EngineLoaded,
    EngineLost,
    Evaluate,
    EvaluationDone,
    Event,
    Finish,
    GroupClosed,
    LagChanged,
    LoadFailed,
    LoadLate,
    LoadWeights,
    Publish,
    Published,
    Retire,
    Started,
    TrainChunk,
)
from outpace.simulate.conductor import Observer
from outpace.types import Version


class Checker(Observer):
    """`finished` and `trained`: groups of an earlier start that this one goes on with, to be trained or replayed."""

    def __init__(self, core: Core, finished: Iterable[int] = (), trained: Iterable[int] = ()) -> None:
        self.core = core
        self.settings = core.settings
        self.most_outstanding = 0
        self._version = core.version
        self._admitted: set[int] = set()
        self._running: set[int] = set()
        self._finished = set(finished)  # and not trained
        self._trained = set(trained)  # and not retired
        self._batch: tuple[int, ...] = ()
        self._learner_at_work = 0
        self._buffers: set[Version] = set()
        self._served: dict[str, Version] = {}  # by engines that were loaded, in lockstep also before they died
        self._stale: set[str] = set()  # engines that do not serve
        self._loading: dict[str, Version] = {}
        self._behind: set[str] = set()  # engines whose load has failed, or takes too long
        self._evaluating: Version | None = None
        self._over = False
        self._inherited = len(self._finished)

    # ---------------------------------------------------------------------------------------------------------- events

    def heard(self, event: Event) -> None:
        match event:
            case GroupClosed(group, outcome):
                if group in self._running:  # else it was cancelled
                    self._running.remove(group)
                    self._finished |= {group} if outcome == "finished" else set()
            case BatchTrained(version):
                self._version = version
                self._finished -= set(self._batch)
                self._trained |= set(self._batch)
                self._learner_at_work -= 1
            case ChunkTrained() | Published():
                self._learner_at_work -= 1
            case EvaluationDone(version):
                assert version in self._buffers, f"version {version} was overwritten while it was being evaluated"
                self._evaluating = None
            case _:
                self._heard_of_engines(event)

    def _heard_of_engines(self, event: Event) -> None:
        match event:
            case Started(engines):
                self._served = {name: version for name, version in engines.items() if version == self._version}
                self._stale = set(engines) - set(self._served)
            case EngineLoaded(engine, version):
                assert version in self._buffers, f"version {version} was overwritten while it was being loaded"
                assert self._loading.pop(engine) == version
                self._served[engine] = version
                self._stale.discard(engine)
                self._behind.discard(engine)
            case LoadLate(engine, version):
                if self._loading.get(engine) == version:
                    self._behind.add(engine)
            case LoadFailed(engine, version, torn):
                assert self._loading.pop(engine) == version
                self._behind.add(engine)
                if torn:
                    self._does_not_serve(engine)
            case EngineLost(engine):
                self._loading.pop(engine, None)
                self._does_not_serve(engine)
            case EngineJoined(engine):
                assert engine not in self._loading
                self._stale.add(engine)

    def _does_not_serve(self, engine: str) -> None:
        self._behind.discard(engine)
        self._stale.add(engine)
        if not self.settings.deterministic:
            self._served.pop(engine, None)

    # --------------------------------------------------------------------------------------------------------- actions

    def ordered(self, action: Action) -> None:
        assert not self._over, f"{action} after the end"
        match action:
            case Admit():
                self._check_admission(action)
            case Cancel(group):
                self._running.remove(group)
            case TrainChunk() | CloseBatch() | Publish():
                self._check_learner(action)
            case Retire(groups):
                assert set(groups) <= self._trained
                self._trained -= set(groups)
            case LoadWeights(engine, version):
                self._check_load(engine, version)
            case Evaluate(version):
                assert version in self._buffers
                assert self._evaluating is None
                self._evaluating = version
            case Checkpoint(version):
                assert version <= self._version
            case LagChanged(lag, by):
                assert self.settings.governor is not None
                assert by in (-1, 1)
                assert min(self.settings.governor.min_lag, self.settings.max_lag) <= lag <= self.settings.max_lag
            case Finish(reason):
                assert reason == "stopped" or self._evaluating is None
                assert not self._learner_at_work, "the learner was still at work"
                self._over = True

    def _check_admission(self, admit: Admit) -> None:
        assert admit.group not in self._admitted
        assert not (self._stale and self.settings.deterministic), "in lockstep all engines serve, or none"
        oldest = self._oldest_counted_on()
        assert admit.min_version <= oldest if admit.recorded else admit.min_version == oldest
        self._admitted.add(admit.group)
        self._running.add(admit.group)

    def _oldest_counted_on(self) -> Version:
        """Of the versions that serve, without those that are too old and behind, if there is any other."""
        if self.settings.deterministic:
            return min(self._served.values())
        floor = self._version - (0 if self._version < self.settings.warmup_steps else self.core.max_lag)
        counted = [v for engine, v in self._served.items() if v >= floor or engine not in self._behind]
        return min(counted, default=min(self._served.values()))

    def _check_learner(self, action: TrainChunk | CloseBatch | Publish) -> None:
        assert action.version == self._version
        self._learner_at_work += 1
        match action:
            case TrainChunk(_, groups, replayed):
                assert set(groups) <= (self._trained if replayed else self._finished)
            case CloseBatch(_, groups):
                self._batch = groups
            case Publish(version, leased):
                assert set(leased) <= self._buffers
                assert {*self._loading.values()} <= set(leased), "a snapshot that is being loaded is not leased"
                self._buffers = {*leased, version}

    def _check_load(self, engine: str, version: Version) -> None:
        assert version in self._buffers
        assert engine not in self._loading
        self._loading[engine] = version
        serves_already = engine in self._served and self._served[engine] != version
        if serves_already and (self.settings.update == "drain" or self.settings.deterministic):
            assert not self._running, "weights change under running groups"

    # ----------------------------------------------------------------------------------------------------------- slots

    def settled(self) -> None:
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
