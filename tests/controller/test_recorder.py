"""Totals of a run over all its starts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

import outpace
from driver_support import Rig
from outpace.config.sections import EvalConfig
from outpace.controller.recorder import Recorder, TrainedStep
from outpace.controller.scheduler import Scheduler
from outpace.hardware.cores import ComputeUnits
from outpace.monitoring.callbacks import CallbackRunner
from outpace.monitoring.console import ProgressConsole
from outpace.monitoring.line_file import read_lines
from outpace.monitoring.metric_table import MetricLog
from outpace.monitoring.metrics import UNDECLARED_METRICS
from outpace.monitoring.run_directory import RunLog, UntrainedVisit
from outpace.rollouts.group_scoring import measure
from outpace.runtime import wire
from outpace.types import (
    ChunkReport,
    Episode,
    Failure,
    FinishedGroup,
    GroupOrder,
    GroupReport,
    JournalLocation,
    LearnerStats,
    Outcome,
    StepReport,
)

SLOW = Failure("tool search", "took longer than 1 s")


async def test_a_resumed_run_counts_tokens_seconds_and_failures_of_all_starts(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")

    async def ten_token_group(order: GroupOrder) -> GroupReport | None:
        if order.heldout:
            return None
        return GroupReport(
            order.group, f"t{order.task}", "finished", place=JournalLocation("w-0.journal", order.group, 1),
            rewards=[1.0],
            episodes=1, tokens_sampled=10, oldest=max(rig.engine.version, order.min_version), failures=[SLOW],
        )  # fmt: skip

    rig.worker.behave = ten_token_group
    assert await rig.run() == "done"
    first = rig.recorder.build_summary(0, "done")
    assert first.tokens_sampled == 10 * first.failures[0].count >= 10 * first.tokens_trained
    rig.log.summary(first)
    rig.log.close()

    log = RunLog.claim(tmp_path / "run", resume=True)
    log.start("")
    recorder = Recorder(log, ProgressConsole(None, quiet=True), CallbackRunner([]), ComputeUnits(2), 0)
    left_in_journal = [GroupReport(group, "t", "finished", tokens_sampled=10, failures=[SLOW]) for group in (90, 91)]
    recorder.resume(log.roll_back(3), left_in_journal)
    second = recorder.build_summary(0, "done")
    trained = sum(len(line["groups"]) for line in read_lines(tmp_path / "run" / "batches.jsonl"))
    log.close()
    assert trained == second.tokens_trained == 12, "three steps of four groups, a token each"
    assert second.tokens_sampled == 10 * (12 + 2), "trained groups and groups that are still in the journal"
    assert second.failures == [Failure(SLOW.source, SLOW.reason, 14)]
    assert second.wall_s >= first.wall_s, "includes the time of the steps that were rolled back"
    assert 0 < second.train_s <= first.train_s


@pytest.mark.parametrize("with_next_step", [False, True])
async def test_groups_finalized_after_the_last_step_are_counted_once_over_all_starts(
    tmp_path: Path, with_next_step: bool
) -> None:
    def opened(resume: bool) -> tuple[RunLog, Recorder]:
        log = RunLog.claim(tmp_path / "run", resume=resume)
        log.start("")
        return log, Recorder(log, ProgressConsole(None, quiet=True), CallbackRunner([]), ComputeUnits(2), 0)

    def filtered(group: int) -> tuple[UntrainedVisit, GroupReport]:
        return UntrainedVisit(group, 0, "filtered"), GroupReport(group, "t", "filtered", tokens_sampled=10)

    log, recorder = opened(resume=False)
    recorder.finalized(1, [filtered(0), filtered(1), (UntrainedVisit(2, 0, "skipped"), None)], accounted=3)
    if with_next_step:  # then the line of step 2 includes them
        log.step(2, {"throughput/sampled_tokens": 20, "waste/filtered_tokens": 20, "groups/skipped": 1})
    log.close()
    log, recorder = opened(resume=True)
    recorder.resume(log.roll_back(2 if with_next_step else 1, 3), [])
    summary = recorder.build_summary(0, "done")
    log.close()
    assert (summary.tokens_sampled, summary.tokens_filtered, summary.groups_skipped) == (20, 20, 1)


VALUES = {0: [1.0, 2.0], 1: [3.0, 3.0, 10.0], 2: [-4.0], 3: [0.5, 7.5]}
"""Values that user code reports in each group."""


def reported_group(group: int, outcome: Outcome, *rewards: float) -> GroupReport:
    """The report of a worker, as the controller receives it or reads it from the journal."""
    log = MetricLog()
    for value in VALUES[group]:
        for rule in ("sum", "mean", "std", "min", "max", "last", "p50", "p75"):
            log.log_metric(f"env/{rule}", value)
        log.log_metric("env/ratio", value, group + 1)
    log.log_metric("env/mean", float("inf"))
    episodes = [Episode([], rewards={"correct": reward}, reward=reward) for reward in rewards]
    report = GroupReport(group, f"t{group}", outcome, rewards=list(rewards), episodes=len(rewards), tokens_sampled=10)
    measured = measure(episodes, report, log, EvalConfig().is_solved)
    return wire.decode(wire.encode(msgspec.structs.replace(report, measured=measured)), GroupReport)


async def test_rules_hold_over_three_workers_four_chunks_and_a_resume(tmp_path: Path, own_metrics: None) -> None:
    for rule in ("sum", "mean", "std", "min", "max", "last", "p50", "p75", "ratio"):
        outpace.metric(f"env/{rule}", rule=rule)
    outpace.metric("env/callback", rule="max")

    def opened(resume: bool) -> tuple[RunLog, Recorder]:
        log = RunLog.claim(tmp_path / "run", resume=resume)
        log.start("")
        return log, Recorder(log, ProgressConsole(None, quiet=True), CallbackRunner([]), ComputeUnits(2), 0)

    first_worker, second_worker = reported_group(0, "filtered", 1.0, 1.0), reported_group(1, "finished", 0.0, 1.0)
    log, recorder = opened(resume=False)
    recorder.group_closed(first_worker)
    recorder.finalized(1, [(UntrainedVisit(0, 0, "filtered"), first_worker)], accounted=1)
    recorder.group_closed(second_worker)
    log.close()  # killed: the first group is on record, the second one in the journal

    log, recorder = opened(resume=True)
    recorder.resume(log.roll_back(1, 1), [second_worker])
    third_worker, first_again = reported_group(2, "finished", 0.0, 0.0), reported_group(3, "finished", 1.0, 0.5)
    for report in (third_worker, first_again):
        recorder.group_closed(report)
    lags: list[dict[int, int]] = [{0: 5}, {0: 2, 1: 3}, {4: 1}, {2: 9}]
    chunks = [ChunkReport(sum(counts.values()), 1, 0.0, lag_counts=counts) for counts in lags]
    groups = [
        FinishedGroup(GroupOrder(report.group, 0, 0, 1, 2), report)
        for report in (second_worker, third_worker, first_again)
    ]
    recorder.callbacks.log.log_metric("env/callback", 4)
    recorder.callbacks.log.log_metric("env/callback", 3)
    replay, rerolls = SimpleNamespace(fills=False), SimpleNamespace(waiting=0, dropped=0)
    scheduler = SimpleNamespace(running=0, finished=0, max_lag=2, resting=0, replay=replay, rerolls=rerolls)
    recorder.step_done(
        TrainedStep(StepReport(2, 0.5, 20, 1.0, 1e-3), chunks, groups, []),
        {}, LearnerStats(2, 0.0, 0.0, 20, 1, 1), cast(Scheduler, scheduler), [], accounted=4,
    )  # fmt: skip
    log.close()
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    expected = {  # values 1, 2, 3, 3, 10, -4, 0.5, 7.5
        "env/sum": 23, "env/mean": 2.875, "env/std": math.sqrt(195.5 / 8 - 2.875**2), "env/min": -4, "env/max": 10,
        "env/last": 7.5, "env/p50": 2, "env/p75": 3, "env/ratio": 23 / (2 * 1 + 3 * 2 + 1 * 3 + 2 * 4),
        "env/callback": 4,
        # rewards 1, 1 | 0, 1 | 0, 0 | 1, 0.5
        "reward/mean": 4.5 / 8, "reward/correct": 4.5 / 8, "reward/correct/std": math.sqrt(4.25 / 8 - (4.5 / 8) ** 2),
        "groups/solve_all": 0.25, "groups/solve_none": 0.25, "groups/filtered": 1, "groups/finished": 3,
        # lags of 20 tokens: seven 0, three 1, nine 2, one 4
        "lag/mean": 25 / 20, "lag/p95": 2, "lag/max": 4, "throughput/trained_tokens": 20,
        "throughput/sampled_tokens": 40, "completions/mean_length": 40 / 8, "faults/nan_metrics": 4,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == pytest.approx(expected)


async def test_an_undeclared_metric_is_averaged_and_named_once_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(UNDECLARED_METRICS)
    log = RunLog.claim(tmp_path / "run")
    log.start("")
    recorder = Recorder(log, ProgressConsole(None), CallbackRunner([]), ComputeUnits(2), 0)
    for group in range(2):
        reported = MetricLog()
        reported.log_metric("colour", group)
        report = GroupReport(group, "t", "filtered")
        measured = measure([], report, reported, EvalConfig().is_solved)
        report = msgspec.structs.replace(report, measured=measured)
        recorder.finalized(1, [(UntrainedVisit(group, 0, "filtered"), report)], accounted=group + 1)
    log.close()
    assert capsys.readouterr().out.count("colour") == 1


async def test_the_duration_of_a_killed_start_is_taken_from_its_last_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    await rig.run()
    last = list(read_lines(tmp_path / "run" / "metrics.jsonl"))[-1]
    rig.log.close()
    log = RunLog.claim(tmp_path / "run", resume=True)
    assert log.roll_back(1).seconds == last["time/total_s"] > 0
    log.close()
