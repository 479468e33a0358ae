"""Totals of a run over all its starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver_support import Rig
from outpace.controller.recorder import Recorder
from outpace.monitoring.callbacks import CallbackRunner
from outpace.monitoring.console import ProgressConsole
from outpace.monitoring.line_file import read_lines
from outpace.monitoring.run_directory import RunLog, UntrainedVisit
from outpace.types import Failure, GroupOrder, GroupReport, JournalLocation

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
    recorder = Recorder(log, ProgressConsole(None, quiet=True), CallbackRunner([]), 2, 0)
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
        return log, Recorder(log, ProgressConsole(None, quiet=True), CallbackRunner([]), 2, 0)

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


async def test_the_duration_of_a_killed_start_is_taken_from_its_last_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    await rig.run()
    last = list(read_lines(tmp_path / "run" / "metrics.jsonl"))[-1]
    rig.log.close()
    log = RunLog.claim(tmp_path / "run", resume=True)
    assert log.roll_back(1).seconds == last["time/total_s"] > 0
    log.close()
