"""Components that only take time, for `outpace.simulator.driver`: whole runs of the pure scheduler in microseconds.

Results and durations are separate: `outcome_rule` and `reward_rule` are pure functions of the admitted group, `fit`
(how well a batch fits its policy) is a function of the version, and `pace` may return any duration.
`InvariantChecker` checks the invariants after every event; `Trace` records what the run did.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from outpace.controller.events import (
    Action,
    Admit,
    Cancel,
    Checkpoint,
    CloseBatch,
    EngineJoined,
    EngineLoaded,
    EngineLost,
    Evaluate,
    Event,
    Finalize,
    Finish,
    GroupClosed,
    LoadFailed,
    LoadLate,
    LoadWeights,
    TrainChunk,
)
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recovery import RecoveredWork, decode_state
from outpace.controller.scheduler import Scheduler
from outpace.simulator.driver import LearnerWork, SendEvent, SimulatedDriver, SimulationObserver, VirtualClock
from outpace.tasks.order import TaskOrder
from outpace.types import FinishedGroup, GroupOrder, GroupReport, Outcome, Version
from simulator.checks import InvariantChecker

PLAIN = SchedulerSettings(
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

ActionKind = TypeVar("ActionKind", bound=Action)
Kind = Literal["group", "chunk", "step", "publish", "load", "evaluate"]
OutcomeRule = Callable[[Admit], Outcome]
Pace = Callable[[Kind, Action], float]
RewardRule = Callable[[Admit], tuple[float, float]]
"""Returns mean and standard deviation of a group's rewards."""
Fit = Callable[[Version], tuple[float, float]]
"""Returns effective sample size and mismatch KL of the batch that produced a version."""


def all_finish(_: Admit) -> Outcome:
    return "finished"


def random_outcomes(seed: int, filtered: float, failed: float) -> OutcomeRule:
    """Draw the outcome of each group as a pure function of the group."""

    def outcome_rule(admit: Admit) -> Outcome:
        draw = random.Random(f"{seed}/{admit}").random()
        return "filtered" if draw < filtered else "failed" if draw < filtered + failed else "finished"

    return outcome_rule


def random_rewards(seed: int) -> RewardRule:
    """Draw rewards as a pure function of the group: some too low, some too high, some all equal."""

    def reward_rule(admit: Admit) -> tuple[float, float]:
        rng = random.Random(f"{seed}/rewards/{admit}")
        return rng.choice((0.0, 0.5, 1.0)), rng.choice((0.0, 0.25, 0.5))

    return reward_rule


def fit_of(seed: int) -> Fit:
    """Draw how well batches fit: mostly well in some runs, hardly ever in others; a metric is occasionally NaN."""
    share = random.Random(seed).random()

    def fit(version: Version) -> tuple[float, float]:
        rng = random.Random(f"{seed}/fit/{version}")
        good = rng.random() < share
        return (0.9 if good else rng.choice((0.1, math.nan, 0.9))), (0.01 if good else 1.0)

    return fit


def steady(**seconds: float) -> Pace:
    """Return a fixed duration for each kind of work; one second by default."""
    return lambda kind, _: seconds.get(kind, 1.0)


def erratic(seed: int, tail: float = 0.8) -> Pace:
    """Draw long-tailed durations (a smaller `tail` is longer); speeds of components differ by orders of magnitude."""
    rng = random.Random(seed)
    speed: dict[Kind, float] = {
        kind: 10 ** rng.uniform(-2, 2) for kind in ("group", "chunk", "step", "publish", "load", "evaluate")
    }
    return lambda kind, _: speed[kind] * rng.paretovariate(tail)


def make_scheduler(settings: SchedulerSettings, seed: int = 0) -> Scheduler:
    return Scheduler(settings, TaskOrder(settings.tasks, seed, shuffle=True))


def resume(settings: SchedulerSettings, checkpoint: Checkpoint, seed: int = 0) -> Scheduler:
    """Restore a scheduler from the contents of a checkpoint file and, of the journal, the groups pooled for replay."""
    state = decode_state(json.loads(json.dumps(checkpoint.state)))
    pooled = tuple(trained_before(group) for group in state.replay)
    evaluated = settings.newest_evaluated(checkpoint.version - 1) if checkpoint.version else -1
    order = TaskOrder(settings.tasks, seed, shuffle=True)
    return Scheduler(settings, order, state, RecoveredWork(pooled=pooled), evaluated)


def trained_before(group: int) -> FinishedGroup:
    return FinishedGroup(GroupOrder(group, 0, 0, 0, 1), GroupReport(group, "", "finished"))


@dataclass
class Trace:
    """Record of what a run did."""

    actions: list[Action] = field(default_factory=list)
    admitted: dict[int, Admit] = field(default_factory=dict)
    max_lags: dict[int, int] = field(default_factory=dict)  # of the governor, at each group's admission
    oldest: dict[int, Version] = field(default_factory=dict)  # finished groups: version of their oldest token
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    chunks: list[TrainChunk] = field(default_factory=list)
    batches: list[CloseBatch] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    most_outstanding: int = 0
    finish: str | None = None
    seconds: float = 0.0

    def of(self, kind: type[ActionKind]) -> list[ActionKind]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def skipped(self) -> list[Finalize]:
        return [action for action in self.of(Finalize) if action.outcome == "skipped"]

    @property
    def assignments(self) -> list[tuple[Version, tuple[Admit | int, ...]]]:
        """Everything that determines what the learner computes: group, task and min_version in each chunk. Of replayed
        groups only the number: they may have been admitted by an earlier start."""
        return [
            (chunk.version, chunk.groups if chunk.replayed else tuple(self.admitted[group] for group in chunk.groups))
            for chunk in self.chunks
        ]

    @property
    def lags(self) -> list[tuple[Version, int]]:
        return [(batch.version, batch.version - self.oldest[group]) for batch in self.batches for group in batch.groups]


class TimedComponents:
    """Each result comes after the time that `pace` returns. With `faults`, engines die and rejoin, some loads never end
    and some loads fail, half of them torn."""

    def __init__(
        self,
        clock: VirtualClock,
        pace: Pace,
        outcome_rule: OutcomeRule,
        engines: dict[str, Version],
        seed: int,
        reward_rule: RewardRule,
        fit: Fit,
    ) -> None:
        self.served = engines
        self.fit = fit
        self.faults: Callable[[], float] | None = None  # seconds until an engine dies or rejoins
        self._lives = dict.fromkeys(engines, 0)
        self._clock = clock
        self._pace = pace
        self._outcome_rule = outcome_rule
        self._reward_rule = reward_rule
        self._rng = random.Random(seed)
        self._send_event: SendEvent = lambda _: None

    def connect(self, send_event: SendEvent) -> None:
        self._send_event = send_event

    def engines(self) -> dict[str, Version]:
        for engine in self.served:
            self._schedule_death(engine)
        return dict(self.served)

    def start(self, admit: Admit) -> None:
        outcome = self._outcome_rule(admit)

        def close() -> Event:
            # A token may come from any version between min_version and the newest that any engine has.
            oldest = self._rng.randint(admit.min_version, max(admit.min_version, *self.served.values()))
            reward, reward_std = (None, 0.0) if outcome == "failed" else self._reward_rule(admit)
            best = None if reward is None else reward + reward_std
            oldest = self._rng.choice((admit.min_version, oldest))
            return GroupClosed(admit.group, outcome, oldest, reward, reward_std, best)

        self._clock.after(self._pace("group", admit), lambda: self._send_event(close()))

    def cancel(self, group: int) -> None:
        """The group is still reported, like a group that had finished when its cancellation arrived."""

    def load(self, engine: str, version: Version) -> None:
        life = self._lives[engine]

        def loaded() -> None:
            if self._lives[engine] != life:
                return
            if fails:
                self._send_event(LoadFailed(engine, version, torn=self._rng.random() < 0.5))
                return
            self.served[engine] = version
            self._send_event(EngineLoaded(engine, version))

        def late() -> None:
            if self._lives[engine] == life:
                self._send_event(LoadLate(engine, version))

        endless = self.faults is not None and self._rng.random() < 0.2  # the engine dies before the load is done
        fails = self.faults is not None and self._rng.random() < 0.3
        if endless and self._rng.random() < 0.5:
            self._clock.after(self._pace("load", LoadWeights(engine, version)), late)
        self._clock.after(self._pace("load", LoadWeights(engine, version)) * (1e6 if endless else 1), loaded)

    def learner_seconds(self, work: LearnerWork) -> float:
        kind: Kind = "chunk" if isinstance(work, TrainChunk) else "step" if isinstance(work, CloseBatch) else "publish"
        return self._pace(kind, work)

    def evaluation_seconds(self, version: Version) -> float:
        return self._pace("evaluate", Evaluate(version))

    def _schedule_death(self, engine: str) -> None:
        if self.faults is not None:
            self._clock.after(self.faults(), lambda: self._die(engine))

    def _die(self, engine: str) -> None:
        assert self.faults is not None
        self._lives[engine] += 1
        self._clock.after(self.faults(), lambda: self._rejoin(engine))
        self._send_event(EngineLost(engine))

    def _rejoin(self, engine: str) -> None:
        self._schedule_death(engine)
        self._send_event(EngineJoined(engine))


class Recorder(SimulationObserver):
    """Writes the trace from events and actions."""

    def __init__(self, trace: Trace, scheduler: Scheduler) -> None:
        self.trace = trace
        self._scheduler = scheduler
        self._cancelled: set[int] = set()

    def on_event(self, event: Event) -> None:
        if isinstance(event, GroupClosed) and event.group not in self._cancelled:
            self.trace.outcomes[event.group] = event.outcome
            if event.outcome == "finished":
                self.trace.oldest[event.group] = event.oldest

    def on_action(self, action: Action) -> None:
        trace = self.trace
        trace.actions.append(action)
        match action:
            case Admit(group):
                trace.admitted[group] = action
                trace.max_lags[group] = self._scheduler.max_lag
            case Cancel(group):
                self._cancelled.add(group)
                trace.cancelled.append(group)
            case TrainChunk():
                trace.chunks.append(action)
            case CloseBatch():
                trace.batches.append(action)
            case Checkpoint():
                trace.checkpoints.append(action)
            case Finish(reason):
                trace.finish = reason
            case _:
                pass


class Simulation:
    def __init__(
        self,
        scheduler: Scheduler,
        pace: Pace,
        outcome_rule: OutcomeRule = all_finish,
        engines: int = 1,
        served: Version = 0,
        seed: int = 0,
        reward_rule: RewardRule | None = None,
        fit: Fit = lambda _: (1.0, 0.0),
        faults: Callable[[], float] | None = None,
    ) -> None:
        self.trace = Trace()
        self.clock = VirtualClock()
        names = {f"e{number}": served for number in range(engines)}
        self.components = TimedComponents(
            self.clock, pace, outcome_rule, names, seed, reward_rule or random_rewards(0), fit
        )
        self.components.faults = faults
        self.checker = InvariantChecker(scheduler, trained=scheduler.replay.groups)
        self._observers: list[SimulationObserver] = [self.checker, Recorder(self.trace, scheduler)]
        self._driver = SimulatedDriver(scheduler, self.clock, self.components, self._observers)
        self.send_event = self._driver.send_event

    def observe(self, observer: SimulationObserver) -> None:
        self._observers.append(observer)

    def run(self, until: Callable[[Trace], bool] = lambda _: False) -> Trace:
        """Run to the end, or until `until(trace)` is true; call again to continue. Raises `Deadlock` if stuck."""
        self._driver.run(until=lambda: until(self.trace))
        self.trace.seconds = self.clock.now
        self.trace.most_outstanding = self.checker.most_outstanding
        return self.trace
