"""Efficiency of a run (T*/T), and the measurements of time and resources behind it.

With W_g and W_t the useful core-seconds of generation and training on N cores (or devices), no schedule takes less
than T* = (W_g + W_t) / N. `efficiency` is T*/T, where T is the wall-clock time.

Definitions
- W_g: CPU seconds the engines spent on training rollouts, less the share of sampled tokens that were discarded
  (failed, dropped and requeued groups). Filtered groups count as useful: no schedule can tell that a group has no
  learning signal without sampling it.
- W_t: CPU seconds the learner spent on forward, backward and optimizer.
- Evaluation is not useful work, but its time is part of T.
- CPU seconds are those the operating system counts for the component's process: a thread that waits for other threads
  or for a core does not count, a thread that waits for memory or computes padding does. T*/T measures the schedule,
  not the kernels.
- If engine and learner share an accelerator, its time cannot be attributed to either: T*/T is omitted, not estimated.

Also here
- `Timeline`: spans of every component as a Chrome trace (`chrome://tracing`, Perfetto). The newest `cap` spans are
  kept in memory and written once at the end; overlapping spans of a component are drawn in separate lanes.
- `ProcessTree`: memory, threads and open files of a process and its descendants. Memory is the proportional set size:
  a page shared by n processes counts 1/n in each, so the sum over a tree counts every page once, shared weight buffers
  included. Where the system does not report it, the unique set size is used.
- `Stopwatch`: busy seconds and CPU seconds inside one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from outpace.types import EngineStats, LearnerStats


@dataclass
class Work:
    """Work of one component, in total or over a period."""

    busy_s: float = 0.0
    eval_busy_s: float = 0.0
    core_s: float = 0.0  # CPU seconds within busy_s
    tokens: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(Work)))


@dataclass(frozen=True)
class Efficiency:
    """Efficiency over a period."""

    seconds: float  # T
    ideal_s: float | None  # T*; None: the work cannot be measured
    efficiency: float | None  # T*/T
    engine_share: float  # share of wall-clock time spent on training rollouts, mean over engines
    eval_share: float  # ... on evaluation
    learner_share: float  # share of wall-clock time the learner is busy
    engine_wait_s: float  # mean over engines
    trainer_wait_s: float
    sampled_tokens: float
    trained_tokens: float

    def metrics(self) -> dict[str, float]:
        """Return the values under their documented metric names."""
        seconds = max(self.seconds, 1e-9)
        known = {} if self.efficiency is None else {"efficiency": self.efficiency}
        return known | {
            "share/engine": self.engine_share,
            "share/eval": self.eval_share,
            "share/learner": self.learner_share,
            "wait/engine_s": self.engine_wait_s,
            "wait/trainer_s": self.trainer_wait_s,
            "throughput/sampled_tok_s": self.sampled_tokens / seconds,
            "throughput/trained_tok_s": self.trained_tokens / seconds,
            "time/step_s": self.seconds,
        }


@dataclass(frozen=True)
class Earlier:
    """Training time of earlier starts of a run, and T* for that time (None if unknown)."""

    seconds: float = 0.0
    ideal_s: float | None = None

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Earlier:
        """Build from the metrics of the last recorded step."""
        seconds, efficiency = metrics.get("time/wall_s", 0.0), metrics.get("efficiency")
        return cls(seconds, None if efficiency is None else efficiency * seconds)


class WorkAccount:
    """Computes efficiency from the statistics of engines and learner, across restarts of a component.

    Components report totals since their start, so a total that falls means a restart: the earlier total is kept.
    `lap` covers the time since the previous lap, `run_total` the whole run.
    """

    def __init__(self, cores: int | None, clock: Callable[[], float]) -> None:
        assert cores is None or cores >= 1
        self._cores = cores
        self._clock = clock
        self._began = self._lap_began = clock()
        self._engines: dict[str, Work] = {}  # totals since the engine's last restart
        self._engine_past = Work()
        self._learner = Work()
        self._learner_past = Work()
        self._wasted = 0.0
        self._earlier = Earlier()
        self._origin = self._lap_start = (Work(), Work(), 0.0)

    def engines(self, stats: Mapping[str, EngineStats]) -> None:
        """Record the latest statistics of these engines. Engines not included keep their last ones."""
        for name, engine in stats.items():
            work = Work(engine.busy_s, engine.eval_busy_s, engine.core_s, engine.tokens)
            before = self._engines.get(name)
            if before is not None and work.tokens < before.tokens:
                self._engine_past += before
            self._engines[name] = work

    def learner(self, stats: LearnerStats) -> None:
        work = Work(stats.busy_s, 0.0, stats.core_s, stats.tokens)
        if work.busy_s < self._learner.busy_s:
            self._learner_past += self._learner
        self._learner = work

    def start(self, earlier: Earlier = Earlier()) -> None:  # noqa: B008 (it is immutable)
        """Start counting. Time and work before this call do not count, except those of `earlier` starts of the run."""
        self._earlier = earlier
        self._began = self._lap_began = self._clock()
        self._origin = self._lap_start = self._totals()

    def wasted(self, tokens: float) -> None:
        """Record sampled tokens that were discarded."""
        self._wasted += tokens

    def lap(self) -> Efficiency:
        """Return the efficiency since the previous lap and start a new one."""
        now = self._clock()
        start, self._lap_start = self._lap_start, self._totals()
        began, self._lap_began = self._lap_began, now
        return self._account(now - began, start)

    def whole(self) -> Efficiency:
        """Return the efficiency of the run. Seconds and T*/T include earlier starts, everything else is of this start
        only."""
        own, earlier = self._account(self._clock() - self._began, self._origin), self._earlier
        if not earlier.seconds:
            return own
        seconds = own.seconds + earlier.seconds
        known = own.ideal_s is not None and earlier.ideal_s is not None
        ideal_s = (own.ideal_s or 0.0) + (earlier.ideal_s or 0.0) if known else None
        return replace(own, seconds=seconds, ideal_s=ideal_s, efficiency=None if ideal_s is None else ideal_s / seconds)

    def _totals(self) -> tuple[Work, Work, float]:
        generation = sum(self._engines.values(), self._engine_past)
        return generation, self._learner + self._learner_past, self._wasted

    def _account(self, seconds: float, start: tuple[Work, Work, float]) -> Efficiency:
        generation, training, wasted = self._totals()
        generation, training, wasted = generation - start[0], training - start[1], wasted - start[2]
        span = max(seconds, 1e-9)
        engines = max(len(self._engines), 1)
        useful = 1.0 - min(wasted / generation.tokens, 1.0) if generation.tokens > 0 else 1.0
        ideal_s = None if self._cores is None else (generation.core_s * useful + training.core_s) / self._cores
        busy_s, eval_s = generation.busy_s / engines, generation.eval_busy_s / engines
        return Efficiency(
            seconds=seconds,
            ideal_s=ideal_s,
            efficiency=None if ideal_s is None else ideal_s / span,
            engine_share=busy_s / span,
            eval_share=eval_s / span,
            learner_share=training.busy_s / span,
            engine_wait_s=max(seconds - busy_s - eval_s, 0.0),
            trainer_wait_s=max(seconds - training.busy_s, 0.0),
            sampled_tokens=generation.tokens,
            trained_tokens=training.tokens,
        )
