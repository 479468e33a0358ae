from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outpace.checkpoint.journal import EntryFile, JournalWriter, read_record
from outpace.errors import CorruptData
from outpace.types import JournalLocation
from support import a_record, kept_of

OpenJournal = Callable[..., JournalWriter]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[OpenJournal]:
    writers: list[JournalWriter] = []

    def start(name: str = "w0", segment_bytes: int = 1 << 20) -> JournalWriter:
        writers.append(JournalWriter(tmp_path, name, segment_bytes))
        return writers[-1]

    yield start
    for writer in writers:
        writer.close()


def append(writer: JournalWriter, group: int, tokens: int = 5) -> JournalLocation:
    return writer.append(kept_of(group), a_record(group, tokens))


def test_appended_records_are_read_back_by_location(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal()
    locations = [append(writer, group) for group in range(10)]
    assert [read_record(tmp_path, location).group for location in reversed(locations)] == list(range(9, -1, -1))


def test_two_writers_never_share_a_segment(tmp_path: Path, journal: OpenJournal) -> None:
    first, second = journal(), journal("w1")
    assert append(first, 0).segment != append(second, 1).segment


def test_a_restarted_writer_does_not_touch_earlier_segments(tmp_path: Path, journal: OpenJournal) -> None:
    before = append(journal(), 0)
    after = append(journal(), 1)
    assert before.segment != after.segment
    assert read_record(tmp_path, before).group == 0


def test_a_flipped_bit_is_detected(tmp_path: Path, journal: OpenJournal) -> None:
    location = append(journal(), 0)
    path = tmp_path / location.segment
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match="checksum"):
        read_record(tmp_path, location)


def test_a_truncated_record_is_detected(tmp_path: Path, journal: OpenJournal) -> None:
    location = append(journal(), 0)
    path = tmp_path / location.segment
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptData, match=rf"^(?!.*checksum).*{re.escape(location.segment)}"):
        read_record(tmp_path, location)


def test_a_wrong_location_is_detected(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal()
    append(writer, 0)
    second = append(writer, 1)
    with pytest.raises(CorruptData):
        read_record(tmp_path, JournalLocation(second.segment, second.offset - 1, second.length))


def test_a_new_segment_number_is_above_every_existing_one(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=1)
    first, _, third = (append(writer, group).segment for group in range(3))
    writer.release([first])
    assert append(journal(), 3).segment > third, "sorted segment names must give the entries in order"


def test_a_segment_with_a_torn_entry_is_never_appended_to_again(
    tmp_path: Path, journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = journal()
    before = append(writer, 0)
    with monkeypatch.context() as disk:
        disk.setattr(os, "writev", lambda handle, pieces: os.write(handle, pieces[0]))
        with pytest.raises(OSError, match="full"):
            append(writer, 1)
    after = append(writer, 2)
    assert after.segment != before.segment
    assert [read_record(tmp_path, location).group for location in (before, after)] == [0, 2]


def test_any_writer_may_delete_segments_of_a_dead_writer(tmp_path: Path, journal: OpenJournal) -> None:
    dead, other = journal("w0"), journal("w1")
    left, current = append(dead, 0).segment, append(other, 1).segment
    other.release([left, current, "w7-00000.journal"])
    assert [path.name for path in tmp_path.iterdir()] == [current]


def test_release_deletes_full_segments_but_not_the_current_one(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=1)
    old, current = append(writer, 0).segment, append(writer, 1).segment
    writer.release([old, current])
    assert [path.name for path in tmp_path.iterdir()] == [current]


def test_concurrent_appends_never_mix_records(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=2000)
    with ThreadPoolExecutor(8) as pool:
        locations = list(pool.map(lambda group: append(writer, group, tokens=group % 40), range(400)))
    assert [read_record(tmp_path, location).group for location in locations] == list(range(400))
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {location.segment for location in locations}, "no empty segment is created"


def test_a_closed_writer_rejects_appends(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal()
    append(writer, 0)
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        append(writer, 1)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.timeout(120)
def test_closing_waits_for_an_append_on_another_thread(
    tmp_path: Path, journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, resume, append_to = threading.Event(), threading.Event(), EntryFile.append

    def slow(self: EntryFile, pieces: list[bytes]) -> JournalLocation:
        inside.set()
        assert resume.wait(20)
        return append_to(self, pieces)

    monkeypatch.setattr(EntryFile, "append", slow)
    writer = journal()
    with ThreadPoolExecutor(2) as pool:
        appended = pool.submit(append, writer, 0)
        inside.wait(20)
        closed = pool.submit(writer.close)
        assert not closed.done()
        resume.set()
        closed.result()
        assert read_record(tmp_path, appended.result()).group == 0
