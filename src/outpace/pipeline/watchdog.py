"""Notices when nothing moves. Pure: it is told what moved and how much time went by.

Only time in which the watchdog itself was awake counts (`Awake`): a machine that was suspended, or a process that was
stopped and continued, has not stalled, however far the clocks have gone meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Verdict = Literal["fine", "warn", "end"]

WARN_AT = 0.5
"""The share of its patience after which the watchdog speaks up."""


class Watchdog:
    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.still_s = 0.0  # for so long nothing has moved
        self._warned = False

    def moved(self) -> None:
        """Something got done."""
        self.still_s = 0.0
        self._warned = False

    def tick(self, seconds: float) -> Verdict:
        """So much time has gone by. A warning is given once for every time that things stand still."""
        self.still_s += seconds
        if self.still_s >= self.patience_s:
            return "end"
        if self.still_s >= WARN_AT * self.patience_s and not self._warned:
            self._warned = True
            return "warn"
        return "fine"


class Awake:
    """How much time went by since the last look, as far as this process was there to see it."""

    def __init__(self, clock: Callable[[], float], interval_s: float) -> None:
        self._clock = clock
        self._most = 2 * interval_s  # a loop that is merely busy looks late, but not by much
        self._last = clock()

    def lap(self) -> float:
        before, self._last = self._last, self._clock()
        return min(self._last - before, self._most)
