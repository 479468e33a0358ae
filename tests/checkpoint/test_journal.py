from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from outpace.checkpoint.journal import JournalWriter, read
from outpace.errors import CorruptData
from outpace.types import GroupRecord, Place, Row

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


def record(group: int, tokens: int = 5) -> GroupRecord:
    row = Row(
        np.arange(tokens, dtype=np.int32),
        np.ones(tokens, dtype=np.bool_),
        np.zeros(tokens, dtype=np.float32),
        np.zeros(tokens, dtype=np.int32),
        np.ones(tokens, dtype=np.float32),
    )
    return GroupRecord(group, f"task/{group}", 0, 0, [row], [1.0])


def test_what_was_appended_is_read_back_by_its_place(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal()
    places = [writer.append(record(group)) for group in range(10)]
    assert [read(tmp_path, place).group for place in reversed(places)] == list(range(9, -1, -1))


def test_two_writers_never_share_a_segment(tmp_path: Path, journal: OpenJournal) -> None:
    first, second = journal(), journal("w1")
    assert first.append(record(0)).segment != second.append(record(1)).segment


def test_a_writer_that_starts_again_leaves_earlier_segments_alone(tmp_path: Path, journal: OpenJournal) -> None:
    before = journal().append(record(0))
    after = journal().append(record(1))
    assert before.segment != after.segment
    assert read(tmp_path, before).group == 0


def test_a_flipped_bit_is_caught(tmp_path: Path, journal: OpenJournal) -> None:
    place = journal().append(record(0))
    path = tmp_path / place.segment
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match="checksum"):
        read(tmp_path, place)


def test_a_record_cut_short_is_caught(tmp_path: Path, journal: OpenJournal) -> None:
    place = journal().append(record(0))
    path = tmp_path / place.segment
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptData, match="cut short"):
        read(tmp_path, place)


def test_a_place_that_points_elsewhere_is_caught(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal()
    writer.append(record(0))
    second = writer.append(record(1))
    with pytest.raises(CorruptData):
        read(tmp_path, Place(second.segment, second.offset - 1, second.length))


def test_full_segments_are_released_and_the_one_being_written_stays(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=1)
    old, current = writer.append(record(0)).segment, writer.append(record(1)).segment
    writer.release([old, current])
    assert [path.name for path in tmp_path.iterdir()] == [current]


def test_threads_that_append_at_once_never_mix_their_records(tmp_path: Path, journal: OpenJournal) -> None:
    writer = journal(segment_bytes=2000)
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(lambda group: writer.append(record(group, tokens=group % 40)), range(400)))
    assert [read(tmp_path, place).group for place in places] == list(range(400))
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {place.segment for place in places}, "no segment is made that holds nothing"
