"""Virtual time: what is to happen, in order. Nothing sleeps; time jumps to whatever comes next.

Two things that fall on the same moment happen in the order in which they were asked for, so a run is a function of its
settings and its seed.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Happening = Callable[[], None]


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._asked = 0
        self._pending: list[tuple[float, int, Happening]] = []

    def after(self, seconds: float, happening: Happening) -> None:
        self.at(self.now + seconds, happening)

    def at(self, moment: float, happening: Happening) -> None:
        assert moment >= self.now, "nothing happens in the past"
        self._asked += 1
        heappush(self._pending, (moment, self._asked, happening))

    def advance(self) -> bool:
        """Let the next thing happen; False: nothing is left that could."""
        if not self._pending:
            return False
        self.now, _, happening = heappop(self._pending)
        happening()
        return True
