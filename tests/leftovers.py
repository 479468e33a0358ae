"""Fails a test session that leaves processes, shared memory, semaphores or temporary files behind.

The check runs once per session: in the process that starts the tests, or with pytest-xdist in its controller. Other
programs and other test sessions may run on the machine at the same time; what they leave is not reported:

- The session has its own temporary directory, which must be empty at the end.
- A process belongs to the session if it was started after it and inherited its mark in the environment, or if it names
  or has open a file in one of the session's directories (for programs started with their own environment).
- A segment of shared memory or a semaphore belongs to the session if one of its processes was seen to map it. A thread
  checks every new one a few times a second. The runtime directory of a run records where its files are.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest

from outpace.runtime.cleanup_process import TRACKER

MARK = "OUTPACE_TEST_SESSION"
SHARED_MEMORY = Path("/dev/shm")
CACHES = ("torchinductor_",)
"""Name prefixes of directories that libraries keep on purpose."""

POLL_S = 0.25
MAX_POLLS = 20
"""A new segment that no process of this session maps within this many polls belongs to another program."""
PATIENCE_S = float(os.environ.get("OUTPACE_LEFTOVERS_PATIENCE_S", "20"))
"""How long to wait for killed processes to exit and for their files to be removed."""


class LeftoverCheck:
    """Tracks what the session creates from `__enter__` on; `found` lists what is still there."""

    def __init__(self, *directories: Path) -> None:
        """`directories`: further directories that only this session uses."""
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        self._environment = dict(os.environ)
        self.temporary = Path(tempfile.mkdtemp(prefix="outpace-tests-"))
        self.temporary.chmod(0o1777)  # sandboxes run as other users
        self.directories = [self.temporary, *directories]
        self._began = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._known = _listed()
        self._pending: dict[str, int] = {}  # new segments, and how often each was polled
        self._ours: set[str] = set()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="leftovers", daemon=True)

    def __enter__(self) -> LeftoverCheck:
        os.environ.setdefault(
            "PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()
        )  # directories of tests stay where they were
        os.environ["TMPDIR"] = str(self.temporary)
        os.environ[MARK] = self._mark.partition("=")[2]
        tempfile.tempdir = None
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._watcher.join()
        os.environ.clear()
        os.environ.update(self._environment)
        tempfile.tempdir = None
        shutil.rmtree(self.temporary, ignore_errors=True)

    def found(self, patience_s: float = PATIENCE_S) -> list[str]:
        """Return one line per leftover. Waits up to `patience_s` for leftovers to disappear."""
        until = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return left

    def _left(self) -> list[str]:
        left = [f"process {pid}: {_command_line(pid)}" for pid in self._processes() if not _is_own_tracker(pid)]
        left += [str(SHARED_MEMORY / name) for name in sorted(self._ours & _listed())]
        left += [str(path) for path in sorted(SHARED_MEMORY.glob("outpace-*")) if self._is_our_runtime_directory(path)]
        return left + [str(path) for path in sorted(self.temporary.iterdir()) if not path.name.startswith(CACHES)]

    def _processes(self) -> Iterator[int]:
        places = [os.fsencode(directory) + b"/" for directory in self.directories]
        mark = self._mark.encode()
        for pid in _living(self._began):
            if mark in _read(pid, "environ") or any(place in _files(pid) for place in places):
                yield pid

    def _is_our_runtime_directory(self, path: Path) -> bool:
        with suppress(OSError, ValueError):
            files = json.loads((path / "owner.lock").read_bytes()).get("files", "")
            return any(files.startswith(f"{directory}/") for directory in self.directories)
        return False

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            names = _listed()
            self._pending |= dict.fromkeys(names - self._known, 0)
            self._known = names
            self._pending = {name: polls + 1 for name, polls in self._pending.items() if polls < MAX_POLLS}
            if self._pending:
                self._attribute()

    def _attribute(self) -> None:
        for pid in itertools.chain([os.getpid()], self._processes()):
            mapped = _mapped_inodes(pid)
            for name in list(self._pending):
                with suppress(OSError):
                    if (SHARED_MEMORY / name).stat().st_ino in mapped:
                        self._ours.add(name)
                        del self._pending[name]


def _listed() -> set[str]:
    """Segments and semaphores, without the directories of runs."""
    with suppress(OSError):
        return {entry.name for entry in os.scandir(SHARED_MEMORY) if entry.is_file(follow_symlinks=False)}
    return set()


def _living(since: float) -> Iterator[int]:
    """All other processes that were started since then, in seconds after boot, and have not ended."""
    earliest = int(since * os.sysconf("SC_CLK_TCK"))
    for name in filter(str.isdecimal, os.listdir("/proc")):
        state = _read(int(name), "stat").rpartition(b")")[2].split()
        if state and state[0] not in (b"Z", b"X") and int(state[19]) >= earliest and int(name) != os.getpid():
            yield int(name)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process is gone or belongs to another user
        return b""


def _files(pid: int) -> bytes:
    """The paths that a process was started with, works in or has open."""
    paths = [_read(pid, "cmdline").replace(b"\0", b"\n")]
    with suppress(OSError):
        for link in (f"/proc/{pid}/cwd", *(entry.path for entry in os.scandir(f"/proc/{pid}/fd"))):
            with suppress(OSError):
                paths.append(os.fsencode(os.readlink(link)) + b"/")
    return b"\n".join(paths)


def _mapped_inodes(pid: int) -> set[int]:
    lines = _read(pid, "maps").splitlines()
    return {int(line.split(None, 5)[4]) for line in lines if b" /dev/shm/" in line}


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:200]


def _is_own_tracker(pid: int) -> bool:
    """Whether this is the resource tracker of this process, which ends with it."""
    parent = _read(pid, "stat").rpartition(b")")[2].split()[1:2]
    return TRACKER in _read(pid, "cmdline") and parent == [str(os.getpid()).encode()]


class _Plugin:
    def __init__(self, check: LeftoverCheck) -> None:
        self._check = check
        self._left: list[str] = []

    @pytest.hookimpl(wrapper=True, trylast=True)  # after pytest-xdist has ended its workers, before the report
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield
        self._left = self._check.found()
        if self._left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.section("left behind by this test session", red=True, bold=True)
            for line in self._left:
                terminalreporter.line(line)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._check.directories.append(base)

    def pytest_unconfigure(self) -> None:
        self._check.__exit__(None, None, None)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and os.path.isdir("/proc/self"):
        config.pluginmanager.register(_Plugin(LeftoverCheck().__enter__()), "outpace-leftovers")
