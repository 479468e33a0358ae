"""Recovering finished groups from the journal after kills, damage and an interrupted compaction."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.checkpoint.journal import JournalWriter, compact_journal, place_of, read_record, survey_journal
from outpace.runtime import diagnostics
from outpace.types import FinishedGroup, JournalLocation
from support import a_record, kept_of


def journal(directory: Path, *groups: int, name: str = "w0", newest: int = 0, segment_bytes: int = 1 << 20) -> None:
    writer = JournalWriter(directory, name, segment_bytes)
    for group in groups:
        writer.append(kept_of(group, newest), a_record(group))
    writer.close()


def groups_of(found: list[FinishedGroup]) -> list[int]:
    return [each.order.group for each in found]


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def is_readable(directory: Path, found: FinishedGroup) -> bool:
    return read_record(directory, place_of(found)).group == found.order.group


def test_every_finished_group_is_found_with_its_order_and_report(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w0")
    kept = kept_of(7, newest=3, position=12)
    place = writer.append(kept, a_record(7))
    writer.close()
    (found,) = survey_journal(tmp_path)
    assert (found.order, place_of(found)) == (kept.order, place)
    assert msgspec.structs.replace(found.report, place=None) == kept.report


def test_segments_are_read_in_order_of_writer_and_number(tmp_path: Path) -> None:
    journal(tmp_path, 3, 1, 4, name="w1", segment_bytes=1)
    journal(tmp_path, 5, 9, name="w0")
    found = survey_journal(tmp_path)
    assert groups_of(found) == [5, 9, 3, 1, 4]
    assert all(is_readable(tmp_path, each) for each in found)


def test_an_empty_or_missing_journal_has_no_groups(tmp_path: Path) -> None:
    assert survey_journal(tmp_path) == survey_journal(tmp_path / "none") == []


def test_foreign_files_are_neither_read_nor_touched(tmp_path: Path) -> None:
    journal(tmp_path, 1)
    foreign = ["notes.txt", "w0-00000.turns", "w0.journal", "w0-1.journal", ".hidden"]
    for name in foreign:
        (tmp_path / name).write_bytes(b"mine")
    found = survey_journal(tmp_path)
    assert groups_of(found) == [1]
    compact_journal(tmp_path, [])
    assert segments(tmp_path) == sorted(foreign)


def test_a_segment_truncated_at_any_byte_gives_its_complete_entries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal(tmp_path, 0, 1)
    path = tmp_path / "w0-00000.journal"
    whole = path.read_bytes()
    ends = [place_of(found).offset + place_of(found).length for found in survey_journal(tmp_path)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        caplog.clear()
        assert groups_of(survey_journal(tmp_path)) == [group for group, end in enumerate(ends) if end <= size]
        assert bool(caplog.records) == (size not in (0, *ends)), "a warning only if an entry is torn"


def test_a_flipped_bit_loses_one_group_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    journal(tmp_path, 0, 1, 2)
    path = tmp_path / "w0-00000.journal"
    whole = path.read_bytes()
    second = place_of(survey_journal(tmp_path)[1])
    for byte in range(second.offset, second.offset + second.length):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 0x10]) + whole[byte + 1 :])
        assert groups_of(survey_journal(tmp_path)) == [0, 2]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_arbitrary_bytes_never_make_a_survey_fail(
    tmp_path_factory: pytest.TempPathFactory, before: bytes, after: bytes
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal(directory, 1)
    path = directory / "w0-00000.journal"
    path.write_bytes(before + path.read_bytes() + after)
    assert groups_of(survey_journal(directory)) == [1]


def test_an_intact_entry_with_an_unexpected_header_is_skipped(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w0")
    writer.append({"order": "none"}, a_record(1))  # type: ignore[arg-type]
    writer.append(kept_of(2), a_record(2))
    writer.close()
    assert groups_of(survey_journal(tmp_path)) == [2]


def test_a_group_that_was_journaled_twice_is_found_in_its_older_version(tmp_path: Path) -> None:
    journal(tmp_path, 1, 2, name="w0", newest=6)
    journal(tmp_path, 2, name="w1", newest=4)
    journal(tmp_path, 2, name="w2", newest=5)
    assert [(place_of(each).segment, each.order.group) for each in survey_journal(tmp_path)] == [
        ("w0-00000.journal", 1),
        ("w1-00000.journal", 2),
    ]


def test_groups_with_the_same_number_but_different_positions_are_distinct(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w0")
    for position in (3, 8):
        writer.append(kept_of(1, position=position), a_record(1))
    writer.close()
    assert [found.order.position for found in survey_journal(tmp_path)] == [3, 8]


def test_compaction_keeps_exactly_the_given_groups(tmp_path: Path) -> None:
    journal(tmp_path, *range(6), segment_bytes=500)
    found = survey_journal(tmp_path)
    kept = compact_journal(tmp_path, [found[1], found[4]])
    assert groups_of(kept) == groups_of(survey_journal(tmp_path)) == [1, 4]
    assert all(is_readable(tmp_path, each) for each in kept)
    assert segments(tmp_path) == ["kept-00000.journal"]


def test_a_second_compaction_and_later_writers_use_new_segment_names(tmp_path: Path) -> None:
    journal(tmp_path, 1)
    compact_journal(tmp_path, survey_journal(tmp_path))
    journal(tmp_path, 2)
    assert segments(tmp_path) == ["kept-00000.journal", "w0-00000.journal"]
    kept = compact_journal(tmp_path, survey_journal(tmp_path))
    assert segments(tmp_path) == ["kept-00001.journal"]
    assert all(is_readable(tmp_path, each) for each in kept)


def test_a_large_journal_is_compacted_into_several_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal(tmp_path, *range(10))
    monkeypatch.setattr("outpace.checkpoint.journal.SEGMENT_BYTES", 1000)
    kept = compact_journal(tmp_path, survey_journal(tmp_path))
    assert len(segments(tmp_path)) > 2
    assert groups_of(kept) == list(range(10))
    assert all(is_readable(tmp_path, each) for each in kept)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(12))
def test_a_compaction_killed_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    journal(tmp_path, *range(8), segment_bytes=400)
    found = survey_journal(tmp_path)
    keep = [each for each in found if each.order.group % 2]
    left = step

    def die(label: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    monkeypatch.setattr("outpace.checkpoint.journal.SEGMENT_BYTES", 800)
    with monkeypatch.context() as doomed:
        doomed.setattr(diagnostics, "crash_point", die)
        with pytest.raises(Killed):
            compact_journal(tmp_path, keep)
    again = [each for each in survey_journal(tmp_path) if each.order.group % 2]
    assert sorted(groups_of(again)) == [1, 3, 5, 7]
    kept = compact_journal(tmp_path, again)
    assert sorted(groups_of(survey_journal(tmp_path))) == [1, 3, 5, 7]
    assert all(is_readable(tmp_path, each) for each in kept)
    assert set(segments(tmp_path)) == {place_of(each).segment for each in kept}, "no partial segment remains"


def test_the_next_compaction_removes_unfinished_files_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(label: str) -> None:
        raise Killed

    journal(tmp_path, 1)
    with monkeypatch.context() as doomed:
        doomed.setattr(diagnostics, "crash_point", die)
        with pytest.raises(Killed):
            compact_journal(tmp_path, survey_journal(tmp_path))
    assert len(segments(tmp_path)) == 2
    compact_journal(tmp_path, [])
    assert segments(tmp_path) == []


def test_compaction_does_not_copy_a_damaged_entry(tmp_path: Path) -> None:
    journal(tmp_path, 1)
    found = survey_journal(tmp_path)
    path = tmp_path / place_of(found[0]).segment
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Exception, match="checksum"):
        compact_journal(tmp_path, found)
    assert path.exists()


WRITE_TWO = """
import sys
from pathlib import Path
from outpace.checkpoint.journal import JournalWriter
from support import a_record, kept_of
writer = JournalWriter(Path(sys.argv[1]), "w0")
for group in range(2):
    writer.append(kept_of(group), a_record(group))
"""


@pytest.mark.parametrize(
    ("label", "recovered"), [("journal.before", [0]), ("journal.torn", [0]), ("journal.after", [0, 1])]
)
def test_a_writer_killed_at_its_second_entry_leaves_complete_entries(
    tmp_path: Path, label: str, recovered: list[int]
) -> None:
    here = str(Path(__file__).parent.parent)
    killed = subprocess.run(
        [sys.executable, "-c", WRITE_TWO, str(tmp_path)],
        env={**os.environ, "OUTPACE_CRASH": f"controller@{label}#2", "PYTHONPATH": here},
        timeout=60,
    )
    assert killed.returncode == -9
    assert groups_of(survey_journal(tmp_path)) == recovered
    torn = (tmp_path / "w0-00000.journal").stat().st_size - sum(
        place_of(each).length for each in survey_journal(tmp_path)
    )
    assert bool(torn) == (label == "journal.torn")


def test_a_survey_gives_the_locations_that_the_writer_returned(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w0", segment_bytes=700)
    given: list[JournalLocation] = [writer.append(kept_of(group), a_record(group, tokens=group)) for group in range(9)]
    writer.close()
    assert [place_of(found) for found in survey_journal(tmp_path)] == given
