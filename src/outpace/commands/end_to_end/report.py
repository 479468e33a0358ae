"""Report of `outpace bench end-to-end`: medians of both systems, ratios of paired runs, and the limit.

The speed of a shared machine drifts, so each run of outpace is compared with the TRL run and the limit measured next to
it, and the median of these ratios counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from outpace.commands.end_to_end.limit import Limit
from outpace.commands.end_to_end.systems import OUTPACE, TRL, SystemRun

WIDTH = 120

BUSY_CORES = 0.1
"""Cores that other programs may use before the report mentions it."""

FIGURES: dict[str, tuple[Callable[[SystemRun], float], str]] = {
    "samples_per_s": (lambda run: run.samples_per_s, "samples/s"),
    "completion_tokens_per_s": (lambda run: run.completion_tokens_per_s, "completion tok/s"),
    "trained_tokens_per_s": (lambda run: run.trained_tokens_per_s, "trained tok/s"),
    "step_s": (lambda run: run.step_s, "seconds per step"),
    "first_step_s": (lambda run: run.first_step_s, "seconds from command to first step"),
    "reward": (lambda run: run.reward, "reward, last third of the steps"),
    "mean_length": (lambda run: run.mean_length, "tokens per answer"),
}
"""Figures of a run by their name in the JSON, with the label in the table."""

LOWER_IS_BETTER = ("step_s", "first_step_s", "target_s")


@dataclass
class Comparison:
    """Everything that was measured, in the order of the repeats."""

    work: dict[str, Any]
    machine: dict[str, Any]
    runs: dict[str, list[SystemRun]] = field(default_factory=dict)
    limits: list[Limit] = field(default_factory=list)
    trl_batches: dict[int, float | None] = field(default_factory=dict)  # seconds per step; None: it failed
    trl_batch: int = 0
    other_cores: float | None = None  # cores that other programs used; None: unknown
    target: float | None = None
    target_s: dict[str, list[float | None]] = field(default_factory=dict)
    accuracy: dict[str, list[dict[int, float]]] = field(default_factory=dict)  # by step

    def medians(self, system: str) -> dict[str, float | None]:
        return {name: _median(self._values(name, system)) for name in (*FIGURES, "target_s")}

    def ratios(self, name: str) -> list[float]:
        """Return outpace relative to the TRL run next to it, by repeat. Above 1, outpace is better."""
        pairs = zip(self._values(name, OUTPACE), self._values(name, TRL), strict=False)
        return [_quotient(own, trl, name) for own, trl in pairs if own is not None and trl is not None]

    def _values(self, name: str, system: str) -> Sequence[float | None]:
        if name == "target_s":
            return self.target_s.get(system, [])
        return [FIGURES[name][0](run) for run in self.runs.get(system, [])]

    @property
    def limit_ratios(self) -> list[float]:
        own = self.runs.get(OUTPACE, [])
        return [run.samples_per_s / limit.samples_per_s for run, limit in zip(own, self.limits, strict=False)]

    @property
    def details(self) -> dict[str, float]:
        """Medians of the metrics that only outpace reports."""
        own = self.runs.get(OUTPACE, [])
        names = own[0].details if own else {}
        return {name: statistics.median(run.details[name] for run in own) for name in names}

    def as_json(self) -> dict[str, Any]:
        ratios = {name: _median(self.ratios(name)) for name in (*FIGURES, "target_s")}
        return {
            "machine": {**self.machine, "other_cores": self.other_cores},
            "work": self.work,
            "systems": {system: self.medians(system) for system in self.runs},
            "ratios": {**ratios, "limit": _median(self.limit_ratios)},
            "details": self.details,
            "limits": [{**msgspec.to_builtins(each), "samples_per_s": each.samples_per_s} for each in self.limits],
            "trl": {"batches": self.trl_batches, "batch": self.trl_batch},
            "target": {"accuracy": self.target, "seconds": self.target_s, "by_step": self.accuracy},
            "runs": {system: [_run_json(run) for run in runs] for system, runs in self.runs.items()},
        }


def _run_json(run: SystemRun) -> dict[str, Any]:
    return {name: value(run) for name, (value, _) in FIGURES.items()} | {"clock": run.clock, "details": run.details}


def _quotient(own: float, other: float, name: str) -> float:
    return other / own if name in LOWER_IS_BETTER else own / other


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def print_report(comparison: Comparison, console: Console | None = None) -> None:
    console = console or Console(width=WIDTH)
    if comparison.runs:
        console.print(_table(comparison))
    if comparison.trl_batches:
        tried = ", ".join(f"{batch}: {_seconds(step_s)}" for batch, step_s in comparison.trl_batches.items())
        console.print(f"TRL's batch per device: {comparison.trl_batch} (seconds per step of a short run: {tried})")
    if comparison.limits:
        console.print(_limit_text(comparison))
    for name, value in comparison.details.items():
        console.print(f"outpace, per step: {name} {value:,.2f}")
    if comparison.other_cores is not None and comparison.other_cores > BUSY_CORES:
        console.print(
            f"other programs used {comparison.other_cores:.2f} cores meanwhile; repeat this on an idle machine"
        )


def _table(comparison: Comparison) -> Table:
    table = Table(title=comparison.work["title"], title_justify="left")
    for column in ("medians", *comparison.runs, "ratio", "of each repeat"):
        table.add_column(column, justify="left" if column in ("medians", "of each repeat") else "right")
    medians = [comparison.medians(system) for system in comparison.runs]
    labels = {name: label for name, (_, label) in FIGURES.items()}
    if comparison.target is not None:
        labels["target_s"] = f"seconds to accuracy {comparison.target:g}"
    for name, label in labels.items():
        ratios = comparison.ratios(name)
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(label, *(_number(found.get(name)) for found in medians), _number(_median(ratios)), each)
    return table


def _limit_text(comparison: Comparison) -> str:
    limit = sorted(comparison.limits, key=lambda each: each.samples_per_s)[len(comparison.limits) // 2]
    unit, threads = "device", ""
    if limit.engine.threads:
        unit, threads = "core", f" ({limit.engine.threads} and {limit.learner.threads} threads)"
    costs = f"{1000 * limit.engine.seconds:.3g} + {1000 * limit.learner.seconds:.3g} {unit}-milliseconds per sample"
    ratio = _median(comparison.limit_ratios)
    reached = "" if ratio is None else f"; outpace reaches {ratio:.2f} of it"
    return (
        f"limit: {limit.samples_per_s:,.1f} samples/s = {limit.units} {unit}s / ({costs} of engine and learner alone"
        f"{threads}){reached}"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _seconds(value: float | None) -> str:
    return "failed" if value is None else f"{value:.2f}"
