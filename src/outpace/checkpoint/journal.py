"""Journal of finished groups: carries tokens from the workers to the learner, and survives a restart of the run.

    worker ─ JournalWriter.append ─▶ segment files ─ read ─▶ learner
    restart: survey ─▶ finished groups ─ compact ─▶ only those still needed

The head of an entry is what the controller needs to recover the group (`FinishedGroup`); its body is what the learner
reads (`GroupRecord`). Each writer appends to its own segments. Segments whose groups are all accounted for are deleted.

File format, shared with the turn log:

    entry = mark, head length, body length, CRC-32 of everything after the mark ─▶ head ─▶ body

Heads are small; a scan decodes no bodies.

Invariants
- An entry is complete or it is skipped: the checksum covers both lengths and every byte of head and body.
- Torn bytes are only at the end of a file: a failed append is undone, or nothing is appended after it.
- File numbers of an owner increase from the highest existing one. An owner that never removes its newest file never
  reuses a name, so a `JournalLocation` stays valid as long as its file exists.

Killing the process loses nothing that was appended. Appends do not wait for the disk: a power loss may lose the newest
entries, and the checksums show which.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from msgspec.structs import replace

from outpace.checkpoint.commit import fsync_path
from outpace.errors import CorruptData
from outpace.runtime import diagnostics, wire
from outpace.types import FinishedGroup, GroupOrder, GroupRecord, JournalLocation

log = logging.getLogger(__name__)

_MARK = b"\xf1OJ1"
_LENGTHS = struct.Struct("<II")
_HEADER = struct.Struct("<4sIII")
_NAME = re.compile(r"(?P<owner>.+)-(?P<number>\d{5,})\.(?P<kind>\w+)")
_UNFINISHED = ".unfinished"
_TEAR_APPENDS = ".torn" in os.environ.get("OUTPACE_CRASH", "")


class JournalEntry(NamedTuple):
    """One complete entry of a file."""

    place: JournalLocation
    head: memoryview
    body: memoryview


class EntryFileName(NamedTuple):
    """Parsed file name: the owner that writes it, and its number."""

    owner: str
    number: int


def parse_file_name(file: str, kind: str) -> EntryFileName | None:
    """Parse a file name. Returns None for foreign files and other kinds."""
    match = _NAME.fullmatch(file)
    return EntryFileName(match["owner"], int(match["number"])) if match and match["kind"] == kind else None


def list_files(directory: Path, kind: str) -> list[Path]:
    """Return all files of that kind, sorted by owner and number. Foreign files are ignored."""
    found = [(name, path) for path in directory.glob("*") if (name := parse_file_name(path.name, kind))]
    return [path for _, path in sorted(found)]


# ------------------------------------------------------------------------------------------------------------ writing


def pack_entry(head: bytes, body: bytes) -> list[bytes]:
    """Return the header, head and body of an entry."""
    checksum = zlib.crc32(body, zlib.crc32(head, _crc_of_lengths(len(head), len(body))))
    return [_HEADER.pack(_MARK, len(head), len(body), checksum), head, body]


class EntryFile:
    """File that one owner appends entries to. Not thread-safe."""

    def __init__(self, directory: Path, owner: str, kind: str) -> None:
        self.path = directory / _next_name(directory, owner, kind)
        self.size = 0
        self._crash_point = f"{kind}.torn"
        self._file = io.FileIO(self.path, "xb")

    def append(self, pieces: list[bytes]) -> JournalLocation:
        """Append an entry. After an `OSError` the end of the file may be torn: append nothing more before `undo_append`
        has returned True."""
        if _TEAR_APPENDS:
            self._append_in_two_steps(pieces)
        elif os.writev(self._file.fileno(), pieces) != sum(map(len, pieces)):
            raise OSError(f"{self.path}: only part of an entry was written; is the disk full?")
        place = JournalLocation(self.path.name, self.size, sum(map(len, pieces)))
        self.size += place.length
        return place

    def undo_append(self) -> bool:
        """Cut off what a failed append left. Returns whether that succeeded."""
        try:
            self._file.truncate(self.size)
            self._file.seek(self.size)
        except OSError:
            return False
        return True

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _append_in_two_steps(self, pieces: list[bytes]) -> None:
        """Write in two steps with a crash point between them, for fault-injection tests."""
        whole = b"".join(pieces)
        self._file.write(whole[: len(whole) // 2])
        diagnostics.crash_point(self._crash_point)
        self._file.write(whole[len(whole) // 2 :])


def copy_entries(
    directory: Path, owner: str, kind: str, places: Iterable[JournalLocation], limit: int
) -> list[JournalLocation]:
    """Copy entries byte for byte into new files of about `limit` bytes, and return their new places.

    Each file gets its name once it is on the disk. The originals stay, so a kill may leave entries in two files."""
    result: list[JournalLocation] = []
    pending: list[memoryview] = []
    size = 0
    for place in places:
        pending.append(_verified(directory / place.segment, place))
        size += place.length
        if size >= limit:
            result += _write_file(directory, owner, kind, pending)
            pending, size = [], 0
    return result + (_write_file(directory, owner, kind, pending) if pending else [])


def remove_other_files(directory: Path, kind: str, keep: set[str]) -> None:
    """Delete all files of that kind not in `keep`, and unfinished files of killed writers. Requires that no other
    process is writing."""
    for path in directory.glob(f".*.{kind}{_UNFINISHED}"):
        path.unlink()
    for path in list_files(directory, kind):
        if path.name not in keep:
            path.unlink()
            diagnostics.crash_point(f"{kind}.removed")


def _next_name(directory: Path, owner: str, kind: str) -> str:
    names = [parse_file_name(path.name, kind) for path in list_files(directory, kind)]
    taken = [name.number for name in names if name is not None and name.owner == owner]
    return f"{owner}-{max(taken, default=-1) + 1:05d}.{kind}"


def _write_file(directory: Path, owner: str, kind: str, entries: list[memoryview]) -> list[JournalLocation]:
    name = _next_name(directory, owner, kind)
    unfinished = directory / f".{name}{_UNFINISHED}"
    try:
        with open(unfinished, "wb") as file:
            for entry in entries:
                file.write(entry)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        unfinished.unlink(missing_ok=True)  # free the space on a full disk
        raise
    diagnostics.crash_point(f"{kind}.copied")
    os.rename(unfinished, directory / name)
    fsync_path(directory)
    diagnostics.crash_point(f"{kind}.renamed")
    ends = itertools.accumulate(map(len, entries))
    return [JournalLocation(name, end - len(entry), len(entry)) for end, entry in zip(ends, entries, strict=True)]


# ------------------------------------------------------------------------------------------------------------ reading


def read_entry(path: Path, place: JournalLocation) -> JournalEntry:
    """Return the entry at `place`. Raises `CorruptData` if it is torn or damaged."""
    return _split(place, _verified(path, place))


def scan_entries(path: Path, start: int = 0) -> Iterator[JournalEntry]:
    """Yield every complete entry, holding one in memory at a time. Torn or damaged bytes are skipped with a warning."""
    with open(path, "rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, start
        while offset < size:
            entry = _entry_at(file, path.name, offset)
            if entry is None:
                entry = _next_entry(file, path.name, offset + 1)
                until = size if entry is None else entry.place.offset
                log.warning("%s: skipping bytes %d to %d, which are torn or damaged", path, offset, until)
                if entry is None:
                    return
            yield entry
            offset = entry.place.offset + entry.place.length


def _verified(path: Path, place: JournalLocation) -> memoryview:
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), place.length, place.offset)
    if len(data) != place.length:
        raise CorruptData(f"journal entry {place} is truncated")
    if not _is_intact(data):
        raise CorruptData(f"journal entry {place} does not match its checksum")
    return memoryview(data)


def _entry_at(file: BinaryIO, name: str, offset: int) -> JournalEntry | None:
    header = os.pread(file.fileno(), _HEADER.size, offset)
    if len(header) < _HEADER.size or not header.startswith(_MARK):
        return None
    _, head, body, _ = _HEADER.unpack(header)
    length = _HEADER.size + head + body
    if offset + length > os.fstat(file.fileno()).st_size:
        return None  # checked before reading: a damaged length could allocate huge memory
    data = os.pread(file.fileno(), length, offset)
    return _split(JournalLocation(name, offset, length), memoryview(data)) if _is_intact(data) else None


def _next_entry(file: BinaryIO, name: str, start: int) -> JournalEntry | None:
    file.seek(start)
    rest = file.read()
    found = rest.find(_MARK)
    while found >= 0:
        if entry := _entry_at(file, name, start + found):
            return entry
        found = rest.find(_MARK, found + 1)
    return None


def _is_intact(data: bytes) -> bool:
    if len(data) < _HEADER.size:
        return False
    header: tuple[bytes, int, int, int] = _HEADER.unpack_from(data)
    mark, head, body, checksum = header
    parts = memoryview(data)[_HEADER.size :]
    return mark == _MARK and head + body == len(parts) and zlib.crc32(parts, _crc_of_lengths(head, body)) == checksum


def _crc_of_lengths(head: int, body: int) -> int:
    return zlib.crc32(_LENGTHS.pack(head, body))


def _split(place: JournalLocation, data: memoryview) -> JournalEntry:
    _, head, _, _ = _HEADER.unpack_from(data)
    return JournalEntry(place, data[_HEADER.size : _HEADER.size + head], data[_HEADER.size + head :])


KIND = "journal"

SEGMENT_BYTES = 8 << 20


class JournalWriter:
    """Appends finished groups. A name must have only one writer. Thread-safe."""

    def __init__(self, directory: Path, name: str, segment_bytes: int = SEGMENT_BYTES, sync: bool = False) -> None:
        """`sync`: write through to the disk, because ranks of the learner on other machines read the entries."""
        self._sync = sync
        self._directory = directory
        self._name = name
        self._limit = segment_bytes
        self._file: EntryFile | None = None
        self._closed = False
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, kept: FinishedGroup, record: GroupRecord) -> JournalLocation:
        diagnostics.crash_point("journal.before")
        pieces = pack_entry(wire.encode(kept), wire.encode(record))
        with self._lock:
            if self._closed:
                raise ValueError(f"the journal writer of {self._name} is closed")
            place = self._append(pieces)
        diagnostics.crash_point("journal.after")
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

    def _append(self, pieces: list[bytes]) -> JournalLocation:
        if self._file is None or self._file.size >= self._limit:
            self._close_segment()
            self._file = EntryFile(self._directory, self._name, KIND)
        try:
            place = self._file.append(pieces)
            if self._sync:
                self._file.sync()
            return place
        except OSError:
            self._close_segment()  # the end of the file may be torn
            raise

    def _close_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_record(directory: Path, place: JournalLocation) -> GroupRecord:
    """Return the record at `place`. Raises `CorruptData` if it is torn or damaged."""
    return wire.decode(read_entry(directory / place.segment, place).body, GroupRecord)


def read_with_order(directory: Path, place: JournalLocation) -> tuple[GroupOrder, GroupRecord]:
    """Return the order of the group and the record at `place`."""
    entry = read_entry(directory / place.segment, place)
    return wire.decode(entry.head, FinishedGroup).order, wire.decode(entry.body, GroupRecord)


COMPACTED = "kept"
"""Owner of compacted files. No worker has this name, so nothing is appended to them."""


def survey_journal(directory: Path, wanted: Callable[[FinishedGroup], bool] = lambda _: True) -> list[FinishedGroup]:
    """Return the wanted groups of the journal with their places, sorted by place. Torn or damaged entries are skipped
    with a warning.

    A group stored several times (its worker died before reporting, or a compaction was killed) is returned once: the
    copy with the lowest newest version, which is valid for every checkpoint that any other copy is valid for.

    Blocks on the disk: call it off the event loop, before any worker writes."""
    chosen: dict[tuple[int, int], FinishedGroup] = {}
    for found in filter(wanted, _all_groups(directory)):
        key = found.order.position, found.order.group
        known = chosen.get(key)
        if known is None or found.report.newest < known.report.newest:
            chosen[key] = found
    return sorted(chosen.values(), key=place_of)


def compact_journal(directory: Path, keep: list[FinishedGroup]) -> list[FinishedGroup]:
    """Copy the groups in `keep` to new segments, then delete all others. Returns the groups at their new places.

    After a kill at any point, a survey still finds everything in `keep`, possibly some of it twice. Blocks on the disk:
    call it off the event loop, before any worker writes."""
    places = copy_entries(directory, COMPACTED, KIND, map(place_of, keep), SEGMENT_BYTES)
    remove_other_files(directory, KIND, {place.segment for place in places})
    return [_moved(found, place) for found, place in zip(keep, places, strict=True)]


def _all_groups(directory: Path) -> Iterator[FinishedGroup]:
    for path in list_files(directory, KIND):
        for entry in scan_entries(path):
            try:
                yield _moved(wire.decode(entry.head, FinishedGroup), entry.place)
            except wire.WireError as error:
                log.warning("%s: skipping the entry at byte %d: %s", path, entry.place.offset, error)


def place_of(found: FinishedGroup) -> JournalLocation:
    """Return the place of a group in the journal."""
    assert found.report.place is not None
    return found.report.place


def _moved(found: FinishedGroup, place: JournalLocation) -> FinishedGroup:
    return replace(found, report=replace(found.report, place=place))
