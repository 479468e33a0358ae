"""Who ends what a run has left behind: a tiny process, started first, that notices the end of a pipe.

Children die with their parent where the kernel promises it (`outpace.runtime.lifeline`). What is left to the guardian
are programs that children of children have started, and, where the controller was killed, directories in memory and on
disk and systems whose kernel promises nothing. Its inside is `outpace.runtime.guardian_child`.

A mark in the environment of every part leads to all who descend from it, and a note of the sessions that they begin to
those who have lost that mark. Whoever was not started by a part, such as what a user's own process has started beside a
run, carries none and is never touched.

The index of a run is a directory with those notes. It also lists the shared memory that the sessions use, so that it
can be removed when all of them were killed at once: by the guardian, or by the next run (`outpace.runtime.scratch`).
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
"""Longer than it takes to end even those who resist; mostly it takes one look, which is some hundredths of a second."""


class Guardian:
    def __init__(self, index: Path, directories: Sequence[Path] = (), mark: str = "") -> None:
        """Removes `directories` if this process ends without `dismiss`, and `index` in any case. `mark` is that of the
        run, from `new_run_mark`."""
        self._mark = mark or new_run_mark()
        self._marks = itertools.count()
        self._index = index
        index.mkdir(exist_ok=True)
        reading, self._pipe = os.pipe()
        inside = [guardian_child.__file__, self._mark, str(index), *map(str, directories)]
        command = [sys.executable, "-I", "-S", *inside]
        try:
            self._process = subprocess.Popen(
                command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath}, cwd="/", start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(reading)
        os.set_blocking(self._pipe, False)  # the controller never waits for it

    @property
    def pid(self) -> int:
        return self._process.pid

    def new_mark(self) -> str:
        """For one process that is to be a part."""
        return f"{self._mark}{next(self._marks)}."

    def marked(self, mark: str) -> dict[str, str]:
        """What the environment of that process has to hold, so that all who descend from it can be found."""
        return {VARIABLE: mark, SESSIONS: str(self._index)}

    def watch(self, mark: str, pid: int) -> None:
        """It was started. When that was is looked up here and at once: later the number may be somebody else's."""
        if start := start_of(pid):  # empty: it has ended already
            self._tell(f"child {mark} {pid} {start}")

    def sweep(self, mark: str) -> None:
        """It has died: whatever it had started is to end too."""
        self._tell(f"sweep {mark}")

    def dismiss(self) -> None:
        """All parts have stopped; what they have left behind ends, and the guardian leaves. Blocks until it has."""
        self._tell("bye")
        os.close(self._pipe)
        try:
            self._process.wait(LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # it was killed before it had done its work
            clean_up(self._mark, self._index)

    def _tell(self, order: str) -> None:
        try:
            os.write(self._pipe, f"{order}\n".encode())
        except OSError as error:  # it was killed or stopped: the run does not depend on it
            log.warning("the guardian cannot be told %r: %s", order, error)


def new_run_mark() -> str:
    return f"{secrets.token_hex(8)}."


def clean_up(mark: str, index: Path) -> None:
    """What a guardian does at the end of a run, for a run whose guardian was killed. Blocks."""
    guardian_child.end({}, mark, str(index))
    guardian_child.remove(str(index))


class SessionNote:
    """The entry of one session in the index of its run."""

    def __init__(self, leader: int, environment: Mapping[str, str]) -> None:
        """A process with this environment has just become the leader of a session: all who are in it end with the part
        that they descend from, also those who write over their environment."""
        self._file: str | None = None
        self._segments: frozenset[Segment] = frozenset()
        if SESSIONS in environment and VARIABLE in environment:
            self._file = os.path.join(environment[SESSIONS], f"{environment[VARIABLE]}{leader}.{start_of(leader)}")
        self._write()

    @property
    def segments(self) -> frozenset[Segment]:
        """Every shared-memory segment that was recorded."""
        return self._segments

    def record(self, segments: Iterable[Segment]) -> None:
        """Processes of the session use these segments."""
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
            log.warning("session %s is missing in the index of the run: %s", self._file, error)
