"""Journal of finished groups: carries tokens from the workers to the learner, and survives a restart of the run.

    worker ─ JournalWriter.append ─▶ segment files ─ read ─▶ learner
    restart: survey ─▶ finished groups ─ compact ─▶ only those still needed

The head of an entry is what the controller needs to recover the group (`Kept`); its body is what the learner reads
(`GroupRecord`). Each writer appends to its own segments. Segments whose groups are all accounted for are deleted.

File format, shared with the turn log:

    entry = mark, head length, body length, CRC-32 of everything after the mark ─▶ head ─▶ body

Heads are small; a scan decodes no bodies.

Invariants
- An entry is complete or it is skipped: the checksum covers both lengths and every byte of head and body.
- Torn bytes are only at the end of a file: a failed append is undone, or nothing is appended after it.
- File numbers of an owner increase from the highest existing one. An owner that never removes its newest file never
  reuses a name, so a `Place` stays valid as long as its file exists.

Killing the process loses nothing that was appended. Appends do not wait for the disk: a power loss may lose the newest
entries, and the checksums show which.
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
    """Appends finished groups. A name must have only one writer. Thread-safe."""

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
                raise ValueError(f"the journal writer of {self._name} is closed")
            place = self._append(pieces)
        crash.reached("journal.after")
        return place

    def release(self, segments: list[str]) -> None:
        """Delete segments of any writer that are no longer needed. The segment being written here is kept."""
        with self._lock:
            current = self._file.path.name if self._file else None
        for segment in segments:
            if segment != current:
                (self._directory / segment).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the writer permanently, after any append running on another thread."""
        with self._lock:
            self._closed = True
            self._close_segment()

    def _append(self, pieces: list[bytes]) -> Place:
        if self._file is None or self._file.size >= self._limit:
            self._close_segment()
            self._file = EntryFile(self._directory, self._name, KIND)
        try:
            return self._file.append(pieces)
        except OSError:
            self._close_segment()  # the end of the file may be torn
            raise

    def _close_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read(directory: Path, place: Place) -> GroupRecord:
    """Return the record at `place`. Raises `CorruptData` if it is torn or damaged."""
    return wire.decode(read_entry(directory / place.segment, place).body, GroupRecord)


def read_with_order(directory: Path, place: Place) -> tuple[GroupOrder, GroupRecord]:
    """Return the order of the group and the record at `place`."""
    entry = read_entry(directory / place.segment, place)
    return wire.decode(entry.head, Kept).order, wire.decode(entry.body, GroupRecord)
