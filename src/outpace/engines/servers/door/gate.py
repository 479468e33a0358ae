"""Who may send a request now: in the order of arrival, those whose weights are there, up to the limit.

Nobody polls. Whoever changes what the decision depends on (health, weights, limit) calls `turn`; leaving does so too.
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
class _Waiting:
    name: str
    may_enter: Callable[[], bool]
    decided: asyncio.Future[Admitted | Ending]


class Gate:
    """`limit` says how many may be inside at once."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._waiting: list[_Waiting] = []
        self.inside = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, name: str, may_enter: Callable[[], bool]) -> Admitted | Ending:
        """Waits for a place, or for what `end` says. `may_enter` may raise `RequestFailed`, which is passed on."""
        waiting = _Waiting(name, may_enter, asyncio.get_running_loop().create_future())
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
        """Something has changed: let in whoever may."""
        for waiting in list(self._waiting):
            if self.inside >= self._limit():
                return
            self._try(waiting)

    def _try(self, waiting: _Waiting) -> None:
        try:
            if not waiting.may_enter():
                return
        except RequestFailed as error:
            self._decide(waiting, error)
        else:
            self.inside += 1
            self._decide(waiting, "admitted")

    def end(self, how: Ending, names: set[str] | None = None) -> None:
        """Those who wait, or those of these names, need wait no longer."""
        for waiting in list(self._waiting):
            if names is None or waiting.name in names:
                self._decide(waiting, how)

    def _decide(self, waiting: _Waiting, what: Admitted | Ending | RequestFailed) -> None:
        self._waiting.remove(waiting)
        if waiting.decided.done():  # cancelled in this very moment
            if what == "admitted":
                self.inside -= 1
        elif isinstance(what, RequestFailed):
            waiting.decided.set_exception(what)
        else:
            waiting.decided.set_result(what)


def _admitted(decided: asyncio.Future[Admitted | Ending]) -> bool:
    return not decided.cancelled() and decided.exception() is None and decided.result() == "admitted"


class BusyClock:
    """Seconds with at least one inside."""

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
