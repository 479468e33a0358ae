"""Append-only JSON lines files, and atomic replacement of files.

Invariants
- A line is written completely or not at all: after a failed write the file is truncated to the last complete line.
  Only a kill in the middle of a write can leave an incomplete last line; readers skip it.
- A full disk neither loses lines nor ends the run: lines that cannot be written stay in memory, in order and up to
  `MAX_PENDING`, and are retried with the next append.
- Call `append` and `close` from one thread. `sync` may run concurrently on another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_PENDING = 10_000


class LineFile:
    """Appends records to one open file. Each append is a single small write to the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._pending: deque[bytes] = deque()
        self._write_error: OSError | None = None  # of the last write; None: every line is in the file
        self._fd_lock = threading.Lock()  # keeps `close` from closing the descriptor during `sync`
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, record: dict[str, Any]) -> None:
        if len(self._pending) == MAX_PENDING:
            self._pending.popleft()
            self.lost += 1
        self._pending.append(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._write_pending()

    def close(self) -> None:
        """Retry pending lines once, then close. Lines that still cannot be written are lost; their number is logged."""
        if self._fd < 0:
            return
        self._write_pending()
        self.lost += len(self._pending)
        if self.lost:
            logger.warning("%s: lost %d lines that could not be written", self.path, self.lost)
        with self._fd_lock:
            os.close(self._fd)
            self._fd = -1

    def sync(self) -> None:
        """Fsync all appended lines. Raises OSError if a line could not be written; does nothing on a closed file."""
        with self._fd_lock:
            if self._fd < 0:
                return
            if self._write_error is not None:
                raise OSError(self._write_error.errno, self._write_error.strerror, str(self.path))
            os.fsync(self._fd)

    def _write_pending(self) -> None:
        length = os.fstat(self._fd).st_size
        try:
            while self._pending:
                length += _write_all(self._fd, self._pending[0])
                self._pending.popleft()
            self._write_error = None
        except OSError as error:
            self._write_error = error
            if len(self._pending) == 1:
                logger.warning("%s: %s; will retry the write", self.path, error)
            with contextlib.suppress(OSError):  # can fail on the same broken disk; readers skip incomplete lines
                os.ftruncate(self._fd, length)


def _write_all(fd: int, data: bytes) -> int:
    written = 0
    while written < len(data):
        written += os.write(fd, data[written:])
    return written


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON lines file. Incomplete or invalid lines are skipped with a warning; a missing file
    has no records."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line)
            if record is None:
                logger.warning("%s:%d: skipped an incomplete or invalid line", path, number)
            else:
                yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def filter_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Atomically rewrite the file with only the records for which `keep` is true."""
    if not path.exists():
        return
    lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in read_lines(path) if keep(record))
    write_atomically(path, lines)


def write_atomically(path: Path, parts: Iterator[str] | str, durable: bool = True) -> None:
    """Replace the content of `path`, or leave it unchanged on failure. Without `durable` there is no fsync, and a power
    failure may lose the new content."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.writelines([parts] if isinstance(parts, str) else parts)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
