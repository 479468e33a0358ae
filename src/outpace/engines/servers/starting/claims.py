"""MERGED"""

from __future__ import annotations

import fcntl
import os
from hashlib import blake2b
from pathlib import Path

from outpace.config.urls import server_address
from outpace.errors import BadInput

_MAX_PATH = 4096


class ServerClaim:
    """Lock on a server, held from construction to `release` or to the end of the process."""

    def __init__(self, url: str, scratch: Path, run: Path) -> None:
        """Raises `BadInput` if another run uses the server. `run`: our run directory, named in the errors of others."""
        digest = blake2b(repr(server_address(url)).encode(), digest_size=8).hexdigest()
        name = f"server-{digest}.lock"
        self._fd = os.open(scratch / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Shared: a replacement engine of the same run may start before the old one has ended.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            os.pwrite(self._fd, str(run).encode(), 0)
            for other in scratch.parent.glob(f"outpace-*/{name}"):
                if other.parent != scratch and (holder := _holder(other)):
                    raise BadInput(f"{url}: {holder} uses this server; stop that run or use another server")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(lock: Path) -> str | None:
    """The run directory of the lock's holder; None if no living process holds it."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or owned by another user
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, _MAX_PATH, 0).decode(errors="replace") or "another run"
    finally:
        os.close(fd)
    return None
