"""What a long run costs, process by process, and whether that grows.

A process is measured once a second, from the first step of a start on, for as long as it lives. The first half of its
life is left out: caches fill, allocators find their size. What is judged are the late halves of all processes of a
role, taken together over every start of the run: whether later ones stand higher than earlier ones at the same point of
their life, and growth per step of those that have trained for long enough. A worker is at its size after a thousand
steps or so; one that was killed before says nothing about growth.
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
FEWEST = 20
"""Processes that were measured less often say nothing."""
WARM_UP = 1_000
"""Steps before growth is looked at."""


@dataclass(frozen=True)
class Sample:
    step: int
    rss: int
    threads: int
    descriptors: int


@dataclass
class Life:
    """One process from the first look at it to the last."""

    role: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def late(self) -> list[Sample]:
        return self.samples[len(self.samples) // 2 :]

    @property
    def settled(self) -> list[Sample]:
        return [sample for sample in self.late if sample.step - self.samples[0].step >= WARM_UP]


class Measuring:
    """A hook for `SimulatedRun.start`."""

    def __init__(self) -> None:
        self.lives: dict[tuple[int, str], Life] = {}  # by process number and role
        self.counts: list[Counter[str]] = []  # how many processes of which role, once a second
        self._due = 0.0

    def __call__(self, run: Run) -> None:
        now = time.monotonic()
        if now < self._due or not run.is_training:
            return
        self._due = now + EVERY_S
        alive = run.processes()
        for pid, role in alive.items():
            with suppress(OSError, ValueError):
                self.lives.setdefault((pid, role), Life(role)).samples.append(_sample(pid, run.marks.last))
        self.counts.append(Counter(alive.values()))

    def most(self) -> dict[str, tuple[int, int]]:
        """The most processes of each role at a time, in the first half of the run and in the last."""
        middle = len(self.counts) // 2
        halves = self.counts[:middle], self.counts[middle:]
        roles = sorted(set().union(*self.counts))
        first, last = ({role: max((count[role] for count in half), default=0) for role in roles} for half in halves)
        return {role: (first[role], last[role]) for role in roles}


def _sample(pid: int, step: int) -> Sample:
    place = Path(f"/proc/{pid}")
    pages = int((place / "statm").read_text().split()[1])
    return Sample(step, pages * PAGE, len(os.listdir(place / "task")), len(os.listdir(place / "fd")))


# -------------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Cost:
    """What the processes of one role have cost in their late halves, over the whole run."""

    role: str
    lives: int
    rss_mb: float
    bytes_per_step: float
    first_last_mb: tuple[float, float]
    threads: tuple[float, float]  # the usual number, of the first third of the lives and of the last
    descriptors: tuple[float, float]


def costs(lives: Iterable[Life]) -> list[Cost]:
    by_role: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        if len(life.samples) >= FEWEST:
            by_role[life.role].append(life)
    return [_cost(role, known) for role, known in sorted(by_role.items())]


def _cost(role: str, lives: list[Life]) -> Cost:
    third = max(1, len(lives) // 3)
    first, last = lives[:third], lives[-third:]

    def both(of: str) -> tuple[float, float]:
        return _usual(first, of), _usual(last, of)

    low, high = both("rss")
    return Cost(
        role=role,
        lives=len(lives),
        rss_mb=round(_usual(lives, "rss") / 2**20, 1),
        bytes_per_step=round(slope(lives), 1),
        first_last_mb=(round(low / 2**20, 1), round(high / 2**20, 1)),
        threads=both("threads"),
        descriptors=both("descriptors"),
    )


def slope(lives: list[Life]) -> float:
    """Least squares over the late halves, each around its mean: bytes per step. 0 where nobody lived long enough."""
    above = below = 0.0
    for samples in (life.settled for life in lives if len(life.settled) >= FEWEST):
        steps = [sample.step for sample in samples]
        sizes = [sample.rss for sample in samples]
        middle, level = fmean(steps), fmean(sizes)
        above += sum((step - middle) * (size - level) for step, size in zip(steps, sizes, strict=True))
        below += sum((step - middle) ** 2 for step in steps)
    return above / below if below else 0.0


def _usual(lives: list[Life], of: str) -> float:
    return float(median(median(getattr(sample, of) for sample in life.late) for life in lives))


def growing(cost: Cost, steps: int, share: float = 0.05, floor_mb: float = 8.0) -> Iterator[str]:
    """Complaints: memory that would grow by more than this share of a process over the run, or numbers that rise."""
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
