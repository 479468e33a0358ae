"""MERGED"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

WatchdogState = Literal["fine", "warn", "end"]

WARN_AT = 0.5
"""Fraction of its patience after which the watchdog warns."""


class Watchdog:
    """Detects when the run makes no progress. Pure: takes elapsed time as an argument."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.still_s = 0.0  # time without progress
        self._warned = False

    def moved(self) -> None:
        """Record progress."""
        self.still_s = 0.0
        self._warned = False

    def tick(self, seconds: float) -> WatchdogState:
        """Add elapsed time and return whether to warn (once per stall) or to end the run."""
        self.still_s += seconds
        if self.still_s >= self.patience_s:
            return "end"
        if self.still_s >= WARN_AT * self.patience_s and not self._warned:
            self._warned = True
            return "warn"
        return "fine"


class Awake:
    """Measures the time since the last call, capped so that time in which this process was suspended does not count."""

    def __init__(self, clock: Callable[[], float], interval_s: float) -> None:
        self._clock = clock
        self._max_s = 2 * interval_s  # a busy event loop is late, but not by much
        self._last = clock()

    def lap(self) -> float:
        before, self._last = self._last, self._clock()
        return min(self._last - before, self._max_s)
