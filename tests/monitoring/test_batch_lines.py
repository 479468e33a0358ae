"""batches.jsonl: every prompt visit is recorded once and is on disk before a checkpoint relies on it."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.monitoring.line_file import LineFile
from outpace.monitoring.run_directory import BatchGroup, RunLog, UntrainedVisit


def started(directory: Path) -> RunLog:
    log = RunLog.claim(directory)
    log.start("[run]\nseed = 0\n")
    return log


def batches_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "batches.jsonl").read_text().splitlines()]


def test_a_batch_line_lists_its_tasks_and_the_visits_that_ended_untrained(tmp_path: Path) -> None:
    log = started(tmp_path)
    untrained = [UntrainedVisit(4, 1, "filtered", "all rewards are equal", "task-4"), UntrainedVisit(5, 1, "skipped")]
    log.batch(1, 0, [BatchGroup("task-7", 1, 0, 0, 8, task=7)], untrained, accounted=3)
    log.close()
    [line] = batches_of(tmp_path)
    assert line["groups"][0]["task"] == 7
    assert line["settled"] == [
        {"task": 4, "epoch": 1, "outcome": "filtered", "reason": "all rewards are equal", "task_id": "task-4"},
        {"task": 5, "epoch": 1, "outcome": "skipped"},
    ]
    assert line["accounted"] == 3


def test_a_batch_line_without_untrained_visits_omits_them(tmp_path: Path) -> None:
    log = started(tmp_path)
    log.batch(1, 0, [])
    log.close()
    assert batches_of(tmp_path) == [{"step": 1, "version": 0, "groups": []}]


@given(
    accounted=st.lists(st.none() | st.integers(0, 20), max_size=8),
    step=st.integers(0, 9),
    most=st.none() | st.integers(0, 20),
)
def test_rolling_back_keeps_batches_up_to_the_step_and_the_accounted_count(
    tmp_path_factory: pytest.TempPathFactory, accounted: list[int | None], step: int, most: int | None
) -> None:
    directory = tmp_path_factory.mktemp("run")
    log = started(directory)
    for number, count in enumerate(accounted, 1):
        log.batch(number, number - 1, [], accounted=count)
    log.roll_back(step, most)
    log.close()
    kept = [
        number
        for number, count in enumerate(accounted, 1)
        if number <= step and (most is None or count is None or count <= most)
    ]
    assert [line["step"] for line in batches_of(directory)] == kept


def test_rolling_back_removes_visits_recorded_after_the_checkpoint_at_the_same_step(tmp_path: Path) -> None:
    log = started(tmp_path)
    log.step(2, {})
    log.batch(2, 1, [], accounted=16)
    log.batch(2, 2, [], [UntrainedVisit(0, 0, "failed")], accounted=17)
    log.roll_back(2, 16)
    log.close()
    assert [line["accounted"] for line in batches_of(tmp_path)] == [16]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":2}\n'


# ------------------------------------------------------------------------------------------------------------- syncing


def test_syncing_waits_for_every_line_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = started(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log.sync()
    assert len(set(synced)) == 3
    log.close()
    log.sync()
    assert len(synced) == 3


def test_a_line_the_disk_had_no_room_for_fails_the_sync_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = started(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        log.batch(1, 0, [])
        with pytest.raises(OSError, match=r"No space left on device: .*batches\.jsonl"):
            log.sync()
    log.batch(2, 1, [])
    log.sync()
    log.close()


@pytest.mark.timeout(120)
def test_closing_a_file_waits_for_a_running_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineFile(tmp_path / "lines")
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(fd: int) -> None:
        inside.set()
        go_on.wait()
        os.fstat(fd)  # raises if the descriptor is gone
        order.append("synced")

    def close() -> None:
        lines.close()
        order.append("closed")

    monkeypatch.setattr(os, "fsync", slow)
    syncing = threading.Thread(target=lines.sync)
    syncing.start()
    inside.wait()
    lines.append({"step": 1})
    closing = threading.Thread(target=close)
    closing.start()
    closing.join(0.2)  # long enough for a close that does not wait
    go_on.set()
    syncing.join()
    closing.join()
    assert order == ["synced", "closed"]
