"""Admission of requests to one server: queue, concurrency limit and loaded versions.

A request starts when its weight version is loaded and fewer than `limit` requests are running. Requests that may start
do so in order of arrival. An interrupted request keeps its slot until it is sent again, so that requests which arrived
later cannot overtake it. Call `wake` after changing health, weights or the limit; there is no polling.

ConcurrencyLimit adapts the limit to the load that the server reports. With too many requests the server preempts: it
drops KV cache and recomputes it. With too few it idles. Unlike a request queued in the server, one that waits here can
still move to another server or get newer weights.

    observed                                                      limit
    preemptions since the last observation, or a full KV cache    x 3/4
    requests queue in the server, limit above the slots           - one step
    no queue, every admitted slot in use, KV cache has room       + one step

The limit starts at the server's slots and stays between 1 and four times the slots. It stays above the slots only if
the server can run more requests than configured. A step is 1/16 of the slots. A decrease takes effect as requests
finish, so the limit does not decrease again while more requests run than it allows.

LoadedVersions records which weights the server has and which requests sample from them. Whole models replace one
another: there is one version, and running requests continue under the next one. Adapters coexist: a request keeps the
adapter it started with, and an unused adapter can be removed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outpace.engines.server.protocol import STALE, Pressure
from outpace.errors import RequestFailed
from outpace.types import Version

Admitted = Literal["admitted"]
EarlyStop = Literal["aborted", "lost"]

KEEP_SLOT_S = 2.0
"""How long the slot of an interrupted request is kept: far longer than its caller takes to send it again."""


@dataclass(eq=False)
class _WaitingRequest:
    name: str
    may_enter: Callable[[], bool]
    has_slot: bool
    decided: asyncio.Future[Admitted | EarlyStop]


class AdmissionQueue:
    """FIFO admission. `limit` returns the maximum number of running requests."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._waiting: list[_WaitingRequest] = []  # those with a slot first
        self._kept: dict[str, asyncio.TimerHandle] = {}  # slots of interrupted requests, by request
        self.running = 0  # slots in use, including kept ones

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, name: str, may_enter: Callable[[], bool]) -> Admitted | EarlyStop:
        """Wait for admission, or for `end`. A `RequestFailed` raised by `may_enter` propagates to the caller."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            kept.cancel()
        waiting = _WaitingRequest(name, may_enter, kept is not None, asyncio.get_running_loop().create_future())
        self._waiting.insert(0 if waiting.has_slot else len(self._waiting), waiting)
        self.wake()
        try:
            return await waiting.decided
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._free(waiting)
            elif _admitted(waiting.decided):
                self.leave()
            raise

    def leave(self) -> None:
        self.running -= 1
        self.wake()

    def leave_interrupted(self, name: str) -> None:
        """Leave, but keep the slot for up to KEEP_SLOT_S, until the same request enters again."""
        self._kept[name] = asyncio.get_running_loop().call_later(KEEP_SLOT_S, self._release, name)

    def _release(self, name: str) -> None:
        del self._kept[name]
        self.leave()

    def wake(self) -> None:
        """Admit every waiting request that may start now, in order of arrival."""
        for waiting in list(self._waiting):
            if not waiting.has_slot and self.running >= self._limit():
                return
            self._try_admit(waiting)

    def _try_admit(self, waiting: _WaitingRequest) -> None:
        try:
            if not waiting.may_enter():
                return
        except RequestFailed as error:
            self._decide(waiting, error)
        else:
            self.running += not waiting.has_slot
            waiting.has_slot = True
            self._decide(waiting, "admitted")

    def end(self, how: EarlyStop, names: set[str] | None = None) -> None:
        """End the wait of all requests, or of those in `names`."""
        for waiting in list(self._waiting):
            if names is None or waiting.name in names:
                self._decide(waiting, how)

    def _decide(self, waiting: _WaitingRequest, what: Admitted | EarlyStop | RequestFailed) -> None:
        self._waiting.remove(waiting)
        cancelled = waiting.decided.done()
        if cancelled or what != "admitted":
            self._free(waiting)
        if cancelled:
            return
        if isinstance(what, RequestFailed):
            waiting.decided.set_exception(what)
        else:
            waiting.decided.set_result(what)

    def _free(self, waiting: _WaitingRequest) -> None:
        """Free the slot of a request that is not admitted, if it has one."""
        if waiting.has_slot:
            waiting.has_slot = False
            asyncio.get_running_loop().call_soon(self.leave)


def _admitted(decided: asyncio.Future[Admitted | EarlyStop]) -> bool:
    return not decided.cancelled() and decided.exception() is None and decided.result() == "admitted"


class BusyClock:
    """Accumulates the seconds during which at least one request is running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside = 0
        self._since = 0.0
        self._before = 0.0

    @property
    def seconds(self) -> float:
        return self._before + (self._clock() - self._since if self._inside else 0.0)

    def enter(self) -> None:
        if not self._inside:
            self._since = self._clock()
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._before += self._clock() - self._since


CACHE_FULL = 0.97
"""KV cache usage at which preemption is imminent. Reusable prefixes of finished requests do not count as used."""

CACHE_HAS_ROOM = 0.85
"""KV cache usage below which another request fits."""

DECREASE_FACTOR = 0.75
STEPS_PER_SLOTS = 16
MAX_LIMIT_PER_SLOT = 4


class ConcurrencyLimit:
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
            self._value = min(MAX_LIMIT_PER_SLOT * self._slots, self._value + self._step)
        return self._value

    def _preempted(self, total: int) -> bool:
        """Whether the server preempted since the last observation. False at the first one and after a restart."""
        before, self._preemptions = self._preemptions, total
        return before is not None and total > before


class LoadedVersions:
    """Which weight versions the server has, and how many requests use each. Pure bookkeeping."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.pinned: Version | None = None
        self.newest = version  # ever sent to the server; no token can be newer
        self._served = version
        self._adapters: dict[Version, str] = {}
        self._users: Counter[Version] = Counter()
        self._lost: set[Version] = set()  # adapters dropped by a torn update, still to be removed from the server

    def admits(self, min_version: Version, pinned: Version | None) -> bool:
        """Whether a request can be served now. Raises `RequestFailed` if it never can."""
        if self.version == STALE:
            return False
        if pinned is None:
            return self.version >= min_version
        if pinned != self.pinned:
            current = "none" if self.pinned is None else f"version {self.pinned}"
            raise RequestFailed(f"version {pinned} is not pinned in this engine (pinned: {current})")
        return True

    def is_downgrade(self, version: Version) -> bool:
        return version < self._served

    def has_adapter(self, version: Version) -> bool:
        """Whether the adapter of this version is registered."""
        return version in self._adapters

    def take(self, pinned: Version | None) -> Version:
        """Count one more user of the current (or pinned) version and return that version."""
        version = self.version if pinned is None else pinned
        self._users[version] += 1
        return version

    def give_back(self, version: Version) -> None:
        self._users[version] -= 1

    def adapter(self, version: Version) -> str | None:
        return self._adapters.get(version)

    def record_load(self, version: Version, adapter: str | None = None, *, pinned: bool = False) -> None:
        if adapter is not None:
            self._adapters[version] = adapter
        if pinned:
            self.pinned = version
        else:
            self.version = self._served = version
        self.newest = max(self.newest, version)

    def mark_unknown(self) -> None:
        """Record that the server's weights are unknown."""
        self.version = STALE
        self.pinned = None
        self._lost |= self._adapters.keys()
        self._adapters.clear()

    def remove_unused(self) -> list[Version]:
        """Drop and return the versions whose adapters are no longer needed."""
        unused = [v for v in self._adapters if v not in (self.version, self.pinned) and not self._users[v]]
        for version in unused:
            del self._adapters[version], self._users[version]
        lost, self._lost = self._lost - self._adapters.keys(), set()
        return [*unused, *sorted(lost)]
