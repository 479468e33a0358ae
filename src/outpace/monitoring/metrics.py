"""Step metrics: `Meter` aggregates values into one number per metric and step; the `record_` functions feed it.

    component reports -> record_group, record_chunk, record_step, ... -> Meter.add -> Meter.flush -> metrics.jsonl

Invariants
- The aggregation rule of a metric follows from its name. The tables below are the only place that defines it.
- `flush` returns finite values only. Other values are dropped and counted in `faults/nan_metrics`.
- A metric declared as a sum is present in every step, as 0 if nothing happened. Any other metric is present only if
  values were added: a mean over nothing has no value.
- The learner's metrics of a whole step are exact and carry final names (`Meter.put`). Of a chunk, only counts are used,
  because they add up.

To average a ratio of sums, add `value = numerator / denominator` with `weight = denominator`. No I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from outpace.monitoring.efficiency import Efficiency
from outpace.types import ChunkReport, EngineStats, GroupReport, LoadReport, Manifest, StepReport

Rule = Literal["sum", "mean", "std", "max", "last", "p95"]

NAN_METRICS = "faults/nan_metrics"

RULES: dict[str, Rule] = {
    "reward/mean": "mean",
    "reward/std": "std",
    "lag/mean": "mean",
    "lag/p95": "p95",
    "lag/max": "max",
    "idle/learner_s": "sum",
    "idle/engine_s": "sum",
    "sync/publish_s": "sum",
    "sync/pause_s": "sum",
    "sync/load_s": "sum",
    "sync/bytes": "sum",
    "sync/loads": "sum",
    "fleet/engines": "last",
    "fleet/healthy": "last",
    "fleet/limit": "last",
    "fleet/retries": "last",
    "completions/mixed_versions": "mean",
    "waste/tokens": "sum",
    "waste/fraction": "mean",
    "waste/filtered_tokens": "sum",
    "offpolicy/ess": "mean",
    "offpolicy/kl": "mean",
    "offpolicy/kl_engine": "mean",
    "offpolicy/kl_staleness": "mean",
    "offpolicy/masked": "mean",
    "offpolicy/masked_positive": "mean",
    "offpolicy/masked_negative": "mean",
    "offpolicy/ratio_max": "max",
    "loss/policy": "last",
    "kl": "mean",
    "loss/value": "mean",
    "entropy": "mean",
    "clip_ratio": "mean",
    "clip_ratio_positive": "mean",
    "clip_ratio_negative": "mean",
    "grad_norm": "last",
    "learning_rate": "last",
    "governor/max_lag": "last",
    "governor/lowered": "sum",
    "governor/raised": "sum",
    "difficulty/resting": "last",
    "replay/groups": "sum",
    "replay/filled": "sum",
    "replay/lag_mean": "mean",
    "reroll/visits": "sum",
    "reroll/waiting": "last",
    "reroll/dropped": "last",
    "queue/running": "last",
    "queue/finished": "last",
    "queue/outstanding": "last",
    "queue/waiting": "last",
    "groups/finished": "sum",
    "groups/filtered": "sum",
    "groups/failed": "sum",
    "groups/skipped": "sum",
    "groups/seconds": "mean",
    "completions/mean_length": "mean",
    "completions/clipped_ratio": "mean",
    "throughput/sampled_tokens": "sum",
    "throughput/trained_tokens": "sum",
    "throughput/sampled_tok_s": "last",
    "throughput/trained_tok_s": "last",
    "time/step_s": "last",
    "time/wall_s": "last",
    "time/total_s": "last",
    "time/train_s": "sum",
    "faults/failed_episodes": "sum",
    "faults/skipped_steps": "sum",
    NAN_METRICS: "sum",
    "efficiency": "last",
}
"""The documented metrics."""

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

PREFIX_RULES: tuple[tuple[str, Rule], ...] = (
    ("faults/", "sum"),
    ("offpolicy/ratio_", "mean"),  # histogram of importance ratios, as shares of tokens
    ("queue/", "last"),
    ("fleet/", "last"),
    ("throughput/", "last"),
    ("share/", "last"),
)
"""Rules for names not in RULES. Prefixes take precedence over suffixes."""

SUFFIX_RULES: tuple[tuple[str, Rule], ...] = (
    ("/max", "max"),
    ("_max", "max"),
    ("/p95", "p95"),
    ("/std", "std"),
    ("/mean", "mean"),
    ("_s", "sum"),
    ("/bytes", "sum"),
    ("/count", "sum"),
)

DEFAULT_RULE: Rule = "mean"


def rule_of(name: str) -> Rule:
    """Return the aggregation rule of a metric."""
    if name in RULES:
        return RULES[name]
    for prefix, rule in PREFIX_RULES:
        if name.startswith(prefix):
            return rule
    for suffix, rule in SUFFIX_RULES:
        if name.endswith(suffix):
            return rule
    return DEFAULT_RULE


class _Cell:
    """Incremental aggregate of one metric in one step."""

    __slots__ = ("histogram", "last", "mean", "rule", "squares", "top", "total", "weight")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.weight = 0.0
        self.total = 0.0
        self.mean = 0.0
        self.squares = 0.0  # weighted sum of squared deviations from the mean
        self.top = -math.inf
        self.last = 0.0
        self.histogram: dict[float, float] = {}

    def add(self, value: float, weight: float) -> None:
        self.weight += weight
        self.total += value * weight
        deviation = value - self.mean
        self.mean += deviation * (weight / self.weight)
        self.squares += weight * deviation * (value - self.mean)
        self.top = max(self.top, value)
        self.last = value
        if self.rule == "p95":
            self.histogram[value] = self.histogram.get(value, 0.0) + weight

    def result(self) -> float:
        match self.rule:
            case "sum":
                return self.total
            case "mean":
                return self.mean
            case "std":
                return math.sqrt(max(self.squares, 0.0) / self.weight)
            case "max":
                return self.top
            case "last":
                return self.last
            case "p95":
                return percentile(self.histogram, 0.95)


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
    """Aggregates the metrics of one step."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}
        self._exact: dict[str, float] = {}
        self._dropped = 0

    def put(self, name: str, value: float) -> None:
        """Set the exact value for the step. It replaces anything added under this name."""
        if math.isfinite(value):
            self._exact[name] = float(value)
        else:
            self._dropped += 1

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add a value. A weight of 0 adds nothing; a value or weight that is not finite is dropped and counted."""
        if not (math.isfinite(value) and math.isfinite(weight)):
            self._dropped += 1
            return
        assert weight >= 0, f"{name}: weight {weight}"
        if weight == 0:
            return
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _Cell(rule_of(name))
        cell.add(float(value), float(weight))

    def add_counts(self, name: str, counts: Mapping[int, int]) -> None:
        """Add a histogram (value -> count) as `name/mean`, `name/p95` and `name/max`."""
        for value, count in counts.items():
            for statistic in ("mean", "p95", "max"):
                self.add(f"{name}/{statistic}", value, count)

    def flush(self) -> dict[str, float]:
        """Return the metrics of the step, sorted by name, and reset."""
        metrics = {name: 0.0 for name, rule in RULES.items() if rule == "sum"}
        for name, cell in self._cells.items():
            value = cell.result()
            if math.isfinite(value):
                metrics[name] = value
            else:  # a sum of finite values can overflow
                self._dropped += 1
        metrics |= self._exact
        metrics[NAN_METRICS] += self._dropped
        self._cells.clear()
        self._exact.clear()
        self._dropped = 0
        return dict(sorted((_derived(metrics) | metrics).items()))


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
    for reward in report.rewards:
        meter.add("reward/mean", reward)
        meter.add("reward/std", reward)
    for function, reward in report.reward_parts.items():
        meter.add(f"reward/{function}", reward, len(report.rewards))
    if report.episodes and not report.supplied:
        meter.add("completions/mean_length", report.tokens_sampled / report.episodes, report.episodes)
    if report.episodes:
        meter.add("completions/clipped_ratio", report.truncated / report.episodes, report.episodes)
    for name, value in report.metrics.items():
        meter.add(name if "/" in name else f"episode/{name}", value, max(report.episodes, 1))


def finalized_totals(visits: Iterable[tuple[str, GroupReport | None]]) -> dict[str, float]:
    """Return what these prompt visits (outcome and report) add to the sums of their step."""
    meter = Meter()
    for outcome, report in visits:
        if report is not None:
            record_tokens(meter, report)
            meter.add(f"groups/{report.outcome}", 1)
            meter.add("faults/failed_episodes", report.failed_episodes)
        elif outcome == "skipped":
            meter.add("groups/skipped", 1)
    return {name: value for name, value in meter.flush().items() if value}


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
    """Record waits and throughput of the step, and T*/T of the run so far: within a single step it is not meaningful,
    because work overlaps with the next one."""
    for name, value in lap.metrics().items():
        if name != "efficiency":
            meter.add(name, value)
    if run_total.efficiency is not None:
        meter.add("efficiency", run_total.efficiency)
    meter.add("time/wall_s", run_total.seconds)
