"""MERGED"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

TimedCall = Callable[[], None]


class Clock:
    """Virtual clock with a queue of scheduled calls. Nothing sleeps: time jumps to the next call.

    Calls scheduled for the same time run in the order in which they were scheduled, so a run is a pure function of its
    settings and seed."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._scheduled = 0
        self._pending: list[tuple[float, int, TimedCall]] = []

    def after(self, seconds: float, call: TimedCall) -> None:
        self.at(self.now + seconds, call)

    def at(self, moment: float, call: TimedCall) -> None:
        assert moment >= self.now, "cannot schedule a call in the past"
        self._scheduled += 1
        heappush(self._pending, (moment, self._scheduled, call))

    def advance(self) -> bool:
        """Run the next scheduled call. Returns False if none is left."""
        if not self._pending:
            return False
        self.now, _, call = heappop(self._pending)
        call()
        return True
