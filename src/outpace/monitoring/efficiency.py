"""Efficiency of a run (T*/T), and the measurements of time and resources behind it.

Let w_g and w_t be the core-seconds (on GPUs: device-seconds) that sampling and training cost per sample. Then N cores
finish at most N / (w_g + w_t) samples per second. No schedule trains S samples in less than T* = S (w_g + w_t) / N.
`efficiency` is T*/T, where T is the wall-clock time: the samples per second of the run, relative to that limit.

`outpace bench end-to-end` measures w_g and w_t with engine and learner running alone. A run can only measure them while
both run and possibly slow each other down, so its T*/T is an upper bound on the benchmark's.

Definitions
- S w_g = W_g: seconds the engines spent on training rollouts, less the share of sampled tokens that were discarded
  (failed, dropped and requeued groups). Filtered groups count as useful: no schedule can tell that a group has no
  learning signal without sampling it.
- S w_t = W_t: seconds the learner spent on forward, backward and optimizer.
- Evaluation is not useful work, but its time is part of T.
- On the CPU, seconds are the CPU time of the component's process: waiting for other threads or for a core does not
  count, but waiting for memory and computing padding do. T*/T measures the schedule, not the kernels.
- On a GPU, seconds are the component's busy time. While engine and learner are both busy on one GPU, they take turns,
  so W_g + W_t is capped at N T.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from outpace.hardware.cores import ComputeUnits
from outpace.monitoring.line_file import write_atomically
from outpace.types import EngineStats, LearnerStats


@dataclass
class WorkTotals:
    """Work of one component, in total or over a period."""

    busy_s: float = 0.0
    eval_busy_s: float = 0.0
    core_s: float = 0.0  # CPU seconds within busy_s
    tokens: float = 0.0

    def __add__(self, other: WorkTotals) -> WorkTotals:
        return WorkTotals(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(WorkTotals)))

    def __sub__(self, other: WorkTotals) -> WorkTotals:
        return WorkTotals(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(WorkTotals)))


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
            "idle/engine_s": self.engine_wait_s,
            "idle/learner_s": self.trainer_wait_s,
            "throughput/sampled_tok_s": self.sampled_tokens / seconds,
            "throughput/trained_tok_s": self.trained_tokens / seconds,
            "time/step_s": self.seconds,
        }


@dataclass(frozen=True)
class EarlierTraining:
    """Training time of earlier starts of a run, and T* for that time (None if unknown)."""

    seconds: float = 0.0
    ideal_s: float | None = None

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> EarlierTraining:
        """Build from the metrics of the last recorded step."""
        seconds, efficiency = metrics.get("time/wall_s", 0.0), metrics.get("efficiency")
        return cls(seconds, None if efficiency is None else efficiency * seconds)


class EfficiencyTracker:
    """Computes efficiency from the statistics of engines and learner, across restarts of a component.

    Components report totals since their start, so a total that decreases means a restart: the earlier total is kept.
    `lap` covers the time since the previous lap, `run_total` the whole run.
    """

    def __init__(self, units: ComputeUnits | None, clock: Callable[[], float]) -> None:
        """`units`: None if unknown; then there is no efficiency."""
        self._units = units
        self._clock = clock
        self._began = self._lap_began = clock()
        self._engines: dict[str, WorkTotals] = {}  # totals since the engine's last restart
        self._engine_past = WorkTotals()
        self._learner = WorkTotals()
        self._learner_past = WorkTotals()
        self._wasted = 0.0
        self._earlier = EarlierTraining()
        self._origin = self._lap_start = (WorkTotals(), WorkTotals(), 0.0)

    def engines(self, stats: Mapping[str, EngineStats]) -> None:
        """Record the latest statistics of these engines. Engines not included keep their last ones."""
        for name, engine in stats.items():
            work = WorkTotals(engine.busy_s, engine.eval_busy_s, engine.core_s, engine.tokens)
            before = self._engines.get(name)
            if before is not None and work.tokens < before.tokens:
                self._engine_past += before
            self._engines[name] = work

    def learner(self, stats: LearnerStats) -> None:
        work = WorkTotals(stats.busy_s, 0.0, stats.core_s, stats.tokens)
        if work.busy_s < self._learner.busy_s:
            self._learner_past += self._learner
        self._learner = work

    def start(self, earlier: EarlierTraining = EarlierTraining()) -> None:  # noqa: B008 (it is immutable)
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

    def run_total(self) -> Efficiency:
        """Return the efficiency of the run. Seconds and T*/T include earlier starts; the rest covers this start."""
        own, earlier = self._account(self._clock() - self._began, self._origin), self._earlier
        if not earlier.seconds:
            return own
        seconds = own.seconds + earlier.seconds
        known = own.ideal_s is not None and earlier.ideal_s is not None
        ideal_s = (own.ideal_s or 0.0) + (earlier.ideal_s or 0.0) if known else None
        return replace(own, seconds=seconds, ideal_s=ideal_s, efficiency=None if ideal_s is None else ideal_s / seconds)

    def _totals(self) -> tuple[WorkTotals, WorkTotals, float]:
        generation = sum(self._engines.values(), self._engine_past)
        return generation, self._learner + self._learner_past, self._wasted

    def _account(self, seconds: float, start: tuple[WorkTotals, WorkTotals, float]) -> Efficiency:
        generation, training, wasted = self._totals()
        generation, training, wasted = generation - start[0], training - start[1], wasted - start[2]
        span = max(seconds, 1e-9)
        engines = max(len(self._engines), 1)
        useful = 1.0 - min(wasted / generation.tokens, 1.0) if generation.tokens > 0 else 1.0
        ideal_s = self._ideal_s(generation.core_s * useful, training.core_s, seconds)
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

    def _ideal_s(self, generation_s: float, training_s: float, seconds: float) -> float | None:
        if (units := self._units) is None:
            return None
        ideal_s = (generation_s * units.per_engine + training_s * units.per_learner) / units.count
        return min(ideal_s, seconds) if units.are_gpus else ideal_s


MAX_SPANS = 100_000


class Span(NamedTuple):
    component: str
    name: str
    start: float
    end: float
    notes: dict[str, Any]


class Timeline:
    """Collects spans and writes them as a Chrome trace (`chrome://tracing`, Perfetto). The newest `cap` spans are kept.
    Overlapping spans of a component are drawn in separate rows. `start` and `end` are readings of `clock`."""

    def __init__(self, cap: int = MAX_SPANS, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.dropped = 0
        self._origin = clock()
        self._spans: deque[Span] = deque(maxlen=cap)

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, component: str, name: str, start: float, end: float, **notes: Any) -> None:
        """Record that `component` did `name` from `start` to `end`."""
        if len(self._spans) == self._spans.maxlen:
            self.dropped += 1
        self._spans.append(Span(component, name, start, max(end, start), notes))

    @contextmanager
    def measure(self, component: str, name: str, **notes: Any) -> Iterator[None]:
        """Record the body of the `with` block as a span."""
        start = self.clock()
        try:
            yield
        finally:
            self.span(component, name, start, self.clock(), **notes)

    def write(self, path: str | Path) -> None:
        """Write the trace. Blocking; do not call it on an event loop."""
        events = self._events()
        head = json.dumps({"displayTimeUnit": "ms", "otherData": {"dropped": self.dropped}})[:-1]
        write_atomically(Path(path), _trace_text(head, events))

    def _events(self) -> Iterator[dict[str, Any]]:
        rows = _TraceRows()
        for span in sorted(self._spans, key=lambda span: span.start):
            row, is_new = rows.place(span)
            if is_new:
                yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": span.component}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": row, "args": {"sort_index": row}}
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.component,
                "pid": 1,
                "tid": row,
                "ts": round((span.start - self._origin) * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "args": span.notes,
            }


class _TraceRows:
    """Assigns each span to the first row of its component that is free when the span starts."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[int, float]] = {}
        self._count = 0

    def place(self, span: Span) -> tuple[int, bool]:
        rows = self._ends.setdefault(span.component, {})
        for row, end in rows.items():
            if end <= span.start:
                rows[row] = span.end
                return row, False
        self._count += 1
        rows[self._count] = span.end
        return self._count, True


def _trace_text(head: str, events: Iterator[dict[str, Any]]) -> Iterator[str]:
    yield head + ', "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, default=str)
        separator = ",\n"
    yield "\n]}\n"


class Stopwatch:
    """Accumulates wall-clock and CPU seconds spent inside `running`.

    `core_s` is the CPU time of all threads of this process; a thread that waits for other threads or for a core does
    not count. It is capped at `threads` times the wall-clock time, so that other work in the same process is not
    counted. On an accelerator (`threads` None) CPU time means nothing, and `core_s` is wall-clock time.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self.busy_s = 0.0
        self.core_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        clock, processors = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            busy = time.perf_counter() - clock
            self.busy_s += busy
            if self._threads is None:
                self.core_s += busy
            else:
                self.core_s += min(time.process_time() - processors, busy * self._threads)
