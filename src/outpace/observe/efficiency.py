"""How close a run comes to the limit: T*/T.

With W_g and W_t the useful core-seconds of generation and of training on N cores (or devices), no schedule takes
less than T* = (W_g + W_t) / N. `efficiency` is T*/T with T the wall time.

What is counted, plainly
- W_g: the processor seconds an engine spent computing for training rollouts, less the share of sampled
  tokens that were thrown away (failed, dropped and requeued groups). Filtered groups are not thrown away: no
  schedule can know a group teaches nothing without sampling it.
- W_t: the processor seconds the learner spent on forward, backward and optimizer.
- Evaluation is not counted as useful, and the time it takes is in T.
- Processor seconds are what the operating system counted for the part's process: a thread that waits for its
  siblings or for a core does not count, one that waits for memory or computes padding does. T*/T judges the schedule,
  not the kernels.
- Where engine and learner share an accelerator nobody counts its seconds for either: T*/T is then left out rather
  than guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from outpace.types import EngineStats, LearnerStats


@dataclass
class Work:
    """Running totals of one part, or of a span of time."""

    busy_s: float = 0.0
    eval_busy_s: float = 0.0
    core_s: float = 0.0  # processor seconds of busy_s
    tokens: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(Work)))


@dataclass(frozen=True)
class Efficiency:
    """The account of a span of time."""

    seconds: float  # T
    ideal_s: float | None  # T*; None: the work cannot be counted
    efficiency: float | None  # T*/T
    engine_share: float  # of the wall time, the mean engine computes for training rollouts
    eval_share: float  # ... for evaluation
    learner_share: float  # of the wall time, the learner computes
    engine_wait_s: float  # of the mean engine
    trainer_wait_s: float
    sampled_tokens: float
    trained_tokens: float

    def metrics(self) -> dict[str, float]:
        """Under the names of the contract."""
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
    """Training time of earlier starts of a run, and T* of that time; None: not known."""

    seconds: float = 0.0
    ideal_s: float | None = None

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Earlier:
        """As of the last step that was recorded."""
        seconds, efficiency = metrics.get("time/wall_s", 0.0), metrics.get("efficiency")
        return cls(seconds, None if efficiency is None else efficiency * seconds)


class WorkAccount:
    """Adds up what engines and learner say of themselves, across restarts of a part.

    A part reports totals since it started, so a total that falls is a restart: what came before is kept.
    `lap` accounts for the time since the last lap, `whole` for all of it.
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
        """The newest word of these engines; of engines not named, the last word stands."""
        for name, word in stats.items():
            work = Work(word.busy_s, word.eval_busy_s, word.core_s, word.tokens)
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
        """Count from here on: neither time nor work before this belongs to the account, but for what earlier starts of
        the run have counted."""
        self._earlier = earlier
        self._began = self._lap_began = self._clock()
        self._origin = self._lap_start = self._totals()

    def wasted(self, tokens: float) -> None:
        """So many sampled tokens were thrown away."""
        self._wasted += tokens

    def lap(self) -> Efficiency:
        now = self._clock()
        start, self._lap_start = self._lap_start, self._totals()
        began, self._lap_began = self._lap_began, now
        return self._account(now - began, start)

    def whole(self) -> Efficiency:
        """Of the run, with its earlier starts: seconds and T*/T. The rest is of this start."""
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
