"""Cleanup after a run: leftover processes, shared memory and runtime directories, however the run ends.

`RuntimeDirectory` owns the directories of a run outside its run directory:

    outpace-UID-XXXX         in memory: weight snapshots, sockets, the index of the run
    outpace-UID-XXXX-files   on disk: temporary files of workers and servers, and of the programs they start

`CleanupProcess` is a small process, started first, that notices when the controller's end of a pipe closes. Where the
kernel supports it, children die with their parent (`outpace.runtime.die_with_parent`). The cleanup process handles the
rest: programs started by children of children and, if the controller was killed, the directories and the children on
systems without that kernel feature. Its entry point is `outpace.runtime.cleanup_process`.

If the cleanup process was killed too, the next run cleans up. Each directory holds a file that its owner keeps locked;
a free lock means that the owner is dead. The file also records the mark and the index of the dead run, so that its
processes and shared memory can be found.

Descendants of a component are found by its mark (`outpace.runtime.process_table`) or, if they lost the mark, by their
session's note in the index. A note also lists the shared memory that the session uses, so that it can be removed even
if all processes of the session were killed at once. Other programs of the user have no mark and are never touched.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outpace.runtime import cleanup_process
from outpace.runtime.cleanup_process import PASSES, PAUSE_S, SESSIONS_VARIABLE, Segment
from outpace.runtime.process_table import MARK_VARIABLE, new_mark, process_start_time

log = logging.getLogger(__name__)

_SOURCE = str(Path(__file__).parents[2])
"""The directory that contains the package. Besides the standard library, the cleanup process imports only from it."""

LEAVE_LIMIT_S = 1.5 * PASSES * PAUSE_S
"""Timeout, longer than all passes take. Usually one pass of a few hundredths of a second is enough."""


class CleanupProcess:
    """Parent side of the cleanup process."""

    def __init__(self, index: Path, directories: Sequence[Path] = (), mark: str = "") -> None:
        """Start the cleanup process. It removes `index` when this process ends, and also `directories` if this process
        ends without `dismiss`. `mark` is the run's mark, from `new_mark`."""
        self._mark = mark or new_mark()
        self._index = index
        index.mkdir(exist_ok=True)
        reading, self._pipe = os.pipe()
        arguments = [self._mark, str(index), *map(str, directories)]
        command = [sys.executable, "-S", "-s", "-P", "-m", cleanup_process.__name__, *arguments]
        try:
            self._process = subprocess.Popen(
                command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath, "PYTHONPATH": _SOURCE}, cwd="/", start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(reading)
        os.set_blocking(self._pipe, False)  # the controller must never wait for the cleanup process

    @property
    def pid(self) -> int:
        return self._process.pid

    def new_mark(self) -> str:
        """Return a mark for one component process."""
        return new_mark(self._mark)

    def marked(self, mark: str) -> dict[str, str]:
        """Return the environment variables by which the descendants of that process are found."""
        return {MARK_VARIABLE: mark, SESSIONS_VARIABLE: str(self._index)}

    def sweep(self, mark: str) -> None:
        """Kill everything that a dead component process has started."""
        self._send(f"sweep {mark}")

    def dismiss(self) -> None:
        """Kill what the stopped components left behind and end the cleanup process. Blocks until it has ended."""
        self._send("bye")
        os.close(self._pipe)
        try:
            self._process.wait(LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # it was killed before it was done
            clean_up_run(self._mark, self._index)

    def _send(self, command: str) -> None:
        try:
            os.write(self._pipe, f"{command}\n".encode())
        except OSError as error:  # it was killed or stopped; the run does not depend on it
            log.warning("cannot send %r to the cleanup process: %s", command, error)


def clean_up_run(mark: str, index: Path) -> None:
    """Do the work of the cleanup process, for a run whose cleanup process was killed. Blocks."""
    cleanup_process.kill_run_processes(mark, str(index))
    cleanup_process.remove_directory(str(index))


class SessionNote:
    """The file of one session in the index of its run."""

    def __init__(self, leader: int, environment: Mapping[str, str]) -> None:
        """Record that a process with this environment has just become a session leader. The cleanup process then finds
        all processes of the session, even those that overwrite their environment."""
        self._file: str | None = None
        self._segments: frozenset[Segment] = frozenset()
        if SESSIONS_VARIABLE in environment and MARK_VARIABLE in environment:
            name = f"{environment[MARK_VARIABLE]}{leader}.{process_start_time(leader)}"
            self._file = os.path.join(environment[SESSIONS_VARIABLE], name)
        self._write()

    @property
    def segments(self) -> frozenset[Segment]:
        """All shared-memory segments recorded so far."""
        return self._segments

    def record(self, segments: Iterable[Segment]) -> None:
        """Add shared-memory segments that processes of the session use."""
        known = self._segments.union(segments)
        if known != self._segments:
            self._segments = known
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            cleanup_process.write_session_note(self._file, self._segments)
        except OSError as error:
            log.warning("cannot record session %s in the index of the run: %s", self._file, error)


_OWNER_FILE = "owner.lock"
_INDEX = "index"
OWNERLESS_S = 3600.0
"""Files and directories without an owner that are older than this are leftovers: a directory that was being created or
removed, or the log of a server that did not start."""


def memory_root() -> Path:
    """Return /dev/shm if it is writable, so that weight snapshots stay in memory, else the temporary directory."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def disk_directory(directory: Path) -> Path:
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
        cleanup_process.remove_directory(str(outer))
        os.close(lock)


class RuntimeDirectory:
    """The directories of a run in memory and on disk, with their cleanup process."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or memory_root()
        for parent in {root, Path(tempfile.gettempdir())}:
            _remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))  # mode 0700
        self.files = disk_directory(self.path)
        mark = new_mark()
        self._locks = [_lock_directory(self.path, mark=mark, files=str(self.files))]
        self.files.mkdir()
        self.files.chmod(0o711)  # other users may own directories in it, but must not list the rest
        self._locks.append(_lock_directory(self.files))
        self.cleanup = CleanupProcess(self.path / _INDEX, [self.path, self.files], mark)

    def remove(self) -> None:
        """End all leftover processes of the run, then remove the directories. Blocks."""
        self.cleanup.dismiss()
        for directory in (self.files, self.path):
            cleanup_process.remove_directory(str(directory))
        for lock in self._locks:
            os.close(lock)


def temporary_files_environment(directory: Path) -> dict[str, str]:
    """Return the environment variables that direct temporary files of a worker or server, and of the programs it
    starts, to the runtime directory.

    vLLM's sockets go to the directory in memory: under a long TMPDIR, a socket path would exceed the system's limit."""
    files = disk_directory(directory)
    return {"TMPDIR": str(files), "VLLM_RPC_BASE_PATH": str(directory)} if files.is_dir() else {}


def _prefix() -> str:
    return f"outpace-{os.getuid()}-"


def _lock_directory(directory: Path, **facts: str) -> int:
    """Lock a directory for this process. A later run that cleans up reads `facts`.

    The file is locked before it gets its final name: another run must never find it unlocked."""
    unnamed = directory / f"{_OWNER_FILE}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, json.dumps(facts).encode())
    unnamed.rename(directory / _OWNER_FILE)
    return lock


def _remove_leftovers(root: Path) -> None:
    """Remove what dead runs of this user left in `root`, and their processes, shared memory and other directories."""
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
        clean_up_run(mark, directory / _INDEX)
    if files := facts.get("files"):
        cleanup_process.remove_directory(files)
    cleanup_process.remove_directory(str(directory))


def _facts(lock: int) -> dict[str, Any]:
    with suppress(ValueError):
        facts = json.loads(os.pread(lock, 65536, 0))
        if isinstance(facts, dict):
            return facts
    return {}  # its owner was killed while writing them


def _remove_if_old(path: Path) -> None:
    """Remove a path without an owner if it is old. Another process may be creating or removing a recent one."""
    if time.time() - path.lstat().st_mtime <= OWNERLESS_S:
        return
    if path.is_dir() and not path.is_symlink():
        cleanup_process.remove_directory(str(path))
    else:
        path.unlink()
