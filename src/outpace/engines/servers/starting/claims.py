"""One run per server on this machine.

A run that updates a server's weights while another run samples from it ruins both. So every engine holds a lock that
is named after its server's address, in the run's scratch directory, and looks for the same lock in those of other runs.
The kernel frees a lock when its process ends, and the file goes with the scratch directory.

Scratch directories are private: runs of other users, and of other machines, are not seen.
"""

from __future__ import annotations

import fcntl
import os
from hashlib import blake2b
from pathlib import Path

from outpace.config.urls import server_address
from outpace.errors import BadInput

_MAX_PATH = 4096


class ServerClaim:
    """Held from construction to `release`, or to the end of the process."""

    def __init__(self, url: str, scratch: Path, run: Path) -> None:
        """Raises `BadInput` where another run uses the server. `run` is the directory to name to others."""
        digest = blake2b(repr(server_address(url)).encode(), digest_size=8).hexdigest()
        name = f"server-{digest}.lock"
        self._fd = os.open(scratch / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Shared: an engine that replaces another of the same run may start before that one has ended.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            os.pwrite(self._fd, str(run).encode(), 0)
            for other in scratch.parent.glob(f"outpace-*/{name}"):
                if other.parent != scratch and (holder := _holder(other)):
                    raise BadInput(f"{url}: {holder} uses this server; stop that run, or take another server")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(lock: Path) -> str | None:
    """The run that holds the lock; None where no living process does."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or another user's
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, _MAX_PATH, 0).decode(errors="replace") or "another run"
    finally:
        os.close(fd)
    return None
