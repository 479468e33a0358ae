"""Compute threads that follow the load.

Engines and learner of a run share the cores of one machine. Thread pools that together exceed the cores starve each
other at their barriers, and a pool sized for the worst case leaves cores idle. So the number of threads is chosen anew
before every unit of work (a decode step, a layer of a forward or backward pass), from three facts:

    the board        a small mapped file with one line per compute process: pid, threads in use (0 while it waits)
    other programs   cores that anything else on the machine uses, from /proc, averaged over about a second
    the role         an engine takes an equal share of the cores, at most as many as make its step faster;
                     the learner takes what busy engines leave, or all cores where that proves faster

A few threads too many can be worth it, because the scheduler then gives the process a larger part of the cores: for a
learner that works most of the time and so limits the speed of the run, and for both beside another program that never
waits. Whether they are depends on machine and model, so both ways are measured: mostly the faster one is used,
and now and then the other one.

Invariants
- A line is two aligned 64-bit integers, so a reader never sees half of one. A process writes its own line, and clears
  that of a process that died.
- Thread counts change results in the last bits, so deterministic runs do not use this module.
"""

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
"""The board's file name in the run's scratch directory."""

LINES = 1024
LEARNER_LINE = 0
"""Engine i has line i + 1."""

SAMPLE_S = 0.5
SMOOTHING = 0.5
"""Weight of the newest sample of the other programs' load."""

COUNTS_AS_ONE = 0.6
"""Other programs that use less than this of a core, such as the run's own controller and workers, take no core away.
A program that wants a whole core gets about two thirds of it beside two compute threads on two cores."""


EXPLORE_FIRST, EXPLORE, EXPLORE_MOST = 2, 8, 32
"""The slower way is tried once in so many trials: soon at first, then less and less often while it stays slower, and
again in every EXPLORE while it is not clear which way is slower."""

TRIAL_S = 0.1
SPEED_SMOOTHING = 0.2
GAIN = 1.03
"""All cores must make a process this much faster than its share does."""

BUSY_WINDOW_S = 5.0
MOSTLY_BUSY = 0.6
"""A learner that works for at least this part of the time limits the speed of the run, or the end of each step."""


def share_of(
    role: Role, cores: int, others: float, engines: Sequence[int], learner: int = 0, most: int | None = None
) -> int:
    """How many threads a process should compute with.

    `others`: cores used by other programs. `engines`: threads of the other busy engines. `learner`: threads of a busy
    learner, 0 while it waits. `most`: more threads do not help.
    """
    free = cores - _taken(others)
    fair = free - sum(engines) if role == "learner" else free // (1 + len(engines) + (learner > 0))
    return max(1, min(fair, most or fair))


def _taken(others: float) -> int:
    """Whole cores that other programs keep from us."""
    return int(others + 1 - COUNTS_AS_ONE)


class Faster:
    """Whether the second of two ways to work is faster, by measuring both now and then."""

    def __init__(self) -> None:
        self._speeds: list[float | None] = [None, None]
        self._until_other = self._interval = EXPLORE_FIRST

    @property
    def second(self) -> bool:
        first, second = self._speeds
        return first is not None and second is not None and second > GAIN * first

    def next_is_second(self) -> bool:
        """Which way to work in the next trial."""
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
            self._until_other = self._interval = EXPLORE  # it is not clear which is faster


class Board:
    """Who computes with how many threads right now."""

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
        """For benchmarks: so many threads whatever the load, as `engine.threads` and `learner.threads` would; 0: by
        the load again."""
        self._fixed[:] = engine, learner

    def fixed(self, role: Role) -> int:
        return int(self._fixed[1 if role == "learner" else 0])

    def engines(self, besides: int) -> list[int]:
        """Threads of the busy engines, but for the one on line `besides`."""
        threads = self._lines[:, 1]
        return [int(threads[line]) for line in np.flatnonzero(threads) if line not in (LEARNER_LINE, besides)]

    def pids(self) -> set[int]:
        return set(self._lines[:, 0].tolist()) - {0}

    def clear(self, pids: Collection[int]) -> None:
        """Empty the lines of these processes."""
        for line in np.flatnonzero(np.isin(self._lines[:, 0], list(pids))):
            self._lines[line] = 0


@dataclass(frozen=True)
class Usage:
    """Seconds since boot: that the cores of this process were busy, and that each compute process was running."""

    clock: float
    busy_s: float
    running_s: dict[int, float]


def read_usage(pids: Collection[int]) -> Usage | None:
    """None where the system does not tell. A process that is gone is left out."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    # user nice system idle iowait irq softirq steal: whatever is not idle or iowait is taken
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
    """One compute process's side. For one thread."""

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
        """`apply` sets the number of threads of the calling thread's pool."""
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
        self._all = False  # take all cores, also those of busy engines and other programs
        self._all_is_faster = Faster()
        self._trial_all = False
        self._trial_tokens = 0
        self._trial_s = 0.0
        self._since = clock()
        self._busy_part = 0.0
        self.most: int | None = None
        """More threads do not make this process faster."""
        board.write(line, os.getpid(), 0)

    @property
    def threads(self) -> int:
        return self._applied or self._cores

    @property
    def others(self) -> float:
        """Cores that other programs use."""
        return self._others

    def measure_most(self, measure: Callable[[], int]) -> None:
        """For an engine: find `most`, unless another process computes now. `measure` may change the thread count."""
        if self._board.engines(self._line) or self._board.threads(LEARNER_LINE):
            return
        self._board.write(self._line, os.getpid(), self._cores)
        self.most = measure()
        self._applied = 0

    def adjust(self) -> None:
        """Choose the number of threads for the next unit of work, and mark this process as busy."""
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
        """Leave the cores to the others."""
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
        """Work of the learner: busy from here to the end of the context."""
        began = self._clock()
        self.adjust()
        try:
            yield
        finally:
            self.idle()
            self._note_busy(began, self._clock())

    @contextmanager
    def comparing(self, tokens: int) -> Iterator[None]:
        """Work on so many tokens, with the share or with all cores, whichever proves faster."""
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
            return  # a process joined inside the interval: how much of it was its own is unknown
        ours = sum(self._last.running_s[pid] - last.running_s[pid] for pid in both)
        found = max(0.0, (self._last.busy_s - last.busy_s - ours) / seconds)
        self._others += SMOOTHING * (found - self._others)
