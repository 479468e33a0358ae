"""A private directory in memory for what lives only as long as the run: weight snapshots and sockets.

Beside it, on disk, is one for the temporary files of those who run code of users. If the owner is killed a guardian
removes both. If that was killed too, the kernel no longer holds the owner's lock, and the next run removes them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from outpace.runtime.guardian import Guardian

log = logging.getLogger(__name__)

_OWNER = "owner.lock"
OWNERLESS_S = 3600.0


def memory_root() -> Path:
    """Shared memory where there is any, so that weights travel without touching a disk."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def files_of(scratch: Path) -> Path:
    """The directory on disk that belongs to a scratch directory."""
    return Path(tempfile.gettempdir()) / f"{scratch.name}-files"


class Scratch:
    def __init__(self, root: Path | None = None) -> None:
        root = root or memory_root()
        prefix = f"outpace-{os.getuid()}-"
        _sweep(root, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))  # mode 0700
        # Locked before it has its name: a sweep by another start must never find the file free.
        unnamed = self.path / f"{_OWNER}.new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _OWNER)
        self.files = files_of(self.path)
        self.files.mkdir()
        self.files.chmod(0o711)  # those who have a directory in it may be other users; they need not see the others'
        self.guardian = Guardian([self.path, self.files])

    def remove(self) -> None:
        """Blocks until nobody is left who could write to it."""
        self.guardian.dismiss()
        _remove(self.path)
        os.close(self._lock)


def _remove(directory: Path) -> None:
    shutil.rmtree(files_of(directory), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _remove_if_old(directory: Path) -> None:
    """One without an owner is being made or removed by somebody right now, or is what was left of that."""
    with suppress(OSError):
        if time.time() - directory.stat().st_mtime > OWNERLESS_S:
            _remove(directory)


def _sweep(root: Path, prefix: str) -> None:
    for directory in root.glob(f"{prefix}*"):
        try:
            lock = os.open(directory / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            _remove_if_old(directory)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s, left by a run that was killed", directory)
            _remove(directory)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)
