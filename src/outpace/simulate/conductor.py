"""The core over modelled parts on a virtual clock: what `pipeline.driver` is over real ones.

    clock ─▶ a part is done ─▶ tell(event) ─▶ core.handle ─▶ actions ─▶ parts (they ask the clock to be called later)

Invariants
- The learner does one thing at a time, in the order given.
- When no part has anything under way and the core has not finished, nobody can end the wait: that is a deadlock.
- Observers hear every event before the core and every action before the parts; they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outpace.pipeline.core import Core
from outpace.pipeline.events import (
    Action,
    Admit,
    BatchTrained,
    Cancel,
    ChunkTrained,
    CloseBatch,
    Evaluate,
    EvaluationDone,
    Event,
    Finish,
    LoadWeights,
    Publish,
    Published,
    Started,
    TrainChunk,
)
from outpace.simulate.clock import Clock
from outpace.types import Version

Tell = Callable[[Event], None]
LearnerWork = TrainChunk | CloseBatch | Publish


class Deadlock(AssertionError):
    """Everybody waits and nothing is under way."""


class Parts(Protocol):
    """Engines, workers and a learner, as far as the controller can see them.

    Answers come later, by what `connect` was given, never from inside a call."""

    def connect(self, tell: Tell) -> None: ...

    def engines(self) -> dict[str, Version]:
        """The version that each engine serves at the start."""
        ...

    def start(self, admit: Admit) -> None:
        """Answer: GroupClosed."""
        ...

    def cancel(self, group: int) -> None: ...

    def load(self, engine: str, version: Version) -> None:
        """Answer: EngineLoaded, unless the engine is lost before."""
        ...

    def learner_seconds(self, work: LearnerWork) -> float: ...

    def fit(self, version: Version) -> tuple[float, float]:
        """Effective sample size and mismatch KL of the batch that made this version."""
        ...

    def evaluation_seconds(self, version: Version) -> float: ...


class Observer:
    """Hears everything and changes nothing."""

    def heard(self, event: Event) -> None: ...

    def ordered(self, action: Action) -> None: ...

    def settled(self) -> None:
        """An event was handled and all it called for was ordered."""


class Conductor:
    def __init__(self, core: Core, clock: Clock, parts: Parts, observers: Sequence[Observer] = ()) -> None:
        self.core = core
        self.clock = clock
        self.finish: str | None = None
        self.learner_free = clock.now  # when the learner has done all it was told
        self._parts = parts
        self._observers = observers
        self._started = False
        self._ended = False
        parts.connect(self.tell)

    def run(self, until: Callable[[], bool] = lambda: False) -> str | None:
        """To the end, or until somebody says so (call again to go on); returns why the core finished."""
        if not self._started:
            self._started = True
            self.tell(Started(self._parts.engines()))
        while self.finish is None and not self._ended and not until():
            if not self.clock.advance():
                raise Deadlock(f"deadlock: {self.core.waiting_reason()}")
        return self.finish

    def end(self) -> None:
        """The controller is gone: it hears nothing any more."""
        self._ended = True

    def tell(self, event: Event) -> None:
        if self.finish is not None or self._ended:
            return
        for observer in self._observers:
            observer.heard(event)
        for action in self.core.handle(event):
            assert self.finish is None, f"{action} after the end"
            for observer in self._observers:
                observer.ordered(action)
            self._carry_out(action)
        for observer in self._observers:
            observer.settled()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Admit():
                self._parts.start(action)
            case Cancel(group):
                self._parts.cancel(group)
            case LoadWeights(engine, version):
                self._parts.load(engine, version)
            case TrainChunk(version):
                self._learn(action, lambda: ChunkTrained(version))
            case CloseBatch(version):
                self._learn(action, lambda: BatchTrained(version + 1, *self._parts.fit(version + 1)))
            case Publish(version):
                self._learn(action, lambda: Published(version))
            case Evaluate(version):
                self.clock.after(self._parts.evaluation_seconds(version), lambda: self.tell(EvaluationDone(version)))
            case Finish(reason):
                self.finish = reason
            case _:  # for people, or for whoever keeps checkpoints
                pass

    def _learn(self, work: LearnerWork, event: Callable[[], Event]) -> None:
        self.learner_free = max(self.learner_free, self.clock.now) + self._parts.learner_seconds(work)
        self.clock.at(self.learner_free, lambda: self.tell(event()))
