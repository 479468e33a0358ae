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


def test_what_was_appended_is_read_back_by_its_place(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal()
    places = [append(writer, group) for group in range(10)]
    assert [read_record(tmp_path, place).group for place in reversed(places)] == list(range(9, -1, -1))


def test_two_writers_never_share_a_segment(tmp_path: Path, journal: OpenJournal) -> None:
    first, second = journal(), journal("w1")
    assert append(first, 0).segment != append(second, 1).segment


def test_a_writer_that_starts_again_leaves_earlier_segments_alone(tmp_path: Path, journal: OpenJournal) -> None:
    before = append(journal(), 0)
    after = append(journal(), 1)
    assert before.segment != after.segment
    assert read_record(tmp_path, before).group == 0


def test_a_flipped_bit_is_caught(tmp_path: Path, journal: OpenJournal) -> None:
    place = append(journal(), 0)
    path = tmp_path / place.segment
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match="checksum"):
        read_record(tmp_path, place)


def test_a_record_cut_short_is_caught(tmp_path: Path, journal: OpenJournal) -> None:
    place = append(journal(), 0)
    path = tmp_path / place.segment
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptData, match=rf"^(?!.*checksum).*{re.escape(place.segment)}"):
        read_record(tmp_path, place)


def test_a_place_that_points_elsewhere_is_caught(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal()
    append(writer, 0)
    second = append(writer, 1)
    with pytest.raises(CorruptData):
        read_record(tmp_path, JournalLocation(second.segment, second.offset - 1, second.length))


def test_a_writer_never_takes_a_number_below_one_that_is_there(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=1)
    first, _, third = (append(writer, group).segment for group in range(3))
    writer.release([first])
    assert append(journal(), 3).segment > third, "who reads names in their order reads entries in theirs"


def test_a_segment_that_took_half_an_entry_is_left_for_good(
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
    assert [read_record(tmp_path, place).group for place in (before, after)] == [0, 2]


def test_anybody_may_delete_what_a_writer_has_left_behind(tmp_path: Path, journal: OpenJournal) -> None:
    dead, other = journal("w0"), journal("w1")
    left, current = append(dead, 0).segment, append(other, 1).segment
    other.release([left, current, "w7-00000.journal"])
    assert [path.name for path in tmp_path.iterdir()] == [current]


def test_full_segments_are_released_and_the_one_being_written_stays(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=1)
    old, current = append(writer, 0).segment, append(writer, 1).segment
    writer.release([old, current])
    assert [path.name for path in tmp_path.iterdir()] == [current]


def test_threads_that_append_at_once_never_mix_their_records(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=2000)
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(lambda group: append(writer, group, tokens=group % 40), range(400)))
    assert [read_record(tmp_path, place).group for place in places] == list(range(400))
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {place.segment for place in places}, "no segment is made that holds nothing"


def test_a_closed_writer_takes_nothing_more(tmp_path: Path, journal: OpenJournal) -> None:
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
    inside, going_on, append_to = threading.Event(), threading.Event(), EntryFile.append

    def slow(self: EntryFile, pieces: list[bytes]) -> JournalLocation:
        inside.set()
        assert going_on.wait(20)
        return append_to(self, pieces)

    monkeypatch.setattr(EntryFile, "append", slow)
    writer = journal()
    with ThreadPoolExecutor(2) as pool:
        appended = pool.submit(append, writer, 0)
        inside.wait(20)
        closed = pool.submit(writer.close)
        assert not closed.done()
        going_on.set()
        closed.result()
        assert read_record(tmp_path, appended.result()).group == 0
