"""Turn log: answers of unfinished groups on disk, their recovery and cleanup. Disk errors never fail a rollout."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.checkpoint import turn_log
from outpace.checkpoint.journal import EntryFile
from outpace.checkpoint.turn_log import (
    KIND,
    RecordedAnswer,
    TurnIndex,
    TurnLog,
    digest_request,
    pack_answer,
    prune_turns,
    read_answers,
    survey_turns,
)
from outpace.runtime import diagnostics
from outpace.types import Generation, GroupOrder, Sampling
from support import examples

SAMPLING = Sampling(max_tokens=8, seed=5, stop_ids=[2], stop_strings=["x"])
PROMPT = np.array([1, 2, 3], np.int32)


def ordered(position: int, min_version: int = 0) -> GroupOrder:
    return GroupOrder(position + 100, task=0, epoch=0, min_version=min_version, size=4, position=position)


def answer(*versions: int) -> Generation:
    length = len(versions)
    return Generation(
        np.arange(length, dtype=np.int32), np.zeros(length, np.float32), np.array(versions, np.int32), "stop"
    )


def record(
    log: TurnLog, position: int, episode: int = 0, number: int = 0, versions: Any = (3,), min_version: int = 0
) -> None:
    log.record(ordered(position, min_version), episode, number, PROMPT, SAMPLING, answer(*versions))


def keys(log: TurnLog, position: int) -> list[tuple[int, int]]:
    return [(head.episode, head.number) for head, _ in log.find(position)]


def disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


OpenLog = Callable[..., TurnLog]


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[OpenLog]:
    logs: list[TurnLog] = []

    def start(name: str = "w0", spare_bytes: int = 1 << 20) -> TurnLog:
        logs.append(TurnLog(tmp_path, name, spare_bytes))
        return logs[-1]

    yield start
    for log in logs:
        log.close()


def test_recorded_answers_are_found_at_once(open_log: OpenLog) -> None:
    log = open_log()
    for number in range(3):
        record(log, 7, episode=1, number=number, versions=(3, 4))
    record(log, 8)
    assert keys(log, 7) == [(1, 0), (1, 1), (1, 2)]
    head, found = log.find(7)[0]
    assert (head.group, head.oldest, head.newest, head.tokens) == (107, 3, 4, 2)
    assert head.request_digest == digest_request(PROMPT, SAMPLING)
    assert (found.tokens.tolist(), found.versions.tolist(), found.stop) == ([0, 1], [3, 4], "stop")


def test_a_request_digest_covers_prompt_and_sampling_but_not_the_seed() -> None:
    request_digest = digest_request(PROMPT, SAMPLING)
    assert digest_request(PROMPT.copy(), msgspec.structs.replace(SAMPLING, seed=6)) == request_digest
    for changes in ({"temperature": 0.5}, {"max_tokens": 9}, {"stop_strings": []}, {"stop_ids": []}, {"top_k": 1}):
        assert digest_request(PROMPT, msgspec.structs.replace(SAMPLING, **changes)) != request_digest
    assert digest_request(np.array([1, 2, 4], np.int32), SAMPLING) != request_digest


def test_an_unused_log_creates_no_file_and_starts_no_thread(open_log: OpenLog, tmp_path: Path) -> None:
    threads = threading.active_count()
    log = open_log()
    log.close_group(3)
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads


def test_a_successor_of_any_name_finds_the_answers_of_a_dead_worker(open_log: OpenLog) -> None:
    record(dead := open_log("w0"), 7)
    dead.close()
    assert keys(open_log("w0"), 7) == keys(open_log("w1"), 7) == [(0, 0)]


def test_answers_that_other_workers_record_later_are_found(open_log: OpenLog) -> None:
    first, second = open_log("w0"), open_log("w1")
    assert keys(first, 7) == []
    record(second, 7)
    assert keys(second, 7) == keys(first, 7) == [(0, 0)]
    record(second, 7, number=1)
    assert keys(second, 7) == keys(first, 7) == [(0, 0), (0, 1)]


def test_answers_of_a_closed_group_are_not_found(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()
    record(log, 7)
    record(log, 8)
    log.close_group(7)
    assert keys(log, 7) == []
    assert keys(open_log(), 7) == [], "a successor does not find them either"
    record(log, 7, number=5)
    assert keys(log, 7) == [(0, 5)], "closing only affects earlier answers"
    log.close()
    assert set(survey_turns(tmp_path)) == {7, 8}


def test_disk_use_is_bounded_by_the_answers_of_open_groups(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log(spare_bytes=2000)
    record(log, 10_000)
    log.find(0)
    one, most = disk(tmp_path), 0
    for position in range(500):
        for number in range(4):
            record(log, position, number=number)
        if position >= 3:
            log.close_group(position - 3)
        if position % 10 == 0:
            log.find(0)
            most = max(most, disk(tmp_path))
    still_open = (3 * 4 + 1) * one
    assert most < 2 * (still_open + 4 * one) + 2000
    assert keys(log, 10_000) == [(0, 0)], "a slow group keeps its answers while files are rewritten"
    assert len(list(tmp_path.iterdir())) <= 2


def test_a_successor_of_the_same_name_removes_answers_that_its_predecessor_left(
    open_log: OpenLog, tmp_path: Path
) -> None:
    dead = open_log(spare_bytes=1 << 20)
    for position in range(100):
        record(dead, position)
    dead.close()
    before = disk(tmp_path)
    log = open_log(spare_bytes=0)
    for position in range(99):
        log.close_group(position)
        log.find(0)  # also starts the log
    assert keys(log, 99) == [(0, 0)]
    assert disk(tmp_path) < before / 10


def test_a_worker_that_stops_with_all_groups_closed_leaves_no_files(open_log: OpenLog, tmp_path: Path) -> None:
    log, other = open_log("w0"), open_log("w1")
    record(log, 1)
    record(other, 2)
    log.close_group(1)
    log.close()
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"w1-00000.{KIND}"]


def test_closing_a_group_affects_only_answers_of_the_same_worker(open_log: OpenLog) -> None:
    first, second = open_log("w0"), open_log("w1")
    record(first, 7, number=0)
    record(second, 7, number=1)
    assert (0, 0) in keys(first, 7)
    assert sorted(keys(second, 7)) == [(0, 0), (0, 1)]
    second.close_group(7)
    assert keys(second, 7) == keys(first, 7) == [(0, 0)]


def test_a_worker_does_not_remove_files_of_a_worker_of_another_name(open_log: OpenLog, tmp_path: Path) -> None:
    record(other := open_log("w0"), 7)
    other.close()
    log = open_log("w1", spare_bytes=0)
    for position in range(20, 25):
        record(log, position)
        log.close_group(position)
    log.close()
    assert len(survey_turns(tmp_path)[7]) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("w0")] == [f"w0-00000.{KIND}"]


def test_a_file_of_another_worker_may_be_rewritten_between_two_reads(
    open_log: OpenLog, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = open_log("w0"), open_log("w1", spare_bytes=0)
    for position in range(20):
        record(writer, position)
    assert keys(writer, 19) == keys(reader, 19) == [(0, 0)]
    for position in range(19):
        writer.close_group(position)
    assert keys(writer, 19) == [(0, 0)]
    assert keys(reader, 19) == [(0, 0)]
    assert keys(reader, 3) == []
    assert caplog.records == [], "no attempt to read removed answers"


def test_a_full_disk_only_logs_a_warning(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: EntryFile, pieces: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    log = open_log()
    record(log, 1)
    assert keys(log, 1) == [(0, 0)]
    monkeypatch.setattr(EntryFile, "append", full)
    for number in range(1, 5):
        record(log, 1, number=number)
    log.close_group(1)
    assert keys(log, 1) == [(0, 0)], "earlier answers can still be read"
    (line,) = (line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING)
    assert "[Errno 28] No space left on device" in line


def test_recording_resumes_once_there_is_space_again(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log()
    record(log, 1, number=0)
    log.find(0)
    with monkeypatch.context() as disk:
        disk.setattr(os, "writev", lambda handle, pieces: os.write(handle, pieces[0]))
        for number in (1, 2):
            record(log, 1, number=number)
        log.find(0)
    caplog.clear()
    record(log, 1, number=3)
    assert keys(log, 1) == keys(open_log("w1"), 1) == [(0, 0), (0, 3)]
    assert caplog.records == [], "no torn entry remains"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_answer_loses_no_others_when_files_are_rewritten(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log(spare_bytes=0)
    record(log, 1)
    record(log, 2)
    log.find(0)
    path = tmp_path / f"w0-00000.{KIND}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 - 1] + b"?" + whole[len(whole) // 2 :])
    record(log, 3)
    record(log, 4)
    log.find(0)
    for position in (3, 4):
        log.close_group(position)
    record(log, 5)
    assert [keys(log, position) for position in (1, 2, 5)] == [[], [(0, 0)], [(0, 0)]]
    assert not path.exists()


def test_a_file_name_is_never_reused(open_log: OpenLog) -> None:
    writer, reader = open_log("w0", spare_bytes=0), open_log("w1")
    record(writer, 7)
    assert keys(writer, 7) == keys(reader, 7) == [(0, 0)]
    writer.close_group(7)
    writer.find(0)  # no group is open, so the file has been removed
    record(writer, 8, number=5)
    assert keys(writer, 8) == keys(reader, 8) == [(0, 5)]
    assert keys(reader, 7) == []


def test_an_outdated_location_is_never_read_as_another_answer(
    open_log: OpenLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log()
    record(log, 7)
    log.find(0)
    index = TurnIndex(tmp_path)
    index.refresh()
    (location, head), path = index.answers_of(7)[0], tmp_path / f"w0-00000.{KIND}"
    other = pack_answer(ordered(8), 0, 0, digest_request(PROMPT, SAMPLING), answer(3))
    assert sum(map(len, other)) == location.length
    path.write_bytes(b"".join(other))
    assert list(read_answers(tmp_path, [(location, head)])) == []
    assert any(line.levelno == logging.WARNING and path.name in line.getMessage() for line in caplog.records)


def test_a_file_replaced_under_the_same_name_is_read_from_its_beginning(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()
    record(log, 7)
    log.find(0)
    index = TurnIndex(tmp_path)
    index.refresh()
    path = tmp_path / f"w0-00000.{KIND}"
    (tmp_path / "other").write_bytes(b"".join(pack_answer(ordered(8), 0, 0, b"?" * 16, answer(3))))
    os.rename(tmp_path / "other", path)
    index.refresh()
    assert index.positions() == [8]


@pytest.mark.timeout(120)
def test_a_dangling_symlink_does_not_block_reads(open_log: OpenLog, tmp_path: Path) -> None:
    (tmp_path / f"w9-00000.{KIND}").symlink_to(tmp_path / "nowhere")
    assert keys(open_log(), 7) == []


def test_a_slow_disk_drops_answers_instead_of_using_more_memory(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resume, append = threading.Event(), EntryFile.append

    def slow(self: EntryFile, pieces: list[bytes]) -> Any:
        resume.wait(30)
        return append(self, pieces)

    monkeypatch.setattr(EntryFile, "append", slow)
    monkeypatch.setattr(turn_log, "MOST_WAITING", 10)
    log = open_log()
    for number in range(100):
        record(log, 1, number=number)
    resume.set()
    assert 10 <= len(keys(log, 1)) <= 22  # a batch that is being written, and as many that wait
    assert len(caplog.records) == 1


def test_answers_of_a_group_that_is_closed_soon_are_not_written(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_log, "GATHER_S", 60.0)  # the log writes only when `find` asks
    log = open_log()
    record(log, 1)
    record(log, 2)
    log.close_group(1)
    assert keys(log, 2) == [(0, 0)]
    assert survey_turns(tmp_path).keys() == {2}
    assert disk(tmp_path) == len(b"".join(pack_answer(ordered(2), 0, 0, digest_request(PROMPT, SAMPLING), answer(3))))


def test_an_answer_is_found_until_its_group_is_closed(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "GATHER_S", 60.0)
    log = open_log()
    record(log, 1)
    assert keys(log, 1) == [(0, 0)]
    log.close_group(1)
    assert keys(log, 1) == []


def test_a_file_truncated_at_any_byte_gives_its_complete_answers(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()
    for number in range(3):
        record(log, 1, number=number)
    log.close()
    path = tmp_path / f"w0-00000.{KIND}"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        found = survey_turns(tmp_path)
        assert (len(found[1]) if found else 0) == size * 3 // len(whole)


def test_a_damaged_answer_is_not_found(open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log()
    record(log, 1, number=0)
    record(log, 1, number=1)
    assert keys(log, 1) == [(0, 0), (0, 1)]
    path = tmp_path / f"w0-00000.{KIND}"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert keys(log, 1) == [(0, 0)]


def newest_versions(found: dict[int, list[RecordedAnswer]]) -> dict[int, list[int]]:
    return {position: [head.newest for head in heads] for position, heads in found.items()}


def test_a_survey_reports_the_answers_of_each_position(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()
    record(log, 1, versions=(4, 5, 6), min_version=3)
    record(log, 1, number=1, versions=(6, 7), min_version=3)
    record(log, 2, versions=(9,), min_version=9)
    log.close()
    found = survey_turns(tmp_path)
    assert set(found) == {1, 2}
    assert [(head.min_version, head.newest) for head in found[1]] == [(3, 6), (3, 7)]
    assert survey_turns(tmp_path / "none") == {}
    assert newest_versions(survey_turns(tmp_path, newest=6)) == {1: [6]}


def test_pruning_drops_answers_sampled_by_lost_weight_versions(open_log: OpenLog, tmp_path: Path) -> None:
    for name, position in (("w0", 1), ("w1", 2)):
        log = open_log(name)
        record(log, position, versions=(4, 5))
        record(log, position, number=1, versions=(5, 6))
        log.close()
    (tmp_path / "w0-00000.journal").write_bytes(b"another kind")
    prune_turns(tmp_path, newest=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"kept-00000.{KIND}", "w0-00000.journal"]
    assert newest_versions(survey_turns(tmp_path)) == {1: [5], 2: [5]}
    assert keys(open_log("w1"), 1) == [(0, 0)]
    prune_turns(tmp_path, newest=5, positions={2, 77})
    assert set(survey_turns(tmp_path)) == {2}
    prune_turns(tmp_path, newest=0)
    assert [path.name for path in tmp_path.iterdir()] == ["w0-00000.journal"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(4))
def test_pruning_killed_at_any_step_loses_nothing(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    for name, position in (("w0", 1), ("w1", 2)):
        log = open_log(name)
        record(log, position)
        log.close()
    left = step

    def die(label: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    with monkeypatch.context() as doomed:
        doomed.setattr(diagnostics, "crash_point", die)
        with pytest.raises(Killed):
            prune_turns(tmp_path, newest=3)
    prune_turns(tmp_path, newest=3)
    log = open_log("w0")
    assert set(keys(log, 1)) == set(keys(log, 2)) == {(0, 0)}
    assert len(list(tmp_path.iterdir())) == 1


@examples(60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["record", "close", "die", "look"]), st.integers(0, 4), st.integers(0, 1)),
        max_size=40,
    )
)
def test_exactly_the_answers_of_open_groups_are_found_after_any_sequence_of_events(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Two workers with separate positions, which die and restart at any time."""
    directory = tmp_path_factory.mktemp("turns")
    logs = [TurnLog(directory, f"w{worker}", spare_bytes=300) for worker in (0, 1)]
    known: dict[int, list[int]] = {}
    for number, (what, index, worker) in enumerate(steps):
        position = 2 * index + worker
        if what == "record":
            record(logs[worker], position, number=number)
            known.setdefault(position, []).append(number)
        elif what == "close":
            logs[worker].find(0)  # an unused log has nothing to close
            logs[worker].close_group(position)
            known.pop(position, None)
        elif what == "die":
            logs[worker].close()
            logs[worker] = TurnLog(directory, f"w{worker}", spare_bytes=300)
        else:
            found = [head.number for head, _ in logs[worker].find(position)]
            assert sorted(found) == known.get(position, [])
    for log in logs:
        log.close()
    assert {position: len(found) for position, found in survey_turns(directory).items()} == {
        position: len(numbers) for position, numbers in known.items()
    }
