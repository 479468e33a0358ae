"""CPU cores: how many threads each component computes with.

Thread counts are either fixed by the settings or follow the load. `CoreSharing` does the latter for engines and the
learner, which share the cores of one machine. Thread pools that together exceed the cores stall at their barriers;
pools sized for the worst case leave cores idle. So the thread count is chosen again before every unit of work (a decode
step, a layer of a forward or backward pass), from three inputs:

    ThreadCounts     a small memory-mapped file with one row per compute process: pid, threads in use (0 while idle)
    other programs   cores used by anything else on the machine, from /proc, averaged over about a second
    role             an engine takes an equal share of the cores, at most as many as speed up its step;
                     the learner takes the cores that busy engines leave, or all cores if that measures faster

Slightly too many threads can pay off, because the OS scheduler then gives the process a larger share of the cores: for
a learner that is busy most of the time and so limits the run, and for both roles next to another busy program. Whether
it pays off depends on the machine and the model, so both options are measured: most trials use the faster one, a few
the other one.

Invariants
- A row is two aligned 64-bit integers, so a reader never sees a partial write. A process writes only its own row, and
  clears the rows of processes that died.
- Thread counts change results in the last bits, so deterministic runs use fixed counts.

GPUs are in `outpace.hardware.placement`.
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

from outpace.config import Config
from outpace.errors import BadInput
from outpace.hardware.cpu import supports_bfloat16
from outpace.hardware.placement import local_ranks, placement_of, uses_gpu


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class ComputeUnits:
    """The cores or GPUs that engines and learner compute on, together."""

    count: int
    are_gpus: bool = False
    per_engine: int = 1  # GPUs of one engine
    per_learner: int = 1  # learner processes; all are busy as long as the first one, which reports its busy time


def compute_units(config: Config) -> ComputeUnits | None:
    """Return the cores or GPUs of a run, or None if unknown: the GPUs of servers that are already running."""
    if not uses_gpu(config):
        return ComputeUnits(available_cores(), per_learner=config.learner.devices)
    if config.engine.urls:
        return None
    placement = placement_of(config)
    gpus = {gpu for each in (*placement.learners, *placement.engines) for gpu in each.gpus}
    per_engine = max(len(each.gpus) for each in placement.engines) or 1
    ranks = config.learner.devices
    count = len(gpus) + ranks - len(placement.learners)  # includes the learner's GPUs on other machines
    return ComputeUnits(count, are_gpus=True, per_engine=per_engine, per_learner=ranks)


def shares_cores(config: Config, own: int | None) -> bool:
    """Return whether a component's thread count follows the load. `own` is the count set in its config section.
    Deterministic runs use fixed counts, because thread counts change the last bits; so do runs on a GPU."""
    fixed = own or config.run.threads or config.run.deterministic or uses_gpu(config)
    return not fixed


def learner_shares_cores(config: Config) -> bool:
    """Return whether the learner's thread count follows the load. The processes of a sharded learner use fixed
    counts: they compute in step, so the slowest one would hold up all."""
    return not config.learner.sharded and shares_cores(config, config.learner.threads)


def engine_threads(config: Config) -> int:
    """Return the maximum number of compute threads of one engine."""
    if config.engine.threads or config.run.threads:
        return config.engine.threads or config.run.threads or 1
    if config.engine.kind == "embedded" and shares_cores(config, None):
        return available_cores()
    # With fixed counts the engines share half of the cores, because the learner runs at the same time. With max_lag = 0
    # they alternate with the learner and share all cores.
    beside = available_cores() // 2 if config.pacing.max_lag else available_cores()
    return max(1, beside // (config.engine.count or 1))


def learner_threads(config: Config) -> int:
    """Return the maximum number of compute threads of one learner process. The threads of the learner are divided
    among its processes on this machine."""
    threads = config.learner.threads or config.run.threads or available_cores()
    return max(1, threads // local_ranks(config))


def check_dtype(dtype: str, setting: str, on_cpu: bool) -> None:
    """Reject bfloat16 on a CPU without support: torch is slow there, and a vLLM server crashes at startup."""
    if dtype == "bfloat16" and on_cpu and not supports_bfloat16():
        raise BadInput(f"{setting}: this CPU does not support bfloat16; set float32 or run on a GPU")


Role = Literal["engine", "learner"]

THREAD_COUNTS_FILE = "cores"
"""File name of the thread counts in the runtime directory."""

ROWS = 1024
LEARNER_ROW = 0
"""Row of the learner. Engine i has row i + 1."""

SAMPLE_S = 0.5
SMOOTHING = 0.5
"""Weight of the newest sample of the other programs' load."""

COUNTS_AS_ONE = 0.6
"""Other programs that use less than this fraction of a core, such as the run's own controller and workers, do not
count. A program that could use a whole core gets about two thirds of one next to two compute threads on two cores."""


EXPLORE_FIRST, EXPLORE, EXPLORE_MOST = 2, 8, 32
"""The slower option gets one trial per interval of this many. The interval starts at EXPLORE_FIRST and doubles up to
EXPLORE_MOST. It is reset to EXPLORE when it becomes unclear which option is slower."""

TRIAL_S = 0.1
SPEED_SMOOTHING = 0.2
GAIN = 1.03
"""Using all cores must be faster than the fair share by this factor."""

BUSY_WINDOW_S = 5.0
MOSTLY_BUSY = 0.6
"""A learner that is busy for more than this fraction of the time counts as the bottleneck of the run or of the end of
each step."""


def thread_share(
    role: Role, cores: int, others: float, engines: Sequence[int], learner: int = 0, most: int | None = None
) -> int:
    """Return the number of compute threads for a process.

    `others`: cores used by other programs. `engines`: threads of the other busy engines. `learner`: threads of the
    learner, 0 while it is idle. `most`: upper limit, beyond which more threads do not help.
    """
    free = cores - _taken(others)
    fair = free - sum(engines) if role == "learner" else free // (1 + len(engines) + (learner > 0))
    return max(1, min(fair, most or fair))


def _taken(others: float) -> int:
    """Return the number of whole cores that other programs occupy."""
    return int(others + 1 - COUNTS_AS_ONE)


class SpeedComparison:
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


class ThreadCounts:
    """Thread counts of all compute processes of a run, in a memory-mapped file."""

    def __init__(self, file: Path) -> None:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = (ROWS + 1) * 16
            os.ftruncate(descriptor, size)
            lines = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.int64).reshape(ROWS + 1, 2)
            self._lines, self._fixed = lines[:ROWS], lines[ROWS]
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
        return [int(threads[line]) for line in np.flatnonzero(threads) if line not in (LEARNER_ROW, besides)]

    def pids(self) -> set[int]:
        return set(self._lines[:, 0].tolist()) - {0}

    def clear(self, pids: Collection[int]) -> None:
        """Clear the rows of these processes."""
        for line in np.flatnonzero(np.isin(self._lines[:, 0], list(pids))):
            self._lines[line] = 0


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds since boot: of all cores available to this process, and of each compute process."""

    clock: float
    busy_s: float
    running_s: dict[int, float]


def read_usage(pids: Collection[int]) -> CpuUsage | None:
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
    return CpuUsage(time.monotonic(), busy / tick, running)


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
        board: ThreadCounts,
        role: Role,
        line: int,
        cores: int,
        apply: Callable[[int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[Collection[int]], CpuUsage | None] = read_usage,
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
        self._all_is_faster = SpeedComparison()
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
        if self._board.engines(self._line) or self._board.threads(LEARNER_ROW):
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
        learner = self._board.threads(LEARNER_ROW)
        return thread_share(self._role, self._cores, self._others, self._board.engines(self._line), learner, self.most)

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
