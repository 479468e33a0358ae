"""What the driver tells people: one place that turns reports into metrics, files, the console and callbacks.

Every method is cheap: small appends to open files and in-memory sums. What is slow (user callbacks) runs elsewhere.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from outpace import crash
from outpace.observe import reports as to_metrics
from outpace.observe.callbacks import CallbackRunner
from outpace.observe.console import ProgressConsole
from outpace.observe.efficiency import WorkAccount
from outpace.observe.metrics import Meter
from outpace.observe.runlog import BatchGroup, BatchSettled, RunLog
from outpace.observe.summary import Summary, SummaryBuilder
from outpace.observe.timeline import Timeline
from outpace.pipeline.core import Core
from outpace.pipeline.evaluation import Evaluation
from outpace.protocols import Engine, Learner
from outpace.types import (
    ChunkReport,
    EngineStats,
    EpisodeView,
    GroupOrder,
    GroupReport,
    LearnerStats,
    LoadReport,
    Manifest,
    StepReport,
    Version,
)

TIMELINE_SPANS = 4096
"""The newest so many spans are kept: enough to look at, and memory stays flat over a long run."""

MAX_VIEWS = 256
"""Rollouts kept for reading until a step writes them out; where no step comes, the oldest give way."""


Settled = tuple[BatchSettled, GroupReport | None]
"""A visit that was not trained, and the report on its group if there is one."""


@dataclass
class Recorder:
    log: RunLog
    console: ProgressConsole
    callbacks: CallbackRunner
    cores: int | None  # None: the work of engine and learner cannot be counted
    seed: int

    def __post_init__(self) -> None:
        self.timeline = Timeline(cap=TIMELINE_SPANS)
        self.summary = SummaryBuilder()
        self.last_evaluation: Evaluation | None = None
        self._meter = Meter()
        self._views: deque[EpisodeView] = deque(maxlen=MAX_VIEWS)
        self._began = time.monotonic()
        self._training_began = self._trained_at = self._began
        self._account = WorkAccount(self.cores, time.monotonic)

    async def training_begins(self, engines: dict[str, Engine], learner: Learner) -> None:
        """The parts are up: the clock of training starts, and what they did before does not count."""
        self._account.engines({name: await engine.stats() for name, engine in engines.items()})
        self._account.learner(await learner.stats())
        self._account.start()
        self._trained_at = self._training_began = time.monotonic()

    # ------------------------------------------------------------------------------------------------ as it happens

    def span(self, part: str, name: str) -> contextlib.AbstractContextManager[None]:
        return self.timeline.measure(part, name)

    def fault(self, name: str) -> None:
        self._meter.add(f"faults/{name}", 1)

    def epoch_started(self, epoch: int) -> None:
        self.callbacks.post("on_epoch_start", epoch)

    def epoch_ended(self, epoch: int) -> None:
        self.callbacks.post("on_epoch_end", epoch)

    def group_started(self, order: GroupOrder) -> None:
        self.callbacks.post("on_rollout_start", order)

    def group_closed(self, report: GroupReport) -> None:
        to_metrics.record_closed(self._meter, report)
        self._views += report.views
        if report.outcome == "failed":
            self._account.wasted(report.tokens_sampled)
        self.callbacks.post("on_rollout_end", report)

    def group_given_up(self, report: GroupReport) -> None:
        """A group that nobody will train, though nothing was wrong with it: its tokens are waste."""
        to_metrics.record_waste(self._meter, report.tokens_sampled)
        self._account.wasted(report.tokens_sampled)
        self.fault("given_up_groups")

    def visit_skipped(self) -> None:
        self._meter.add("groups/skipped", 1)

    def lag_changed(self, by: int) -> None:
        self._meter.add("governor/raised" if by > 0 else "governor/lowered", abs(by))

    def batch_started(self, version: Version) -> None:
        self.callbacks.post("on_batch_start", version)

    def published(self, manifest: Manifest) -> None:
        to_metrics.record_publish(self._meter, manifest)

    def loaded(self, engine: str, report: LoadReport) -> None:
        to_metrics.record_load(self._meter, report)
        self.callbacks.post("on_policy_updated", report.version)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.last_evaluation = evaluation
        metrics = evaluation.metrics()
        self.log.evaluation(evaluation.version, metrics)
        for name, value in metrics.items():
            self._meter.add(name, value)
        self.callbacks.post("on_evaluation", evaluation.version, metrics)
        if evaluation.reward is None:
            self.console.status(f"version {evaluation.version} could not be evaluated: {evaluation.reason}")
            return
        self.summary.evaluation(evaluation.version, evaluation.reward)
        all_or_nothing = all(view.reward in (0.0, 1.0) for view in evaluation.views)
        self.console.evaluation(evaluation.version, evaluation.reward, all_or_nothing)

    # --------------------------------------------------------------------------------------------------- each step

    def step_done(
        self,
        step: StepReport,
        chunks: list[ChunkReport],
        groups: list[tuple[GroupOrder, GroupReport]],
        replayed: list[tuple[GroupOrder, GroupReport]],
        engines: dict[str, EngineStats],
        learner: LearnerStats,
        core: Core,
        settled: list[Settled],
        accounted: int,
    ) -> None:
        self._trained_at = time.monotonic()
        for _, report in (*groups, *settled):
            if report is not None:
                to_metrics.record_group(self._meter, report)
        for chunk in chunks:
            to_metrics.record_chunk(self._meter, chunk)
        to_metrics.record_step(self._meter, step)
        to_metrics.record_engines(self._meter, engines.values())
        to_metrics.record_queue(self._meter, core.running, core.finished)
        to_metrics.record_choices(self._meter, core.max_lag, core.resting, len(replayed))
        self._account.engines(engines)
        self._account.learner(learner)
        to_metrics.record_efficiency(self._meter, self._account.lap(), self._account.whole())
        metrics = self._meter.flush()
        version = step.version - 1
        lines = [_batch_group(version, *group) for group in groups]
        lines += [_batch_group(version, *group, replay=True) for group in replayed]
        self.log.batch(step.version, version, lines, [visit for visit, _ in settled], accounted)
        crash.reached("controller.line_written")
        self.log.step(step.version, metrics)
        if self._views:
            self.log.rollouts(step.version, self._views)
            self._views.clear()
        self.summary.step(step.version, metrics)
        self.console.step(step.version, metrics)
        self.callbacks.post("on_batch_end", metrics)

    def settled(self, version: Version, settled: list[Settled], accounted: int) -> None:
        """What came to its end between two steps, where a checkpoint relies on it."""
        for _, report in settled:
            if report is not None:
                to_metrics.record_group(self._meter, report)
        self.log.batch(version, version, [], [visit for visit, _ in settled], accounted)

    # --------------------------------------------------------------------------------------------------- at the end

    def build_summary(self, exit_code: int, reason: str) -> Summary:
        now = time.monotonic()
        self.summary.remainder(self._meter.flush())
        return self.summary.build(
            wall_s=now - self._began,
            train_s=self._trained_at - self._training_began,
            seed=self.seed,
            exit=exit_code,
            reason=reason,
        )


def _batch_group(version: Version, order: GroupOrder, report: GroupReport, replay: bool = False) -> BatchGroup:
    return BatchGroup(
        task_id=report.task_id,
        epoch=order.epoch,
        admitted_version=order.min_version,
        lag=version - report.oldest,
        episodes=report.episodes,
        replay=replay,
        task=order.task,
        reward=fmean(report.rewards) if report.rewards else None,
    )
