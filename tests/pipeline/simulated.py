"""Modelled parts on a virtual clock, to drive the pure core through whole runs in microseconds.

What happens (outcomes, rewards) and how long it takes (durations) are separate: `fate` and `judge` are pure functions
of the group admitted, `fit` (how well a batch fits its policy) of the version, `pace` may be anything. The simulation
keeps its own books and checks on every event what must always hold.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from outpace.pipeline.core import Core, CoreSettings
from outpace.pipeline.events import (
    Action,
    Admit,
    BatchTrained,
    Cancel,
    Checkpoint,
    ChunkTrained,
    CloseBatch,
    EngineLoaded,
    EpochEnded,
    EpochStarted,
    Evaluate,
    EvaluationDone,
    Event,
    Finish,
    GroupClosed,
    LagChanged,
    LoadWeights,
    Publish,
    Published,
    Retire,
    Skip,
    Started,
    TrainChunk,
)
from outpace.tasks.order import Order
from outpace.types import Outcome, Version

PLAIN = CoreSettings(
    groups_per_step=4,
    group_size=2,
    max_lag=1,
    depth=1.0,
    chunk_groups=2,
    max_running=1000,
    on_stale="wait",
    warmup_steps=0,
    publish_every=1,
    update="inflight",
    deterministic=False,
    steps=6,
    epochs=None,
    tasks=10,
    eval_every=0,
    eval_enabled=False,
    checkpoint_every=0,
)

Some = TypeVar("Some", bound=Action)
Kind = Literal["group", "chunk", "step", "publish", "load", "evaluate"]
Fate = Callable[[Admit], Outcome]
Pace = Callable[[Kind, Action], float]
Judge = Callable[[Admit], tuple[float, float]]
"""Mean and spread of a group's rewards."""
Fit = Callable[[Version], tuple[float, float]]
"""Effective sample size and mismatch KL of the batch that made a version."""


def all_finish(_: Admit) -> Outcome:
    return "finished"


def fate_of(seed: int, filtered: float, failed: float) -> Fate:
    """Each group's outcome, drawn from what the group is and nothing else."""

    def fate(admit: Admit) -> Outcome:
        draw = random.Random(f"{seed}/{admit}").random()
        return "filtered" if draw < filtered else "failed" if draw < filtered + failed else "finished"

    return fate


def judge_of(seed: int) -> Judge:
    """Rewards drawn from what the group is and nothing else: some too low, some too high, some all alike."""

    def judge(admit: Admit) -> tuple[float, float]:
        rng = random.Random(f"{seed}/rewards/{admit}")
        return rng.choice((0.0, 0.5, 1.0)), rng.choice((0.0, 0.25, 0.5))

    return judge


def fit_of(seed: int) -> Fit:
    """Batches that fit, in some runs mostly, in others hardly ever; one figure in a while is no number at all."""
    share = random.Random(seed).random()

    def fit(version: Version) -> tuple[float, float]:
        rng = random.Random(f"{seed}/fit/{version}")
        good = rng.random() < share
        return (0.9 if good else rng.choice((0.1, math.nan, 0.9))), (0.01 if good else 1.0)

    return fit


def steady(**seconds: float) -> Pace:
    """The same duration for all of a kind; a second unless told."""
    return lambda kind, _: seconds.get(kind, 1.0)


def erratic(seed: int) -> Pace:
    """Long-tailed durations, and parts whose speeds differ by orders of magnitude."""
    rng = random.Random(seed)
    speed: dict[Kind, float] = {
        kind: 10 ** rng.uniform(-2, 2) for kind in ("group", "chunk", "step", "publish", "load", "evaluate")
    }
    return lambda kind, _: speed[kind] * rng.paretovariate(0.8)


def core_of(settings: CoreSettings, seed: int = 0) -> Core:
    return Core(settings, Order(settings.tasks, seed, shuffle=True))


def resume(settings: CoreSettings, checkpoint: Checkpoint, seed: int = 0) -> Core:
    """A core restored from what a checkpoint file would hold."""
    return Core.restore(settings, Order(settings.tasks, seed, shuffle=True), json.loads(json.dumps(checkpoint.state)))


@dataclass
class Trace:
    """What a run did."""

    actions: list[Action] = field(default_factory=list)
    admitted: dict[int, Admit] = field(default_factory=dict)
    max_lags: dict[int, int] = field(default_factory=dict)  # the governor's at each group's admission
    oldest: dict[int, Version] = field(default_factory=dict)  # finished groups: their oldest token
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    chunks: list[TrainChunk] = field(default_factory=list)
    batches: list[CloseBatch] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    most_outstanding: int = 0
    finish: str | None = None
    seconds: float = 0.0

    def of(self, kind: type[Some]) -> list[Some]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def assignments(self) -> list[tuple[Version, tuple[Admit, ...]]]:
        """Everything that fixes what a learner computes: which group, task and stamp went where."""
        return [(chunk.version, tuple(self.admitted[group] for group in chunk.groups)) for chunk in self.chunks]

    @property
    def lags(self) -> list[tuple[Version, int]]:
        return [(batch.version, batch.version - self.oldest[group]) for batch in self.batches for group in batch.groups]


class Simulation:
    def __init__(
        self,
        core: Core,
        pace: Pace,
        fate: Fate = all_finish,
        engines: int = 1,
        served: Version = 0,
        seed: int = 0,
        judge: Judge | None = None,
        fit: Fit = lambda _: (1.0, 0.0),
    ) -> None:
        self.core = core
        self.settings = core.settings
        self.trace = Trace()
        self.now = 0.0
        self._pace = pace
        self._fate = fate
        self._judge = judge or judge_of(0)
        self._fit = fit
        self._rng = random.Random(seed)
        self._engines = {f"e{number}": served for number in range(engines)}
        self._loading: set[str] = set()
        self._evaluating: set[Version] = set()
        self._events: list[tuple[float, int, Callable[[], Event]]] = []
        self._scheduled = 0
        self._learner_free = 0.0
        self._learner_version = core.version
        self._buffers: set[Version] = set()
        self._running: set[int] = set()
        self._finished: set[int] = set()  # and not trained
        self._trained: set[int] = set()
        self._retired: set[int] = set()

    def run(self, until: Callable[[Trace], bool] = lambda _: False) -> Trace:
        """To the end, or until the trace says so (call again to go on). Waiting for nothing at all is a deadlock."""
        if not self.trace.actions:
            self.tell(Started(dict(self._engines)))
        while self.trace.finish is None and not until(self.trace):
            assert self._events, f"deadlock: {self.core.waiting_reason()}"
            self.now, _, event = heapq.heappop(self._events)
            self.tell(event())
        self.trace.seconds = self.now
        return self.trace

    def tell(self, event: Event) -> list[Action]:
        self._note(event)
        actions = self.core.handle(event)
        for action in actions:
            assert self.trace.finish is None, f"{action} after the end"
            self.trace.actions.append(action)
            self._carry_out(action)
        self._check_slots()
        return actions

    def _note(self, event: Event) -> None:
        """Keep the simulation's own books."""
        match event:
            case GroupClosed(group, outcome) if group in self._running:
                self._running.remove(group)
                self.trace.outcomes[group] = outcome
                if outcome == "finished":
                    self._finished.add(group)
                    self.trace.oldest[group] = event.oldest
            case BatchTrained(version):
                self._learner_version = version
                self._finished -= set(self.trace.batches[-1].groups)
                self._trained |= set(self.trace.batches[-1].groups)
            case EngineLoaded(engine, version):
                assert version in self._buffers, f"version {version} was overwritten while it was being loaded"
                self._engines[engine] = version
                self._loading.remove(engine)
            case EvaluationDone(version):
                assert version in self._buffers, f"version {version} was overwritten while it was being evaluated"
                self._evaluating.remove(version)
            case _:
                pass

    def _carry_out(self, action: Action) -> None:
        match action:
            case Admit():
                self._admit(action)
            case Cancel(group):
                assert group in self._running
                self._running.remove(group)
                self.trace.cancelled.append(group)
            case TrainChunk(version):
                assert version == self._learner_version
                assert set(action.groups) <= (self._trained - self._retired if action.replayed else self._finished)
                self.trace.chunks.append(action)
                self._learn("chunk", action, lambda: ChunkTrained(version))
            case CloseBatch(version):
                assert version == self._learner_version
                self.trace.batches.append(action)
                self._learn("step", action, lambda: BatchTrained(version + 1, *self._fit(version + 1)))
            case Retire(groups):
                assert self.settings.replay is not None
                assert set(groups) <= self._trained - self._retired
                self._retired |= set(groups)
            case Publish(version, leased):
                assert version == self._learner_version
                assert set(leased) <= self._buffers
                self._buffers = {*leased, version}
                self._learn("publish", action, lambda: Published(version))
            case LoadWeights(engine, version):
                self._load(engine, version)
            case Evaluate(version):
                assert version in self._buffers
                assert not self._evaluating
                self._evaluating.add(version)
                self._after(self._pace("evaluate", action), lambda: EvaluationDone(version))
            case Checkpoint(version):
                assert version == self._learner_version
                self.trace.checkpoints.append(action)
            case Finish(reason):
                assert reason == "stopped" or not self._evaluating
                assert self._learner_free <= self.now, "the learner was still at work"
                self.trace.finish = reason
            case LagChanged(lag, by):
                assert self.settings.governor is not None
                assert by in (-1, 1)
                assert min(self.settings.governor.min_lag, self.settings.max_lag) <= lag <= self.settings.max_lag
            case EpochStarted() | EpochEnded() | Skip():
                pass

    def _admit(self, admit: Admit) -> None:
        assert admit.group not in self.trace.admitted
        assert admit.min_version == min(self._engines.values())
        self.trace.admitted[admit.group] = admit
        self.trace.max_lags[admit.group] = self.core.max_lag
        self._running.add(admit.group)
        outcome = self._fate(admit)

        def close() -> Event:
            # A token may come from any version between the stamp and the newest that any engine has.
            oldest = self._rng.randint(admit.min_version, max(self._engines.values()))
            reward, spread = (None, 0.0) if outcome == "failed" else self._judge(admit)
            return GroupClosed(admit.group, outcome, self._rng.choice((admit.min_version, oldest)), reward, spread)

        self._after(self._pace("group", admit), close)

    def _load(self, engine: str, version: Version) -> None:
        assert version in self._buffers
        assert engine not in self._loading
        self._loading.add(engine)
        if self.settings.update == "drain" or self.settings.deterministic:
            assert not self._running, "weights change under running groups"
        self._after(self._pace("load", LoadWeights(engine, version)), lambda: EngineLoaded(engine, version))

    def _learn(self, kind: Kind, action: Action, event: Callable[[], Event]) -> None:
        """The learner does one thing at a time, in the order given."""
        self._learner_free = max(self._learner_free, self.now) + self._pace(kind, action)
        self._after(self._learner_free - self.now, event)

    def _after(self, seconds: float, event: Callable[[], Event]) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (self.now + seconds, self._scheduled, event))

    def _check_slots(self) -> None:
        settings = self.settings
        assert self.core.running == len(self._running)
        assert self.core.finished == len(self._finished)
        assert len(self._running) * settings.group_size <= max(settings.max_running, settings.group_size)
        outstanding = len(self._running) + len(self._finished)
        self.trace.most_outstanding = max(self.trace.most_outstanding, outstanding)
        assert outstanding <= (settings.max_lag + 1) * settings.groups_per_step
        if not settings.deterministic:
            assert outstanding < (1 + settings.depth) * settings.groups_per_step + 1
