"""Admission of requests to one server: queue, concurrency limit and loaded versions.

A request starts when its weight version is loaded and fewer than `limit` requests are running. Requests that may start
do so in order of arrival. Call `wake` after changing health, weights or the limit; there is no polling.

ConcurrencyLimit adapts the limit to the load that the server reports. With too many requests the server preempts:
it drops KV cache and computes it again. With too few it idles. A request that waits here can still be moved to another
server, or be served by newer weights.

    observed                                                      limit
    preemptions since the last observation, or a full KV cache    x 3/4
    requests queue in the server, limit above the slots           - one step
    no queue, every admitted slot in use, KV cache has room       + one step

The limit starts at the server's slots, stays at 1 or above, and at four times the slots or below; it only grows if the
server has more slots than configured. A step is 1/16 of the slots. A decrease takes effect as requests finish, so there
is no second decrease while more requests run than the limit allows.

LoadedVersions records which weights the server has and which requests sample from them. Whole models replace one
another: there is one version, and running requests continue under the next one. Adapters coexist: a request keeps the
adapter it started with, and an unused adapter can be removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outpace.errors import RequestFailed

Admitted = Literal["admitted"]
Ending = Literal["aborted", "lost"]


@dataclass(eq=False)
class _WaitingRequest:
    name: str
    may_enter: Callable[[], bool]
    decided: asyncio.Future[Admitted | Ending]


class Gate:
    """FIFO admission. `limit` returns the maximum number of running requests."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._waiting: list[_WaitingRequest] = []
        self.inside = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, name: str, may_enter: Callable[[], bool]) -> Admitted | Ending:
        """Wait for admission, or for `end`. A `RequestFailed` raised by `may_enter` propagates to the caller."""
        waiting = _WaitingRequest(name, may_enter, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.turn()
        try:
            return await waiting.decided
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif _admitted(waiting.decided):
                self.leave()
            raise

    def leave(self) -> None:
        self.inside -= 1
        self.turn()

    def turn(self) -> None:
        """Admit every waiting request that may start now, in order of arrival."""
        for waiting in list(self._waiting):
            if self.inside >= self._limit():
                return
            self._try_admit(waiting)

    def _try_admit(self, waiting: _WaitingRequest) -> None:
        try:
            if not waiting.may_enter():
                return
        except RequestFailed as error:
            self._decide(waiting, error)
        else:
            self.inside += 1
            self._decide(waiting, "admitted")

    def end(self, how: Ending, names: set[str] | None = None) -> None:
        """End the wait of all requests, or of those in `names`."""
        for waiting in list(self._waiting):
            if names is None or waiting.name in names:
                self._decide(waiting, how)

    def _decide(self, waiting: _WaitingRequest, what: Admitted | Ending | RequestFailed) -> None:
        self._waiting.remove(waiting)
        if waiting.decided.done():  # cancelled concurrently
            if what == "admitted":
                self.inside -= 1
        elif isinstance(what, RequestFailed):
            waiting.decided.set_exception(what)
        else:
            waiting.decided.set_result(what)


def _admitted(decided: asyncio.Future[Admitted | Ending]) -> bool:
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
