"""One run per directory: a lock that dies with its holder.

The kernel holds the lock (`flock`), so that of a killed run is free at once and no reused pid can be mistaken for
it; the file's text only names the holder for people. Where the file system knows no locks, the pid decides.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import psutil

from outpace.errors import BadInput

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class RunLock:
    """Held from construction to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _acquire(path)

    def release(self) -> None:
        """Free the lock and remove its file; a second call does nothing."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)  # while still held, so that nobody's fresh lock file is removed
        os.close(self._fd)
        self._fd = -1


def is_held(path: Path) -> bool:
    """Whether a run that lives has the lock. Looks, and takes nothing for longer than a moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        holder = _holder(fd)
        if holder is None or not psutil.pid_exists(holder):
            return False
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno in _NO_LOCKS  # then the pid has to do
    finally:
        os.close(fd)


def _acquire(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, path)
            if _is_still_at(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the holder removed the file between our open and our lock


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(fd, path) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _holder(fd)
        if holder is not None and holder != os.getpid() and psutil.pid_exists(holder):
            raise _refusal(fd, path) from None


def _refusal(fd: int, path: Path) -> BadInput:
    holder = _holder(fd)
    who = "another run" if holder is None else f"process {holder}"
    return BadInput(f"run.dir: {path.parent} is in use by {who}")


def _holder(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None


def _is_still_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
