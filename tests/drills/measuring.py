"""Memory, threads and descriptors of each process of a long run, and whether they grow.

Each process is measured once a second from the first step of a start until it ends. The first half of its life is left
out: caches fill and allocators find their size. The checks use the late halves of all processes of a role over every
start of the run: whether later processes are larger than earlier ones at the same point of their life, and the growth
per step of processes that lived long enough. A worker reaches its size after about two thousand steps; a worker killed
before that gives no information about growth.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from drills.following import Run

PAGE = os.sysconf("SC_PAGE_SIZE")
EVERY_S = 1.0
MIN_SAMPLES = 20
"""Processes with fewer samples are left out."""
WARM_UP = 2_000
"""Steps before growth is measured."""


@dataclass(frozen=True)
class ProcessSample:
    step: int
    rss: int
    threads: int
    descriptors: int


@dataclass
class ProcessHistory:
    """All samples of one process."""

    role: str
    samples: list[ProcessSample] = field(default_factory=list)

    @property
    def late(self) -> list[ProcessSample]:
        return self.samples[len(self.samples) // 2 :]

    @property
    def warmed_up(self) -> list[ProcessSample]:
        return [sample for sample in self.late if sample.step - self.samples[0].step >= WARM_UP]


class ProcessMonitor:
    """A hook for `Run.start` that samples all processes."""

    def __init__(self) -> None:
        self.lives: dict[tuple[int, str], ProcessHistory] = {}  # by pid and role
        self.counts: list[Counter[str]] = []  # number of processes per role, once a second
        self._due = 0.0

    def __call__(self, run: Run) -> None:
        now = time.monotonic()
        if now < self._due or not run.is_training:
            return
        self._due = now + EVERY_S
        alive = run.processes()
        for pid, role in alive.items():
            with suppress(OSError, ValueError):
                self.lives.setdefault((pid, role), ProcessHistory(role)).samples.append(_sample(pid, run.step_log.last))
        self.counts.append(Counter(alive.values()))

    def max_counts(self) -> dict[str, tuple[int, int]]:
        """Return the maximum number of processes of each role in the first and in the second half of the run."""
        middle = len(self.counts) // 2
        halves = self.counts[:middle], self.counts[middle:]
        roles = sorted(set().union(*self.counts))
        first, last = ({role: max((count[role] for count in half), default=0) for role in roles} for half in halves)
        return {role: (first[role], last[role]) for role in roles}


def _sample(pid: int, step: int) -> ProcessSample:
    place = Path(f"/proc/{pid}")
    pages = int((place / "statm").read_text().split()[1])
    return ProcessSample(step, pages * PAGE, len(os.listdir(place / "task")), len(os.listdir(place / "fd")))


# ----------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class RoleCost:
    """Resources of the processes of one role in their late halves, over the whole run."""

    role: str
    lives: int
    rss_mb: float
    bytes_per_step: float
    first_last_mb: tuple[float, float]
    threads: tuple[float, float]  # the median, over the first and the last third of the processes
    descriptors: tuple[float, float]


def costs(lives: Iterable[ProcessHistory]) -> list[RoleCost]:
    by_role: dict[str, list[ProcessHistory]] = defaultdict(list)
    for life in lives:
        if len(life.samples) >= MIN_SAMPLES:
            by_role[life.role].append(life)
    return [_cost(role, known) for role, known in sorted(by_role.items())]


def _cost(role: str, lives: list[ProcessHistory]) -> RoleCost:
    third = max(1, len(lives) // 3)
    first, last = lives[:third], lives[-third:]

    def both(of: str) -> tuple[float, float]:
        return _median_of(first, of), _median_of(last, of)

    low, high = both("rss")
    return RoleCost(
        role=role,
        lives=len(lives),
        rss_mb=round(_median_of(lives, "rss") / 2**20, 1),
        bytes_per_step=round(slope(lives), 1),
        first_last_mb=(round(low / 2**20, 1), round(high / 2**20, 1)),
        threads=both("threads"),
        descriptors=both("descriptors"),
    )


def slope(lives: list[ProcessHistory]) -> float:
    """Least squares over the late halves, each around its mean: bytes per step. 0 if no process lived long enough."""
    above = below = 0.0
    for samples in (life.warmed_up for life in lives if len(life.warmed_up) >= MIN_SAMPLES):
        steps = [sample.step for sample in samples]
        sizes = [sample.rss for sample in samples]
        middle, level = fmean(steps), fmean(sizes)
        above += sum((step - middle) * (size - level) for step, size in zip(steps, sizes, strict=True))
        below += sum((step - middle) ** 2 for step in steps)
    return above / below if below else 0.0


def _median_of(lives: list[ProcessHistory], of: str) -> float:
    return float(median(median(getattr(sample, of) for sample in life.late) for life in lives))


def growing(cost: RoleCost, steps: int, share: float = 0.05, floor_mb: float = 8.0) -> Iterator[str]:
    """Yield complaints: memory that would grow by more than this share over the run, or counts that rise."""
    allowed = max(share * cost.rss_mb, floor_mb)
    inside = cost.bytes_per_step * steps / 2**20
    if inside > allowed:
        yield f"{cost.role}: memory grows by {cost.bytes_per_step:.0f} bytes a step, {inside:.0f} MB over the run"
    first, last = cost.first_last_mb
    if last - first > allowed:
        yield f"{cost.role}: later processes are larger, {first:.0f} MB at first and {last:.0f} MB at last"
    for name, (before, after) in (("threads", cost.threads), ("descriptors", cost.descriptors)):
        if after > before + 1:
            yield f"{cost.role}: {before:g} {name} at first, {after:g} at last"
