"""Simulated driver: runs the real scheduler over simulated components on a virtual clock.

    clock ─▶ component done ─▶ send_event(event) ─▶ scheduler.handle ─▶ actions ─▶ components ─▶ calls on the clock

It is the counterpart of `controller.driver`, which runs the scheduler over real components.

Invariants
- The learner does one thing at a time, in the order given.
- If no call is scheduled and the scheduler has not finished, nothing can make progress: that is a `Deadlock`.
- Observers see every event before the scheduler and every action before the components. They change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from outpace.controller import events as ev
from outpace.controller.scheduler import Scheduler
from outpace.types import Version

TimedCall = Callable[[], None]


class VirtualClock:
    """Virtual clock with a queue of scheduled calls. Nothing sleeps: time jumps to the next call.

    Calls scheduled for the same time run in the order in which they were scheduled, so a run is a pure function of its
    settings and seed."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._scheduled = 0
        self._pending: list[tuple[float, int, TimedCall]] = []

    def after(self, seconds: float, call: TimedCall) -> None:
        self.at(self.now + seconds, call)

    def at(self, moment: float, call: TimedCall) -> None:
        assert moment >= self.now, "cannot schedule a call in the past"
        self._scheduled += 1
        heappush(self._pending, (moment, self._scheduled, call))

    def advance(self) -> bool:
        """Run the next scheduled call. Returns False if none is left."""
        if not self._pending:
            return False
        self.now, _, call = heappop(self._pending)
        call()
        return True


SendEvent = Callable[[ev.Event], None]
LearnerWork = ev.TrainChunk | ev.CloseBatch | ev.Publish


class Deadlock(AssertionError):
    """The scheduler has not finished, and no call is scheduled that could make progress."""


class ClusterModel(Protocol):
    """Engines, workers and a learner, as the controller sees them.

    Results are sent later as events, through the function passed to `connect`, never from inside a call."""

    def connect(self, send_event: SendEvent) -> None: ...

    def engines(self) -> dict[str, Version]:
        """Return the version that each engine serves at the start."""
        ...

    def start(self, admit: ev.Admit) -> None:
        """Start a group. Sends `GroupClosed` when it ends."""
        ...

    def cancel(self, group: int) -> None: ...

    def load(self, engine: str, version: Version) -> None:
        """Load weights. Sends `EngineLoaded`, unless the engine is lost first."""
        ...

    def learner_seconds(self, work: LearnerWork) -> float: ...

    def fit(self, version: Version) -> tuple[float, float]:
        """Return effective sample size and mismatch KL of the batch that produced this version."""
        ...

    def evaluation_seconds(self, version: Version) -> float: ...


class SimulationObserver:
    """Base class of observers, which see every event and action and change nothing."""

    def on_event(self, event: ev.Event) -> None: ...

    def on_action(self, action: ev.Action) -> None: ...

    def after_event(self) -> None:
        """Called after an event was handled and all its actions were carried out."""


class SimulatedDriver:
    """Sends events to the scheduler and carries out its actions on the simulated components."""

    def __init__(
        self, core: Scheduler, clock: VirtualClock, parts: ClusterModel, observers: Sequence[SimulationObserver] = ()
    ) -> None:
        self.core = core
        self.clock = clock
        self.finish: str | None = None
        self.learner_free = clock.now  # time at which the learner finishes its queued work
        self._parts = parts
        self._observers = observers
        self._started = False
        self._ended = False
        parts.connect(self.send_event)

    def run(self, until: Callable[[], bool] = lambda: False) -> str | None:
        """Run to the end, or until `until()` is true; call again to continue. Returns why the scheduler finished."""
        if not self._started:
            self._started = True
            self.send_event(ev.RunStarted(self._parts.engines()))
        while self.finish is None and not self._ended and not until():
            if not self.clock.advance():
                raise Deadlock(f"deadlock: {self.core.waiting_reason()}")
        return self.finish

    def end(self) -> None:
        """Stop the controller: it receives no further events."""
        self._ended = True

    def send_event(self, event: ev.Event) -> None:
        if self.finish is not None or self._ended:
            return
        for observer in self._observers:
            observer.on_event(event)
        for action in self.core.handle(event):
            assert self.finish is None, f"{action} after the end"
            for observer in self._observers:
                observer.on_action(action)
            self._carry_out(action)
        for observer in self._observers:
            observer.after_event()

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Admit():
                self._parts.start(action)
            case ev.Cancel(group):
                self._parts.cancel(group)
            case ev.LoadWeights(engine, version):
                self._parts.load(engine, version)
            case ev.TrainChunk(version):
                self._learn(action, lambda: ev.ChunkTrained(version))
            case ev.CloseBatch(version):
                self._learn(action, lambda: ev.BatchTrained(version + 1, *self._parts.fit(version + 1)))
            case ev.Publish(version):
                self._learn(action, lambda: ev.Published(version))
            case ev.Evaluate(version):
                self.clock.after(
                    self._parts.evaluation_seconds(version), lambda: self.send_event(ev.EvaluationDone(version))
                )
            case ev.Finish(reason):
                self.finish = reason
            case _:  # for observers only
                pass

    def _learn(self, work: LearnerWork, event: Callable[[], ev.Event]) -> None:
        self.learner_free = max(self.learner_free, self.clock.now) + self._parts.learner_seconds(work)
        self.clock.at(self.learner_free, lambda: self.send_event(event()))
