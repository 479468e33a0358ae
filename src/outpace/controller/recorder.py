"""Recorder: turns reports into metrics, run files, console lines and callbacks.

Every method is cheap: small appends to open files and in-memory sums. User callbacks run elsewhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

import msgspec

from outpace.checkpoint import commit
from outpace.checkpoint.commit import CHECKPOINTS
from outpace.controller.evaluation import Evaluation
from outpace.controller.scheduler import Scheduler
from outpace.hardware.cores import ComputeUnits
from outpace.monitoring import metrics as to_metrics
from outpace.monitoring.callbacks import CallbackRunner
from outpace.monitoring.console import ProgressConsole
from outpace.monitoring.efficiency import EarlierTraining, EfficiencyTracker, Timeline
from outpace.monitoring.metrics import Meter
from outpace.monitoring.run_directory import BatchGroup, PastRun, RunLog, UntrainedVisit
from outpace.monitoring.summary import Summary, SummaryBuilder, parse_eval_result
from outpace.protocols import Engine, Learner
from outpace.runtime import diagnostics
from outpace.tasks.order import reroll_number
from outpace.types import (
    Aggregate,
    ChunkReport,
    EngineStats,
    Failure,
    FinishedGroup,
    GroupReport,
    LearnerStats,
    LoadReport,
    Manifest,
    StepReport,
    Version,
)

TIMELINE_SPANS = 4096
"""Number of most recent spans to keep, so that memory stays flat over a long run."""

FinalizedVisit = tuple[UntrainedVisit, GroupReport | None]
"""A visit that ended without training, and the report of its group, if any."""


@dataclass(frozen=True)
class TrainedStep:
    """A completed step that is not recorded yet."""

    report: StepReport
    chunks: list[ChunkReport]
    groups: list[FinishedGroup]
    replayed: list[FinishedGroup]


@dataclass
class Recorder:
    """Records everything the controller reports about a run."""

    log: RunLog
    console: ProgressConsole
    callbacks: CallbackRunner
    units: ComputeUnits | None  # None: the work of engines and learner cannot be measured
    seed: int

    def __post_init__(self) -> None:
        self.timeline = Timeline(cap=TIMELINE_SPANS)
        self.summary = SummaryBuilder()
        self.last_evaluation: Evaluation | None = None
        self._meter = Meter(self._undeclared)
        self._began = time.monotonic()
        self._training_began = self._trained_at = self._began
        self._account = EfficiencyTracker(self.units, time.monotonic)
        self._closed: dict[int, GroupReport] = {}  # not recorded yet
        self._earlier = EarlierTraining()
        self._earlier_wall_s = 0.0

    def resume(self, past: PastRun, finished: Iterable[GroupReport]) -> None:
        """Continue the totals of the run's earlier starts, and take over the groups they finished."""
        for line in past.steps:
            self.summary.step(line["step"], line)
            self._earlier = EarlierTraining.from_metrics(line)
        for line in past.evaluations:
            if result := parse_eval_result(line["step"], line):
                self.summary.evaluation(result)
        self.summary.failures(past.failures)
        for totals in past.totals:
            self._meter.merge(totals)
        self._earlier_wall_s = past.seconds
        self._closed |= {report.group: report for report in finished}

    async def training_begins(self, engines: dict[str, Engine], learner: Learner) -> None:
        """Start the training clock: all components are up, and their work so far does not count."""
        self._account.engines({name: await engine.stats() for name, engine in engines.items()})
        self._account.learner(await learner.stats())
        self._account.start(self._earlier)
        self._trained_at = self._training_began = time.monotonic()

    # ------------------------------------------------------------------------------------------------ events

    def span(self, component: str, name: str) -> contextlib.AbstractContextManager[None]:
        return self.timeline.measure(component, name)

    def _undeclared(self, name: str) -> None:
        self.console.status(f"metric {name} is not declared, so it is averaged: see outpace.metric")

    def fault(self, name: str) -> None:
        self._meter.add(f"faults/{name}", 1)

    def group_closed(self, report: GroupReport) -> None:
        self._closed[report.group] = msgspec.structs.replace(report, views=[])
        if report.outcome == "failed":
            self._account.wasted(report.tokens_sampled)
        self.callbacks.post("on_rollout_end", report)

    def group_given_up(self, report: GroupReport) -> None:
        """Record a cancelled group: its tokens are wasted although nothing failed."""
        self._closed.pop(report.group, None)
        to_metrics.record_discarded_group(self._meter, report)
        self._account.wasted(report.tokens_sampled)
        self.fault("given_up_groups")

    def visit_skipped(self) -> None:
        self._meter.add("groups/skipped", 1)

    def lag_changed(self, by: int) -> None:
        self._meter.add("governor/raised" if by > 0 else "governor/lowered", abs(by))

    def produced(self, measured: Mapping[str, Aggregate]) -> None:
        """Record the metrics that a data producer reported with a round."""
        self._meter.merge(measured)

    def published(self, manifest: Manifest) -> None:
        to_metrics.record_publish(self._meter, manifest)

    def loaded(self, report: LoadReport) -> None:
        to_metrics.record_load(self._meter, report)

    def checkpointed(self, version: Version) -> None:
        self.callbacks.post("on_checkpoint", version, commit.checkpoint_path(self.log.dir / CHECKPOINTS, version))

    def evaluated(self, evaluation: Evaluation) -> None:
        self.last_evaluation = evaluation
        metrics = evaluation.metrics()
        self.log.evaluation(evaluation.version, metrics, evaluation.failures)
        for name, value in metrics.items():
            self._meter.add(name, value)
        self.callbacks.post("on_evaluation", evaluation.version, {"step": evaluation.version} | metrics)
        self.summary.failures(evaluation.failures)
        if result := evaluation.result:
            self.summary.evaluation(result)
            self.console.evaluation(result)
        else:
            self.console.status(f"version {evaluation.version} could not be evaluated: {evaluation.reason}")
        for name in evaluation.sets:
            if result := parse_eval_result(evaluation.version, metrics, f"eval/{name}"):
                self.console.evaluation(result, name)
            else:
                self.console.status(f"set {name} of version {evaluation.version} could not be evaluated")

    # --------------------------------------------------------------------------------------------------- each step

    def step_done(
        self,
        step: TrainedStep,
        engines: dict[str, EngineStats],
        learner: LearnerStats,
        core: Scheduler,
        finalized: list[FinalizedVisit],
        accounted: int,
    ) -> None:
        self._trained_at = time.monotonic()
        rerolls = sum(reroll_number(kept.order.position) > 0 for kept in step.groups) + _rerolls(finalized)
        self._meter.add("reroll/visits", rerolls)
        reports = [*(kept.report for kept in step.groups), *(report for _, report in finalized)]
        failures = self._record_groups(reports)
        for chunk in step.chunks:
            to_metrics.record_chunk(self._meter, chunk)
        to_metrics.record_step(self._meter, step.report)
        to_metrics.record_engines(self._meter, engines.values())
        to_metrics.record_queue(self._meter, core.running, core.finished)
        replayed = len(step.replayed)
        to_metrics.record_scheduling(
            self._meter, core.max_lag, core.resting, replayed, filled=replayed if core.replay.fills else 0
        )
        to_metrics.record_rerolls(self._meter, core.rerolls.waiting, core.rerolls.dropped)
        self._account.engines(engines)
        self._account.learner(learner)
        to_metrics.record_efficiency(self._meter, self._account.lap(), self._account.run_total())
        self._meter.add("time/total_s", self._wall_s)
        self._meter.collect(self.callbacks.log)
        metrics = self._meter.flush()
        version = step.report.version
        groups = [_batch_group(version - 1, kept) for kept in step.groups]
        groups += [_batch_group(version - 1, kept, replay=True) for kept in step.replayed]
        self.log.batch(version, version - 1, groups, [visit for visit, _ in finalized], accounted, failures)
        diagnostics.crash_point("controller.line_written")
        self.log.step(version, metrics)
        self.summary.step(version, metrics)
        self.console.step(version, metrics)
        self.callbacks.post("on_batch_end", {"step": version} | metrics)

    def finalized(self, version: Version, finalized: list[FinalizedVisit], accounted: int) -> None:
        """Write a record of the visits finalized between two steps, for the checkpoint that relies on it."""
        failures = self._record_groups(report for _, report in finalized)
        totals = to_metrics.finalized_totals((visit.outcome, report) for visit, report in finalized)
        if rerolls := _rerolls(finalized):
            self._meter.add("reroll/visits", rerolls)
            totals["reroll/visits"] = to_metrics.aggregated("sum", [(rerolls, 1.0)])
        self.log.batch(version, version, [], [visit for visit, _ in finalized], accounted, failures, totals)

    def _record_groups(self, reports: Iterable[GroupReport | None]) -> list[Failure]:
        """Count these groups and return their failures."""
        failures: list[Failure] = []
        for report in filter(None, reports):
            self._closed.pop(report.group, None)
            to_metrics.record_group(self._meter, report)
            failures += report.failures
        self.summary.failures(failures)
        return failures

    @property
    def _wall_s(self) -> float:
        return self._earlier_wall_s + time.monotonic() - self._began

    # --------------------------------------------------------------------------------------------------- at the end

    def build_summary(self, exit_code: int, reason: str) -> Summary:
        for report in self._closed.values():
            to_metrics.record_tokens(self._meter, report)
            self.summary.failures(report.failures)
        self._closed.clear()
        self.summary.add_totals(self._meter.flush())
        return self.summary.build(
            wall_s=self._wall_s,
            train_s=self._earlier.seconds + self._trained_at - self._training_began,
            seed=self.seed,
            exit=exit_code,
            reason=reason,
        )


def _rerolls(finalized: list[FinalizedVisit]) -> int:
    return sum(visit.reroll > 0 for visit, _ in finalized)


def _batch_group(version: Version, kept: FinishedGroup, replay: bool = False) -> BatchGroup:
    order, report = kept.order, kept.report
    return BatchGroup(
        task_id=report.task_id,
        epoch=order.epoch,
        admitted_version=order.min_version,
        lag=version - report.oldest,
        episodes=report.episodes,
        replay=replay,
        task=order.task,
        reward=fmean(report.rewards) if report.rewards else None,
        group=order.group,
        reroll=reroll_number(order.position),
    )
