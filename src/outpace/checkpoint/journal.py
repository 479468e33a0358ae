"""The journal: the path of tokens from the workers to the learner, and the memory of what was finished.

Each writer appends to segments of its own. The head of an entry is what the controller would need to know of the group
again (`Kept`), its body is what the learner reads (`GroupRecord`); `outpace.checkpoint.entries` says how they lie on
the disk, `outpace.checkpoint.survey` finds them again. Segments whose groups are all accounted for are deleted.
"""

from __future__ import annotations

import threading
from pathlib import Path

from outpace import crash, wire
from outpace.checkpoint.entries import EntryFile, packed, read_entry
from outpace.types import GroupOrder, GroupRecord, Kept, Place

KIND = "journal"

SEGMENT_BYTES = 8 << 20


class JournalWriter:
    """Appends finished groups; only one writer uses a name. Safe to call from several threads."""

    def __init__(self, directory: Path, name: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._name = name
        self._limit = segment_bytes
        self._file: EntryFile | None = None
        self._closed = False
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, kept: Kept, record: GroupRecord) -> Place:
        crash.reached("journal.before")
        pieces = packed(wire.encode(kept), wire.encode(record))
        with self._lock:
            if self._closed:
                raise ValueError(f"the journal of {self._name} is closed")
            place = self._append(pieces)
        crash.reached("journal.after")
        return place

    def release(self, segments: list[str]) -> None:
        """Delete segments that hold nothing still needed, whoever wrote them; the one being written here stays."""
        with self._lock:
            current = self._file.path.name if self._file else None
        for segment in segments:
            if segment != current:
                (self._directory / segment).unlink(missing_ok=True)

    def close(self) -> None:
        """For good. An append that is under way on another thread is waited for."""
        with self._lock:
            self._closed = True
            self._leave()

    def _append(self, pieces: list[bytes]) -> Place:
        if self._file is None or self._file.size >= self._limit:
            self._leave()
            self._file = EntryFile(self._directory, self._name, KIND)
        try:
            return self._file.append(pieces)
        except OSError:
            self._leave()  # its end is torn
            raise

    def _leave(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read(directory: Path, place: Place) -> GroupRecord:
    """The record at `place`; raises `CorruptData` unless it is whole."""
    return wire.decode(read_entry(directory / place.segment, place).body, GroupRecord)


def read_with_order(directory: Path, place: Place) -> tuple[GroupOrder, GroupRecord]:
    """The same, with the order that the group was made by."""
    entry = read_entry(directory / place.segment, place)
    return wire.decode(entry.head, Kept).order, wire.decode(entry.body, GroupRecord)
