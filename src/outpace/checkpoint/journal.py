"""The journal: the path of tokens from the workers to the learner, and the memory of what was finished.

Each writer appends to segment files of its own; a record is its length, its crc32 and its msgpack body. A record is
whole or it is refused: a reader checks both. Segments whose groups are all accounted for are deleted.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from pathlib import Path
from typing import BinaryIO

from outpace import wire
from outpace.errors import CorruptData
from outpace.types import GroupRecord, Place

_HEADER = struct.Struct("<II")  # length and crc32 of the body

SEGMENT_BYTES = 32 << 20


class JournalWriter:
    """Appends records; only one writer uses a name. Safe to call from several threads."""

    def __init__(self, directory: Path, name: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._name = name
        self._limit = segment_bytes
        self._number = -1
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, record: GroupRecord) -> Place:
        body = wire.encode(record)
        data = _HEADER.pack(len(body), zlib.crc32(body)) + body
        with self._lock:
            file = self._current()
            offset = file.tell()
            file.write(data)
            file.flush()
            return Place(os.path.basename(file.name), offset, len(body))

    def release(self, segments: list[str]) -> None:
        """Delete segments that hold nothing still needed; the one being written stays."""
        with self._lock:
            current = os.path.basename(self._file.name) if self._file else None
        for segment in segments:
            if segment != current and segment.startswith(f"{self._name}-"):
                (self._directory / segment).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _current(self) -> BinaryIO:
        if self._file is None or self._file.tell() >= self._limit:
            self.close()
            self._file = self._next_segment()
        return self._file

    def _next_segment(self) -> BinaryIO:
        while True:
            self._number += 1
            path = self._directory / f"{self._name}-{self._number:05d}.journal"
            if not path.exists():
                return open(path, "xb")


def read(directory: Path, place: Place) -> GroupRecord:
    """The record at `place`; raises `CorruptData` unless it is whole."""
    with open(directory / place.segment, "rb") as file:
        data = os.pread(file.fileno(), _HEADER.size + place.length, place.offset)
    if len(data) != _HEADER.size + place.length:
        raise CorruptData(f"journal record {place} is cut short")
    length, checksum = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if length != place.length or zlib.crc32(body) != checksum:
        raise CorruptData(f"journal record {place} does not match its checksum")
    return wire.decode(body, GroupRecord)
