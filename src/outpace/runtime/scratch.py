"""A private directory in memory for what lives only as long as the run: weight snapshots and sockets.

The kernel holds its owner's lock, so what a killed run left behind is recognised and removed by the next one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_OWNER = "owner.lock"


def memory_root() -> Path:
    """Shared memory where there is any, so that weights travel without touching a disk."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


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

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(root: Path, prefix: str) -> None:
    for directory in root.glob(f"{prefix}*"):
        try:
            lock = os.open(directory / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made or removed right now by somebody else
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s, left by a run that was killed", directory)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)
