"""Step metrics: `Meter` aggregates values into one number per metric and step; the `record_` functions feed it.

    user code ─▶ log_metric ─▶ MetricLog ─┐
    worker: rewards, episodes ─▶ Meter ───┴─▶ GroupReport.measured ─┐
    other reports ─▶ record_step, record_chunk, … ──────────────────┴─▶ Meter of the step ─▶ flush ─▶ metrics.jsonl

Invariants
- The aggregation rule of a metric is the declared one (`outpace.monitoring.metric_table`). Aggregates merge, so a rule
  holds over attempts, groups, workers, chunks and starts of a run.
- An undeclared metric is averaged, and reported once to `on_undeclared`. It is an error if the environment variable
  OUTPACE_UNDECLARED_METRICS is `error`, as in the tests.
- `flush` returns finite values only. Other values are dropped and counted in `faults/nan_metrics`.
- A metric declared as a sum is present in every step, as 0 if nothing happened. Any other metric is present only if
  values were added: a mean over nothing has no value.
- The learner reports exact metrics of a whole step under their final names (`Meter.put`). From a chunk only counts are
  used, because counts add up.

No I/O, no clock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from outpace.monitoring.efficiency import Efficiency
from outpace.monitoring.metric_table import BUILT_IN, DECLARED, NAN_METRICS, MetricLog, find
from outpace.types import Aggregate, ChunkReport, EngineStats, GroupReport, LoadReport, Manifest, StepReport

DEFAULT_RULE = "mean"
UNDECLARED_METRICS = "OUTPACE_UNDECLARED_METRICS"
"""Environment variable: with the value `error`, an undeclared metric raises `ValueError`."""

MAX_VALUES = 16_384
"""Maximum number of values kept for a percentile. Beyond that, neighboring values are merged."""

RENAMED_METRICS = {
    "completion/mean_tokens": "completions/mean_length",
    "completion/truncated": "completions/clipped_ratio",
    "episode/swapped": "completions/mixed_versions",
    "loss/kl": "kl",
    "loss/entropy": "entropy",
    "loss/grad_norm": "grad_norm",
    "loss/lr": "learning_rate",
    "loss/clipped": "clip_ratio",
    "loss/clipped_positive": "clip_ratio_positive",
    "loss/clipped_negative": "clip_ratio_negative",
    "wait/trainer_s": "idle/learner_s",
    "wait/engine_s": "idle/engine_s",
}
"""Metrics of outpace 0.1 that have a new name. `outpace migrate` renames them in `metrics.jsonl`."""


def aggregated(rule: str, values: list[tuple[float, float]]) -> Aggregate:
    """Return the aggregate of values with their weights. For a ratio, they are numerators and denominators."""
    match rule:
        case "min":
            return Aggregate(rule, value=min(value for value, _ in values))
        case "max":
            return Aggregate(rule, value=max(value for value, _ in values))
        case "last":
            return Aggregate(rule, value=values[-1][0])
        case "sum" | "mean" | "std" | "ratio":
            weight = sum(weight for _, weight in values)
            total = sum(value if rule == "ratio" else value * weight for value, weight in values)
            found = Aggregate(rule, weight=weight, total=total)
            if rule == "std" and len(values) > 1:
                distances = [(value - total / weight, share) for value, share in values]
                found.squares = sum(distance * distance * share for distance, share in distances)
            return found
    return Aggregate(rule, values=values if len(values) <= MAX_VALUES else _thinned(values))


def merge(into: Aggregate, other: Aggregate) -> None:
    """Add the values of `other`, which has the same rule."""
    match into.rule:
        case "min":
            into.value = min(into.value, other.value)
        case "max":
            into.value = max(into.value, other.value)
        case "last":
            into.value = other.value
        case "sum" | "mean" | "std" | "ratio":
            if into.rule == "std":
                distance = other.total / other.weight - into.total / into.weight
                share = into.weight * (other.weight / (into.weight + other.weight))
                into.squares += other.squares + distance * distance * share
            into.weight += other.weight
            into.total += other.total
        case _:
            into.values += other.values
            if len(into.values) > MAX_VALUES:
                into.values = _thinned(into.values)


def result(aggregate: Aggregate) -> float | None:
    """Return the number that the rule gives; None for a ratio without a denominator."""
    match aggregate.rule:
        case "min" | "max" | "last":
            return aggregate.value
        case "sum":
            return aggregate.total
        case "mean" | "ratio":
            return aggregate.total / aggregate.weight if aggregate.weight else None
        case "std":
            return math.sqrt(max(aggregate.squares, 0.0) / aggregate.weight)
    return percentile(_counts(aggregate.values), float(aggregate.rule[1:]) / 100)


def _thinned(values: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most half of `MAX_VALUES` distinct values: neighbors become the largest one, with their total
    weight."""
    counts = sorted(_counts(values).items())
    step = math.ceil(2 * len(counts) / MAX_VALUES)
    joined = (counts[first : first + step] for first in range(0, len(counts), step))
    return [(each[-1][0], sum(weight for _, weight in each)) for each in joined]


def _counts(values: Iterable[tuple[float, float]]) -> dict[float, float]:
    counts: dict[float, float] = {}
    for value, weight in values:
        counts[value] = counts.get(value, 0.0) + weight
    return counts


def percentile(counts: Mapping[float, float] | Mapping[int, int], share: float) -> float:
    """Return the smallest value such that at least `share` of the total weight does not exceed it."""
    target = share * sum(counts.values())
    seen = 0.0
    for value, weight in sorted(counts.items()):
        seen += weight
        if seen >= target * (1 - 1e-12):  # tolerance for rounding in the sum of weights
            return float(value)
    raise ValueError("percentile of an empty histogram")


class Meter:
    """Aggregates the metrics of a group or a step."""

    def __init__(self, on_undeclared: Callable[[str], object] | None = None) -> None:
        """`on_undeclared` is called once with the name of each undeclared metric."""
        self._on_undeclared = on_undeclared
        self._undeclared: set[str] = set()
        self._aggregates: dict[str, Aggregate] = {}
        self._exact: dict[str, float] = {}
        self._dropped = 0

    def put(self, name: str, value: float) -> None:
        """Set the exact value for the step. It replaces anything added under this name."""
        self._rule(name)
        if math.isfinite(value):
            self._exact[name] = float(value)
        else:
            self._dropped += 1

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add a value; for a ratio, a numerator and its denominator. A weight of 0 adds nothing, except to a ratio. A
        value or weight that is not finite is dropped and counted."""
        if not (math.isfinite(value) and math.isfinite(weight)):
            self._dropped += 1
            return
        assert weight >= 0, f"{name}: weight {weight}"
        known, value, weight = self._aggregates.get(name), float(value), float(weight)
        if known is not None and known.rule in ("sum", "mean"):  # fast path for the most frequent rules
            known.weight += weight
            known.total += value * weight
        else:
            self.add_all(name, [(value, weight)])

    def add_all(self, name: str, values: Sequence[tuple[float, float]]) -> None:
        """Add values with their weights, as `add` does."""
        known = self._aggregates.get(name)
        rule = self._rule(name) if known is None else known.rule
        finite = [
            (float(value), float(weight)) for value, weight in values if math.isfinite(value) and math.isfinite(weight)
        ]
        self._dropped += len(values) - len(finite)
        weighted = finite if rule == "ratio" else [pair for pair in finite if pair[1]]
        if weighted:
            self._merge(name, aggregated(rule, weighted))

    def add_counts(self, name: str, counts: Mapping[int, int]) -> None:
        """Add a histogram (value -> count) as `name/mean`, `name/p95` and `name/max`."""
        for value, count in counts.items():
            for statistic in ("mean", "p95", "max"):
                self.add(f"{name}/{statistic}", value, count)

    def merge(self, measured: Mapping[str, Aggregate]) -> None:
        """Add the result of another meter's `take`. Values of a metric with another rule are dropped and counted."""
        for name, aggregate in measured.items():
            rule = self._rule(name, default=aggregate.rule)
            if rule == aggregate.rule:
                self._merge(name, aggregate)
            else:
                self._dropped += 1

    def collect(self, log: MetricLog) -> None:
        """Move the values reported by user code from the log to this meter."""
        by_name: dict[str, list[tuple[float, float]]] = {}
        for name, value, weight in log.take():
            by_name.setdefault(name, []).append((value, weight))
        for name, values in by_name.items():
            self.add_all(name, values)
        self._dropped += log.dropped
        log.dropped = 0

    def take(self) -> dict[str, Aggregate]:
        """Return the aggregates, without exact values, and reset."""
        taken, self._aggregates = self._aggregates, {}
        if self._dropped:
            taken[NAN_METRICS] = aggregated("sum", [(self._dropped, 1.0)])
            self._dropped = 0
        return taken

    def flush(self) -> dict[str, float]:
        """Return the metrics of the step, sorted by name, and reset."""
        sums = (metric for metric in (*BUILT_IN.values(), *DECLARED.values()) if metric.rule == "sum")
        metrics = {metric.name: 0.0 for metric in sums if "<" not in metric.name}
        for name, aggregate in self._aggregates.items():
            value = result(aggregate)
            if value is not None and math.isfinite(value):
                metrics[name] = value
            else:  # a sum of finite values can overflow
                self._dropped += value is not None
        metrics |= self._exact
        metrics[NAN_METRICS] += self._dropped
        self._aggregates.clear()
        self._exact.clear()
        self._dropped = 0
        return dict(sorted((_derived(metrics) | metrics).items()))

    def _merge(self, name: str, aggregate: Aggregate) -> None:
        if (known := self._aggregates.get(name)) is not None:
            merge(known, aggregate)
        else:
            self._aggregates[name] = msgspec.structs.replace(aggregate, values=list(aggregate.values))

    def _rule(self, name: str, default: str = DEFAULT_RULE) -> str:
        """Return the declared rule of a metric, or the default."""
        if (declared := find(name)) is not None:
            return declared.rule
        if default == DEFAULT_RULE and name not in self._undeclared:
            if os.environ.get(UNDECLARED_METRICS) == "error":
                raise ValueError(f"metric {name} is not declared; add it to outpace.monitoring.metric_table")
            self._undeclared.add(name)
            if self._on_undeclared is not None:
                self._on_undeclared(name)
        return default


def _derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """Compute metrics that derive from others. Values set directly take precedence."""
    # A group dropped in this step may have been sampled in an earlier one, hence the max.
    sampled = max(metrics["throughput/sampled_tokens"], metrics["waste/tokens"])
    return {"waste/fraction": metrics["waste/tokens"] / sampled if sampled > 0 else 0.0}


def record_tokens(meter: Meter, report: GroupReport) -> None:
    """Record the sampled tokens of a group. Call it once per group: in the step that records it, or at the end of the
    run.

    Tokens of a failed group are waste; tokens of a filtered group are counted separately."""
    meter.add("throughput/sampled_tokens", report.tokens_sampled)
    if report.outcome == "filtered":
        meter.add("waste/filtered_tokens", report.tokens_sampled)
    if report.outcome == "failed":
        meter.add("waste/tokens", report.tokens_sampled)


def record_group(meter: Meter, report: GroupReport) -> None:
    """Record a group in the step that trained it, or in the next step if it was finalized without training."""
    record_tokens(meter, report)
    meter.add("groups/seconds", report.seconds)
    meter.add(f"groups/{report.outcome}", 1)
    meter.add("faults/failed_episodes", report.failed_episodes)
    rewards = [(reward, 1.0) for reward in report.rewards]
    meter.add_all("reward/mean", rewards)
    meter.add_all("reward/std", rewards)
    if report.episodes and not report.supplied:
        meter.add("completions/mean_length", report.tokens_sampled, report.episodes)
    if report.episodes:
        meter.add("completions/clipped_ratio", report.truncated, report.episodes)
    meter.merge(report.measured)


def finalized_totals(visits: Iterable[tuple[str, GroupReport | None]]) -> dict[str, Aggregate]:
    """Return what these prompt visits (outcome and report) add to the metrics of their step."""
    meter = Meter()
    for outcome, report in visits:
        if report is not None:
            record_group(meter, report)
        elif outcome == "skipped":
            meter.add("groups/skipped", 1)
    return {name: each for name, each in meter.take().items() if math.isfinite(each.total + each.squares + each.weight)}


def record_discarded_group(meter: Meter, report: GroupReport) -> None:
    """Record the tokens of a group that was dropped or requeued as waste, even if the group had finished."""
    meter.add("throughput/sampled_tokens", report.tokens_sampled)
    meter.add("waste/tokens", report.tokens_sampled)


def record_chunk(meter: Meter, report: ChunkReport) -> None:
    meter.add("throughput/trained_tokens", report.tokens)
    meter.add_counts("lag", report.lag_counts)
    for lag, tokens in report.replay_lag_counts.items():
        meter.add("replay/lag_mean", lag, tokens)


def record_step(meter: Meter, report: StepReport) -> None:
    meter.add("loss/policy", report.loss)
    meter.add("grad_norm", report.grad_norm)
    meter.add("learning_rate", report.lr)
    meter.add("time/train_s", report.seconds)
    meter.add("faults/skipped_steps", float(report.skipped))
    for name, value in report.metrics.items():
        meter.put(name, value)


def record_publish(meter: Meter, manifest: Manifest) -> None:
    meter.add("sync/publish_s", manifest.seconds)


def record_load(meter: Meter, report: LoadReport) -> None:
    meter.add("sync/pause_s", report.pause_s)
    meter.add("sync/load_s", report.seconds)
    meter.add("sync/bytes", report.bytes)
    meter.add("sync/loads", 1)
    if report.phases is not None:
        for name, seconds in msgspec.structs.asdict(report.phases).items():
            meter.add(f"sync/{name}", seconds)


def record_engines(meter: Meter, stats: Iterable[EngineStats]) -> None:
    """Record the current state of the engines, summed over all of them."""
    engines = list(stats)
    meter.add("fleet/engines", len(engines))
    meter.add("fleet/healthy", sum(engine.health == "healthy" for engine in engines))
    meter.add("fleet/limit", sum(engine.limit or engine.slots for engine in engines))
    meter.add("fleet/retries", sum(engine.retries for engine in engines))
    meter.add("queue/sequences", sum(engine.running for engine in engines))
    meter.add("queue/waiting", sum(engine.waiting for engine in engines))


def record_queue(meter: Meter, running: int, finished: int) -> None:
    """Record running groups and groups that are finished but not trained yet. Their sum is outstanding."""
    meter.add("queue/running", running)
    meter.add("queue/finished", finished)
    meter.add("queue/outstanding", running + finished)


def record_scheduling(meter: Meter, max_lag: int, resting: int, replayed: int, filled: int = 0) -> None:
    """Record the scheduler's current `max_lag`, the tasks excluded by difficulty, the replayed groups and how many of
    them took the place of a filtered one."""
    meter.add("governor/max_lag", max_lag)
    meter.add("difficulty/resting", resting)
    meter.add("replay/groups", replayed)
    meter.add("replay/filled", filled)


def record_rerolls(meter: Meter, waiting: int, dropped: int) -> None:
    meter.add("reroll/waiting", waiting)
    meter.add("reroll/dropped", dropped)


def record_efficiency(meter: Meter, lap: Efficiency, run_total: Efficiency) -> None:
    """Record waits and throughput of the step, and T*/T of the run so far. T*/T of a single step is not meaningful,
    because steps overlap."""
    for name, value in lap.metrics().items():
        if name != "efficiency":
            meter.add(name, value)
    if run_total.efficiency is not None:
        meter.add("efficiency", run_total.efficiency)
    meter.add("time/wall_s", run_total.seconds)
