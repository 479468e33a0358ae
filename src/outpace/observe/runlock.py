"""MERGED"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import psutil

from outpace.errors import BadInput

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class RunLock:
    """Exclusive lock on a run directory, held from construction to `release`.

    It is a kernel lock (`flock`): a killed run releases it immediately, and a reused pid cannot be mistaken for the
    holder. The pid in the file is only for messages, and for file systems without locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _acquire(path)

    def release(self) -> None:
        """Remove the lock file and release the lock. Idempotent."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)  # while still locked, so that a new holder's file is never removed
        os.close(self._fd)
        self._fd = -1


def is_held(path: Path) -> bool:
    """Return whether an active run holds the lock. Takes a shared lock only momentarily."""
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
        return error.errno in _NO_LOCKS  # no lock support: rely on the pid
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
        raise _in_use_error(fd, path) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _holder(fd)
        if holder is not None and holder != os.getpid() and psutil.pid_exists(holder):
            raise _in_use_error(fd, path) from None


def _in_use_error(fd: int, path: Path) -> BadInput:
    holder = _holder(fd)
    user = "another run" if holder is None else f"process {holder}"
    return BadInput(f"run.dir: {path.parent} is in use by {user}; wait until it ends, or choose another directory")


def _holder(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None


def _is_still_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
