"""Cleanup after a run: leftover processes, shared memory and runtime directories, however the run ends.

`RuntimeDirectory` owns the directories of a run outside of its run directory:

    outpace-UID-XXXX         in memory: weight snapshots, sockets, the index of the run
    outpace-UID-XXXX-files   on disk: temporary files of workers and servers, and of the programs they start

`CleanupProcess` is a small process, started first, that notices when the controller's end of a pipe closes. Where the
kernel supports it, children die with their parent (`outpace.runtime.die_with_parent`). The cleanup process handles the
rest: programs started by children of children and, if the controller was killed, the directories and the children on
systems without that kernel feature. Its entry point is `outpace.runtime.cleanup_process`.

If the cleanup process was killed too, the next run cleans up. Each directory holds a file that its owner keeps locked;
a free lock means that the owner is dead. The file also records the mark and the index of the dead run, so that its
processes and shared memory can be found.

Every component has a mark in its environment, which its descendants inherit. Descendants that lost the mark are found
by the notes of their sessions in the index, a directory with one file per session. A note also lists the shared memory
that the session uses, so that it can be removed after all of its processes were killed at once. Processes that were not
started by a component, such as a user's other programs, have no mark and are never touched.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from outpace.runtime import guardian_child
from outpace.runtime.guardian_child import PASSES, PAUSE_S, SESSIONS, VARIABLE, Segment, start_of

log = logging.getLogger(__name__)

LEAVE_LIMIT_S = 1.5 * PASSES * PAUSE_S
"""Longer than all passes take. Usually one pass of a few hundredths of a second is enough."""


class Guardian:
    """Parent side of the cleanup process."""

    def __init__(self, index: Path, directories: Sequence[Path] = (), mark: str = "") -> None:
        """Start the cleanup process. It removes `index` when this process ends, and also `directories` if this process
        ends without `dismiss`. `mark` is the run's mark, from `new_run_mark`."""
        self._mark = mark or new_run_mark()
        self._marks = itertools.count()
        self._index = index
        index.mkdir(exist_ok=True)
        reading, self._pipe = os.pipe()
        arguments = [self._mark, str(index), *map(str, directories)]
        command = [sys.executable, "-I", "-S", guardian_child.__file__, *arguments]
        try:
            self._process = subprocess.Popen(
                command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath}, cwd="/", start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(reading)
        os.set_blocking(self._pipe, False)  # the controller must never wait for the cleanup process

    @property
    def pid(self) -> int:
        return self._process.pid

    def new_mark(self) -> str:
        """Return a mark for one component process."""
        return f"{self._mark}{next(self._marks)}."

    def marked(self, mark: str) -> dict[str, str]:
        """Return the environment variables by which the descendants of that process are found."""
        return {VARIABLE: mark, SESSIONS: str(self._index)}

    def watch(self, mark: str, pid: int) -> None:
        """Register a component process that has just started. Its start time is looked up now, because its pid may be
        reused later."""
        if start := start_of(pid):  # empty: it has already ended
            self._send(f"child {mark} {pid} {start}")

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
            clean_up(self._mark, self._index)

    def _send(self, command: str) -> None:
        try:
            os.write(self._pipe, f"{command}\n".encode())
        except OSError as error:  # it was killed or stopped; the run does not depend on it
            log.warning("cannot send %r to the cleanup process: %s", command, error)


def new_run_mark() -> str:
    return f"{secrets.token_hex(8)}."


def clean_up(mark: str, index: Path) -> None:
    """Do the work of the cleanup process, for a run whose cleanup process was killed. Blocks."""
    guardian_child.end({}, mark, str(index))
    guardian_child.remove(str(index))


class SessionNote:
    """The file of one session in the index of its run."""

    def __init__(self, leader: int, environment: Mapping[str, str]) -> None:
        """Record that a process with this environment has just become a session leader. The cleanup process then finds
        all processes of the session, even those that overwrite their environment."""
        self._file: str | None = None
        self._segments: frozenset[Segment] = frozenset()
        if SESSIONS in environment and VARIABLE in environment:
            self._file = os.path.join(environment[SESSIONS], f"{environment[VARIABLE]}{leader}.{start_of(leader)}")
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
            guardian_child.write_note(self._file, self._segments)
        except OSError as error:
            log.warning("cannot record session %s in the index of the run: %s", self._file, error)
