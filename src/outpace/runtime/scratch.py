"""MERGED"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outpace.runtime import guardian_child
from outpace.runtime.guardian import Guardian, clean_up, log, new_run_mark

_OWNER_FILE = "owner.lock"
_INDEX = "index"
OWNERLESS_S = 3600.0
"""Files and directories without an owner that are older than this are leftovers: a directory that was being created or
removed, or the log of a server that did not start."""


def memory_root() -> Path:
    """Return /dev/shm if it is writable, so that weight snapshots stay in memory, else the temporary directory."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def files_of(directory: Path) -> Path:
    """Return the directory on disk that belongs to a runtime directory in memory."""
    return Path(tempfile.gettempdir()) / f"{directory.name}-files"


def temporary_file(name: str, suffix: str) -> Path:
    """Create an empty file that outlives this process. A run that starts after `OWNERLESS_S` removes it."""
    descriptor, path = tempfile.mkstemp(prefix=f"{_prefix()}{name}-", suffix=suffix)
    os.close(descriptor)
    return Path(path)


@contextmanager
def temporary_directory(name: str, within: str | None = None) -> Iterator[Path]:
    """Create a temporary directory. If this process is killed, the next run removes it."""
    within = within or tempfile.gettempdir()
    _remove_leftovers(Path(within))
    outer = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{name}-", dir=within))
    lock = _lock_directory(outer)
    try:
        inner = outer / name
        inner.mkdir()
        yield inner
    finally:
        guardian_child.remove(str(outer))
        os.close(lock)


class Scratch:
    """The directories of a run in memory and on disk, with their cleanup process."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or memory_root()
        for parent in {root, Path(tempfile.gettempdir())}:
            _remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))  # mode 0700
        self.files = files_of(self.path)
        mark = new_run_mark()
        self._locks = [_lock_directory(self.path, mark=mark, files=str(self.files))]
        self.files.mkdir()
        self.files.chmod(0o711)  # other users may own directories in it, but must not list the rest
        self._locks.append(_lock_directory(self.files))
        self.guardian = Guardian(self.path / _INDEX, [self.path, self.files], mark)

    def remove(self) -> None:
        """End all leftover processes of the run, then remove the directories. Blocks."""
        self.guardian.dismiss()
        for directory in (self.files, self.path):
            guardian_child.remove(str(directory))
        for lock in self._locks:
            os.close(lock)


def temporary_files(directory: Path) -> dict[str, str]:
    """Return the environment variables that direct temporary files of a worker or server, and of the programs it
    starts, to the runtime directory.

    vLLM's sockets go to the directory in memory: under a long TMPDIR, a socket path would exceed the system's limit."""
    files = files_of(directory)
    return {"TMPDIR": str(files), "VLLM_RPC_BASE_PATH": str(directory)} if files.is_dir() else {}


def _prefix() -> str:
    return f"outpace-{os.getuid()}-"


def _lock_directory(directory: Path, **facts: str) -> int:
    """Lock a directory for this process. `facts` are for the cleanup by a later run.

    The file is locked before it gets its final name: another run must never find it unlocked."""
    unnamed = directory / f"{_OWNER_FILE}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, json.dumps(facts).encode())
    unnamed.rename(directory / _OWNER_FILE)
    return lock


def _remove_leftovers(root: Path) -> None:
    """Remove what dead runs of this user left in `root`, and everything else that belongs to them."""
    for path in root.glob(f"{_prefix()}*"):
        with suppress(OSError):  # it was removed meanwhile
            if path.lstat().st_uid != os.getuid():
                continue
            if path.is_symlink() or not path.is_dir():
                _remove_if_old(path)
            else:
                _remove_if_dead(path)


def _remove_if_dead(directory: Path) -> None:
    try:
        lock = os.open(directory / _OWNER_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        _remove_if_old(directory)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("removing %s, left behind by a killed run", directory)
        _remove_dead(directory, _facts(lock))
    except BlockingIOError:
        return  # its owner is alive
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
    return {}  # its owner was killed while writing them


def _remove_if_old(path: Path) -> None:
    """Remove a path without an owner if it is old. A recent one may be in the middle of its creation or removal."""
    if time.time() - path.lstat().st_mtime <= OWNERLESS_S:
        return
    if path.is_dir() and not path.is_symlink():
        guardian_child.remove(str(path))
    else:
        path.unlink()
