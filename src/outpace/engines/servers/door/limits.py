"""How many requests are sent to one server at once, tuned by what the server itself says of its pressure.

Too many and it preempts: keys and values that were computed are thrown away and computed again. Too few and it idles.
What is not sent waits at the door, where it can still be given to another server or be served by newer weights.

    seen                                                       the limit
    it has preempted since the last look, or its cache is full    × 3/4
    requests wait there, and the limit is above the slots         − one step
    nothing waits, every place is used, the cache has room        + one step

Bounds: it begins at the server's slots, never falls below 1, and never exceeds four times the slots, which only a
server with more slots than it was said to have gets to. A step is 1/16 of the slots. A fall is felt only as requests
end, so there is no second one while more are under way than the limit says.
"""

from __future__ import annotations

from outpace.engines.servers.spec import Pressure

FULL = 0.97
"""A cache so full is about to preempt. Prefixes that are kept in case they are needed again do not count as used."""

ROOMY = 0.85
"""Below this there is room for one request more."""

FALL = 0.75
STEPS = 16
HEADROOM = 4


class Limit:
    def __init__(self, slots: int) -> None:
        assert slots >= 1
        self._slots = slots
        self._value = slots
        self._step = max(1, slots // STEPS)
        self._preemptions: int | None = None

    @property
    def value(self) -> int:
        return self._value

    def observe(self, pressure: Pressure, sent: int) -> int:
        """A look at the server while it has `sent` requests of ours; the limit from here on."""
        preempted = self._preempted(pressure.preemptions)
        if preempted or pressure.cache_used >= FULL:
            if sent <= self._value:
                self._value = max(1, min(int(self._value * FALL), self._value - 1))
        elif pressure.waiting and self._value > self._slots:
            self._value = max(self._slots, self._value - self._step)
        elif not pressure.waiting and sent >= self._value and pressure.cache_used < ROOMY:
            self._value = min(HEADROOM * self._slots, self._value + self._step)
        return self._value

    def _preempted(self, total: int) -> bool:
        """Whether it has since the last look. A first look tells nothing, nor one at a server that began anew."""
        before, self._preemptions = self._preemptions, total
        return before is not None and total > before
