"""Directories of a run outside of its run directory, and how they are removed however it ends.

    outpace-UID-XXXX         in memory: weight snapshots, sockets, the index of the run (`outpace.runtime.guardian`)
    outpace-UID-XXXX-files   on disk: the temporary files of workers and servers, and of the programs they start

If the owner is killed, a guardian removes both. If that was killed too, the next run does: each directory holds a file
that its owner keeps locked, and a lock that is free belongs to a dead owner. The file says what else the owner had:
processes that carry its mark and shared memory in its index end with it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outpace.runtime import guardian_child
from outpace.runtime.guardian import Guardian, clean_up, new_run_mark

log = logging.getLogger(__name__)

_OWNER = "owner.lock"
_INDEX = "index"
OWNERLESS_S = 3600.0
"""What has no owner and is older was left behind: a directory that was being made or removed, or the log of a server
that did not start."""


def memory_root() -> Path:
    """Shared memory where there is any, so that weights travel without touching a disk."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def files_of(scratch: Path) -> Path:
    """The directory on disk that belongs to a scratch directory."""
    return Path(tempfile.gettempdir()) / f"{scratch.name}-files"


def temporary_file(name: str, suffix: str) -> Path:
    """An empty file that outlives this process; a run that starts after `OWNERLESS_S` removes it."""
    descriptor, path = tempfile.mkstemp(prefix=f"{_prefix()}{name}-", suffix=suffix)
    os.close(descriptor)
    return Path(path)


@contextmanager
def temporary_directory(name: str, within: str | None = None) -> Iterator[Path]:
    """A temporary directory. If this process is killed, the next run removes it."""
    within = within or tempfile.gettempdir()
    _sweep(Path(within))
    outer = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{name}-", dir=within))
    lock = _own(outer)
    try:
        inner = outer / name
        inner.mkdir()
        yield inner
    finally:
        guardian_child.remove(str(outer))
        os.close(lock)


class Scratch:
    def __init__(self, root: Path | None = None) -> None:
        root = root or memory_root()
        for place in {root, Path(tempfile.gettempdir())}:
            _sweep(place)
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))  # mode 0700
        self.files = files_of(self.path)
        mark = new_run_mark()
        self._locks = [_own(self.path, mark=mark, files=str(self.files))]
        self.files.mkdir()
        self.files.chmod(0o711)  # those who have a directory in it may be other users; they need not see the others'
        self._locks.append(_own(self.files))
        self.guardian = Guardian(self.path / _INDEX, [self.path, self.files], mark)

    def remove(self) -> None:
        """Blocks until nobody is left who could write to it."""
        self.guardian.dismiss()
        for directory in (self.files, self.path):
            guardian_child.remove(str(directory))
        for lock in self._locks:
            os.close(lock)


def temporary_files(scratch: Path) -> dict[str, str]:
    """Environment variables for a worker or server: where it, and what it starts, puts temporary files.

    vLLM's sockets go into memory: below a long TMPDIR, the path of a socket would exceed the system's limit."""
    files = files_of(scratch)
    return {"TMPDIR": str(files), "VLLM_RPC_BASE_PATH": str(scratch)} if files.is_dir() else {}


def _prefix() -> str:
    return f"outpace-{os.getuid()}-"


def _own(directory: Path, **facts: str) -> int:
    """Lock it for this process. Locked before it has its name: a sweep by another start must never find the file free.
    `facts`: what a sweep has to know."""
    unnamed = directory / f"{_OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, json.dumps(facts).encode())
    unnamed.rename(directory / _OWNER)
    return lock


def _sweep(root: Path) -> None:
    """Remove what dead runs of this user have left in `root`, and what belongs to it elsewhere."""
    for path in root.glob(f"{_prefix()}*"):
        with suppress(OSError):  # it has just gone
            if path.lstat().st_uid != os.getuid():
                continue
            if path.is_symlink() or not path.is_dir():
                _remove_if_old(path)
            else:
                _sweep_directory(path)


def _sweep_directory(directory: Path) -> None:
    try:
        lock = os.open(directory / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        _remove_if_old(directory)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("removing %s, left by a run that was killed", directory)
        _remove_dead(directory, _facts(lock))
    except BlockingIOError:
        return  # its owner lives
    finally:
        os.close(lock)


def _remove_dead(directory: Path, facts: dict[str, Any]) -> None:
    if mark := facts.get("mark"):
        clean_up(mark, directory / _INDEX)
    if files := facts.get("files"):
        guardian_child.remove(files)
    guardian_child.remove(str(directory))


def _facts(lock: int) -> dict[str, Any]:
    with suppress(ValueError):
        facts = json.loads(os.pread(lock, 65536, 0))
        if isinstance(facts, dict):
            return facts
    return {}  # its owner was killed while it wrote them


def _remove_if_old(path: Path) -> None:
    """One without an owner is being made or removed by somebody right now, or is what was left of that."""
    if time.time() - path.lstat().st_mtime <= OWNERLESS_S:
        return
    if path.is_dir() and not path.is_symlink():
        guardian_child.remove(str(path))
    else:
        path.unlink()
