"""MERGED"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Role = Literal["engine", "learner"]

BOARD = "cores"
"""File name of the thread counts in the runtime directory."""

LINES = 1024
LEARNER_LINE = 0
"""Row of the learner. Engine i has row i + 1."""

SAMPLE_S = 0.5
SMOOTHING = 0.5
"""Weight of the newest sample of the other programs' load."""

COUNTS_AS_ONE = 0.6
"""Other programs that use less than this fraction of a core, such as the run's own controller and workers, do not
count. A program that could use a whole core gets about two thirds of one next to two compute threads on two cores."""


EXPLORE_FIRST, EXPLORE, EXPLORE_MOST = 2, 8, 32
"""The slower option is tried once in this many trials: soon at first, then less and less often while it stays slower,
and once in EXPLORE again while it is unclear which option is slower."""

TRIAL_S = 0.1
SPEED_SMOOTHING = 0.2
GAIN = 1.03
"""All cores must be faster than the fair share by this factor."""

BUSY_WINDOW_S = 5.0
MOSTLY_BUSY = 0.6
"""A learner that is busy for at least this fraction of the time limits the speed of the run, or the end of each
step."""


def share_of(
    role: Role, cores: int, others: float, engines: Sequence[int], learner: int = 0, most: int | None = None
) -> int:
    """Return the number of threads that a process should compute with.

    `others`: cores used by other programs. `engines`: threads of the other busy engines. `learner`: threads of the
    learner, 0 while it is idle. `most`: upper limit, beyond which more threads do not help.
    """
    free = cores - _taken(others)
    fair = free - sum(engines) if role == "learner" else free // (1 + len(engines) + (learner > 0))
    return max(1, min(fair, most or fair))


def _taken(others: float) -> int:
    """Return the number of whole cores that other programs occupy."""
    return int(others + 1 - COUNTS_AS_ONE)


class Faster:
    """Chooses the faster of two options by measuring both from time to time."""

    def __init__(self) -> None:
        self._speeds: list[float | None] = [None, None]
        self._until_other = self._interval = EXPLORE_FIRST

    @property
    def second(self) -> bool:
        """Whether the second option is faster."""
        first, second = self._speeds
        return first is not None and second is not None and second > GAIN * first

    def next_is_second(self) -> bool:
        """Return whether to use the second option in the next trial."""
        self._until_other -= 1
        if self._until_other > 0:
            return self.second
        self._interval = min(2 * self._interval, EXPLORE_MOST)
        self._until_other = self._interval
        return not self.second

    def record(self, second: bool, speed: float) -> None:
        chosen = self.second
        known = self._speeds[second]
        self._speeds[second] = speed if known is None else known + SPEED_SMOOTHING * (speed - known)
        used = self._speeds[chosen]
        if self.second != chosen or (second != chosen and used is not None and speed > used):
            self._until_other = self._interval = EXPLORE  # it is unclear which option is faster


class Board:
    """Thread counts of all compute processes of a run, in a memory-mapped file."""

    def __init__(self, file: Path) -> None:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = (LINES + 1) * 16
            os.ftruncate(descriptor, size)
            lines = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.int64).reshape(LINES + 1, 2)
            self._lines, self._fixed = lines[:LINES], lines[LINES]
        finally:
            os.close(descriptor)

    def write(self, line: int, pid: int, threads: int) -> None:
        self._lines[line] = pid, threads

    def threads(self, line: int) -> int:
        return int(self._lines[line, 1])

    def fix(self, engine: int, learner: int) -> None:
        """For benchmarks: fix the thread counts, like `engine.threads` and `learner.threads`. 0 follows the load
        again."""
        self._fixed[:] = engine, learner

    def fixed(self, role: Role) -> int:
        return int(self._fixed[1 if role == "learner" else 0])

    def engines(self, besides: int) -> list[int]:
        """Return the thread counts of the busy engines, except the one in row `besides`."""
        threads = self._lines[:, 1]
        return [int(threads[line]) for line in np.flatnonzero(threads) if line not in (LEARNER_LINE, besides)]

    def pids(self) -> set[int]:
        return set(self._lines[:, 0].tolist()) - {0}

    def clear(self, pids: Collection[int]) -> None:
        """Clear the rows of these processes."""
        for line in np.flatnonzero(np.isin(self._lines[:, 0], list(pids))):
            self._lines[line] = 0


@dataclass(frozen=True)
class Usage:
    """CPU seconds since boot: of all cores available to this process, and of each compute process."""

    clock: float
    busy_s: float
    running_s: dict[int, float]


def read_usage(pids: Collection[int]) -> Usage | None:
    """Read the current usage from /proc. Returns None if that is not available. Skips processes that have ended."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    # columns: user nice system idle iowait irq softirq steal; everything except idle and iowait is busy
    busy = sum(sum(map(int, line[1:9])) - int(line[4]) - int(line[5]) for line in lines if line[0] in names)
    running = {pid: ticks / tick for pid in pids if (ticks := _ticks(pid)) is not None}
    return Usage(time.monotonic(), busy / tick, running)


def _ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])  # utime, stime


class CoreSharing:
    """Chooses the thread count of one compute process. Not thread-safe: use it from one thread."""

    def __init__(
        self,
        board: Board,
        role: Role,
        line: int,
        cores: int,
        apply: Callable[[int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[Collection[int]], Usage | None] = read_usage,
    ) -> None:
        """`apply` sets the size of the calling thread's thread pool."""
        self._board = board
        self._role: Role = role
        self._line = line
        self._cores = cores
        self._apply = apply
        self._clock = clock
        self._read_usage = usage
        self._last = usage(())
        self._next_sample = clock() + SAMPLE_S
        self._others = 0.0
        self._applied = 0
        self._busy = False
        self._all = False  # use all cores, including those of busy engines and other programs
        self._all_is_faster = Faster()
        self._trial_all = False
        self._trial_tokens = 0
        self._trial_s = 0.0
        self._since = clock()
        self._busy_part = 0.0
        self.most: int | None = None
        """Upper limit: more threads do not make this process faster."""
        board.write(line, os.getpid(), 0)

    @property
    def threads(self) -> int:
        return self._applied or self._cores

    @property
    def others(self) -> float:
        """Cores that other programs use."""
        return self._others

    def measure_most(self, measure: Callable[[], int]) -> None:
        """For an engine: measure `most`, unless another process is computing now. `measure` may change the thread
        count."""
        if self._board.engines(self._line) or self._board.threads(LEARNER_LINE):
            return
        self._board.write(self._line, os.getpid(), self._cores)
        self.most = measure()
        self._applied = 0

    def adjust(self) -> None:
        """Choose the thread count for the next unit of work and mark this process as busy."""
        if self._clock() >= self._next_sample:
            self._sample()
        threads = self._fixed() or (self._cores if self._all else self._share())
        if threads != self._applied:
            self._apply(threads)
            self._applied = threads
        elif self._busy:
            return
        self._busy = True
        self._board.write(self._line, os.getpid(), threads)

    def idle(self) -> None:
        """Mark this process as idle, so that the others may use its cores."""
        if self._busy:
            self._busy = False
            self._board.write(self._line, os.getpid(), 0)

    def _fixed(self) -> int:
        fixed = self._board.fixed(self._role)
        return min(fixed, self.most or fixed)

    def _share(self) -> int:
        learner = self._board.threads(LEARNER_LINE)
        return share_of(self._role, self._cores, self._others, self._board.engines(self._line), learner, self.most)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark the learner as busy inside the context."""
        began = self._clock()
        self.adjust()
        try:
            yield
        finally:
            self.idle()
            self._note_busy(began, self._clock())

    @contextmanager
    def comparing(self, tokens: int) -> Iterator[None]:
        """Run work on `tokens` tokens inside the context, with the fair share or all cores, whichever measures
        faster."""
        began = self._clock()
        contended = self._worth_comparing() and not self._fixed() and self._share() < self._cores
        if self._trial_s >= TRIAL_S:
            self._all_is_faster.record(self._trial_all, self._trial_tokens / self._trial_s)
            self._trial_all = self._all_is_faster.next_is_second()
            self._trial_tokens, self._trial_s = 0, 0.0
        self._all = contended and self._trial_all
        self.adjust()
        try:
            yield
        finally:
            self._all = False
        if contended:
            self._trial_tokens += tokens
            self._trial_s += self._clock() - began

    def _worth_comparing(self) -> bool:
        limits = self._role == "learner" and self._busy_part > MOSTLY_BUSY
        return limits or _taken(self._others) > 0

    def _note_busy(self, began: float, ended: float) -> None:
        elapsed = max(ended - self._since, 1e-9)
        weight = 1 - math.exp(-elapsed / BUSY_WINDOW_S)
        self._busy_part += weight * ((ended - began) / elapsed - self._busy_part)
        self._since = ended

    def _sample(self) -> None:
        self._next_sample = self._clock() + SAMPLE_S
        pids = self._board.pids()
        last, self._last = self._last, self._read_usage(pids)
        if self._last is None or last is None:
            return
        self._board.clear(pids - self._last.running_s.keys())
        both = last.running_s.keys() & self._last.running_s.keys()
        seconds = self._last.clock - last.clock
        if seconds <= 0 or self._last.running_s.keys() - last.running_s.keys():
            return  # a process joined during the interval, so its share of the usage is unknown
        ours = sum(self._last.running_s[pid] - last.running_s[pid] for pid in both)
        found = max(0.0, (self._last.busy_s - last.busy_s - ours) / seconds)
        self._others += SMOOTHING * (found - self._others)
