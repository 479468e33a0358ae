"""MERGED"""

from __future__ import annotations

from outpace.engines.servers.spec import Pressure

CACHE_FULL = 0.97
"""KV cache usage at which preemption is imminent. Reusable prefixes of finished requests do not count as used."""

CACHE_HAS_ROOM = 0.85
"""KV cache usage below which another request fits."""

DECREASE_FACTOR = 0.75
STEPS_PER_SLOTS = 16
HEADROOM = 4


class Limit:
    """Adaptive limit on concurrent requests to one server."""

    def __init__(self, slots: int) -> None:
        assert slots >= 1
        self._slots = slots
        self._value = slots
        self._step = max(1, slots // STEPS_PER_SLOTS)
        self._preemptions: int | None = None

    @property
    def value(self) -> int:
        return self._value

    def observe(self, pressure: Pressure, sent: int) -> int:
        """Update the limit from the server's load while `sent` of our requests are running. Returns the new limit."""
        preempted = self._preempted(pressure.preemptions)
        if preempted or pressure.cache_used >= CACHE_FULL:
            if sent <= self._value:
                self._value = max(1, min(int(self._value * DECREASE_FACTOR), self._value - 1))
        elif pressure.waiting and self._value > self._slots:
            self._value = max(self._slots, self._value - self._step)
        elif not pressure.waiting and sent >= self._value and pressure.cache_used < CACHE_HAS_ROOM:
            self._value = min(HEADROOM * self._slots, self._value + self._step)
        return self._value

    def _preempted(self, total: int) -> bool:
        """Whether the server preempted since the last observation. The first one, or one after a restart, says no."""
        before, self._preemptions = self._preemptions, total
        return before is not None and total > before
