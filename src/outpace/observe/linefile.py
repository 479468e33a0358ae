"""Append-only files of JSON lines.

Invariants
- A line is written whole or not at all, as far as this process goes: after a failed write the file is cut back.
  Only a kill in the middle of a write can leave a torn last line, and readers skip it.
- A full disk costs time, not lines and not the run: lines that could not be written are kept, in order and up to a
  bound, and tried again with the next one.
- `append` and `close` belong to one thread; `sync` may be called from another meanwhile.
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
    """One open handle; each append is a single small write to the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._pending: deque[bytes] = deque()
        self._trouble: OSError | None = None  # why the last write failed; None: everything is in the file
        self._open = threading.Lock()  # against closing the descriptor under a sync
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, record: dict[str, Any]) -> None:
        if len(self._pending) == MAX_PENDING:
            self._pending.popleft()
            self.lost += 1
        self._pending.append(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._write_pending()

    def close(self) -> None:
        """Try once more what is pending, then close; what still cannot be written is lost and logged."""
        if self._fd < 0:
            return
        self._write_pending()
        self.lost += len(self._pending)
        if self.lost:
            logger.warning("%s: %d lines could not be written", self.path, self.lost)
        with self._open:
            os.close(self._fd)
            self._fd = -1

    def sync(self) -> None:
        """Return when all that was appended is on the disk; OSError if something could not be written. A closed file
        has nothing to say."""
        with self._open:
            if self._fd < 0:
                return
            if self._trouble is not None:
                raise OSError(self._trouble.errno, self._trouble.strerror, str(self.path))
            os.fsync(self._fd)

    def _write_pending(self) -> None:
        length = os.fstat(self._fd).st_size
        try:
            while self._pending:
                length += _write_all(self._fd, self._pending[0])
                self._pending.popleft()
            self._trouble = None
        except OSError as error:
            self._trouble = error
            if len(self._pending) == 1:
                logger.warning("%s: %s; keeping the line for later", self.path, error)
            with contextlib.suppress(OSError):  # cutting back can fail on the same broken disk; readers skip torn lines
                os.ftruncate(self._fd, length)


def _write_all(fd: int, data: bytes) -> int:
    written = 0
    while written < len(data):
        written += os.write(fd, data[written:])
    return written


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a line file; a torn or foreign line is skipped with a warning. No file, no records."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line)
            if record is None:
                logger.warning("%s:%d: not a whole record, skipped", path, number)
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


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite the file with the wanted whole records only, by one rename."""
    if not path.exists():
        return
    lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in read_lines(path) if wanted(record))
    write_atomically(path, lines)


def write_atomically(path: Path, parts: Iterator[str] | str, durable: bool = True) -> None:
    """Replace `path` by this text, or leave it as it was. Not `durable`: a loss of power may still lose the text."""
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
