"""MERGED"""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from outpace import crash
from outpace.checkpoint.durable import sync
from outpace.errors import CorruptData
from outpace.types import Place

log = logging.getLogger(__name__)

_MARK = b"\xf1OJ1"
_LENGTHS = struct.Struct("<II")
_HEADER = struct.Struct("<4sIII")
_NAME = re.compile(r"(?P<owner>.+)-(?P<number>\d{5,})\.(?P<kind>\w+)")
_UNFINISHED = ".unfinished"
_TEAR_APPENDS = ".torn" in os.environ.get("OUTPACE_CRASH", "")


class Entry(NamedTuple):
    """One complete entry of a file."""

    place: Place
    head: memoryview
    body: memoryview


class Named(NamedTuple):
    """Parsed file name: the owner that writes it, and its number."""

    owner: str
    number: int


def named(file: str, kind: str) -> Named | None:
    """Parse a file name. Returns None for foreign files and other kinds."""
    match = _NAME.fullmatch(file)
    return Named(match["owner"], int(match["number"])) if match and match["kind"] == kind else None


def files_of(directory: Path, kind: str) -> list[Path]:
    """Return all files of that kind, sorted by owner and number. Foreign files are ignored."""
    found = [(name, path) for path in directory.glob("*") if (name := named(path.name, kind))]
    return [path for _, path in sorted(found)]


# ------------------------------------------------------------------------------------------------------------ writing


def packed(head: bytes, body: bytes) -> list[bytes]:
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

    def append(self, pieces: list[bytes]) -> Place:
        """Append an entry. After an `OSError` the end of the file may be torn: append nothing more before `undo_append`
        has returned True."""
        if _TEAR_APPENDS:
            self._append_in_two_steps(pieces)
        elif os.writev(self._file.fileno(), pieces) != sum(map(len, pieces)):
            raise OSError(f"{self.path}: only part of an entry was written; is the disk full?")
        place = Place(self.path.name, self.size, sum(map(len, pieces)))
        self.size += place.length
        return place

    def undone(self) -> bool:
        """Cut off what a failed append left. Returns whether that succeeded."""
        try:
            self._file.truncate(self.size)
            self._file.seek(self.size)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._file.close()

    def _append_in_two_steps(self, pieces: list[bytes]) -> None:
        """Write in two steps with a crash point between them, for fault-injection tests."""
        whole = b"".join(pieces)
        self._file.write(whole[: len(whole) // 2])
        crash.reached(self._crash_point)
        self._file.write(whole[len(whole) // 2 :])


def copied(directory: Path, owner: str, kind: str, places: Iterable[Place], limit: int) -> list[Place]:
    """Copy entries byte for byte into new files of about `limit` bytes, and return their new places.

    Each file gets its name once it is on the disk. The originals stay, so a kill leaves some entries in two files."""
    result: list[Place] = []
    pending: list[memoryview] = []
    size = 0
    for place in places:
        pending.append(_verified(directory / place.segment, place))
        size += place.length
        if size >= limit:
            result += _write_file(directory, owner, kind, pending)
            pending, size = [], 0
    return result + (_write_file(directory, owner, kind, pending) if pending else [])


def remove_but(directory: Path, kind: str, keep: set[str]) -> None:
    """Delete all files of that kind not in `keep`, and unfinished files of killed writers. Requires that no other
    process is writing."""
    for path in directory.glob(f".*.{kind}{_UNFINISHED}"):
        path.unlink()
    for path in files_of(directory, kind):
        if path.name not in keep:
            path.unlink()
            crash.reached(f"{kind}.removed")


def _next_name(directory: Path, owner: str, kind: str) -> str:
    names = [named(path.name, kind) for path in files_of(directory, kind)]
    taken = [name.number for name in names if name is not None and name.owner == owner]
    return f"{owner}-{max(taken, default=-1) + 1:05d}.{kind}"


def _write_file(directory: Path, owner: str, kind: str, entries: list[memoryview]) -> list[Place]:
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
    crash.reached(f"{kind}.copied")
    os.rename(unfinished, directory / name)
    sync(directory)
    crash.reached(f"{kind}.renamed")
    ends = itertools.accumulate(map(len, entries))
    return [Place(name, end - len(entry), len(entry)) for end, entry in zip(ends, entries, strict=True)]


# ------------------------------------------------------------------------------------------------------------ reading


def read_entry(path: Path, place: Place) -> Entry:
    """Return the entry at `place`. Raises `CorruptData` if it is torn or damaged."""
    return _split(place, _verified(path, place))


def scan(path: Path, start: int = 0) -> Iterator[Entry]:
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


def _verified(path: Path, place: Place) -> memoryview:
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), place.length, place.offset)
    if len(data) != place.length:
        raise CorruptData(f"journal entry {place} is truncated")
    if not _is_intact(data):
        raise CorruptData(f"journal entry {place} does not match its checksum")
    return memoryview(data)


def _entry_at(file: BinaryIO, name: str, offset: int) -> Entry | None:
    header = os.pread(file.fileno(), _HEADER.size, offset)
    if len(header) < _HEADER.size or not header.startswith(_MARK):
        return None
    _, head, body, _ = _HEADER.unpack(header)
    length = _HEADER.size + head + body
    if offset + length > os.fstat(file.fileno()).st_size:
        return None  # checked before reading: a damaged length could allocate huge memory
    data = os.pread(file.fileno(), length, offset)
    return _split(Place(name, offset, length), memoryview(data)) if _is_intact(data) else None


def _next_entry(file: BinaryIO, name: str, start: int) -> Entry | None:
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


def _split(place: Place, data: memoryview) -> Entry:
    _, head, _, _ = _HEADER.unpack_from(data)
    return Entry(place, data[_HEADER.size : _HEADER.size + head], data[_HEADER.size + head :])
