"""MERGED"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from outpace.runtime.servant import END_LIMIT_S, ServantDied


class Member(Protocol):
    """A process in a pool, or an object that owns one."""

    @property
    def usable(self) -> bool: ...

    async def end(self, patience_s: float = 0.0) -> None: ...


M = TypeVar("M", bound=Member)


class Household(Generic[M]):
    """Keeps processes for reuse: starts them on demand and replaces those that had to be killed."""

    def __init__(self, make: Callable[[], M]) -> None:
        self._make = make
        self._idle: list[M] = []
        self._busy: set[M] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def take(self) -> M:
        """Return an idle process, preferring a used one, or start one. Raises `UserCodeDied` after `close`."""
        if self._closed:
            raise ServantDied("was closed")
        self._drop_unusable()
        member = self._idle.pop() if self._idle else self._make()
        self._busy.add(member)
        return member

    def stock(self, spare: int) -> None:
        """Start processes ahead of time until `spare` are idle, so that the next caller does not wait for a start.
        Does nothing after `close`. New processes are used last."""
        missing = 0 if self._closed else spare - len(self._idle)
        self._idle[:0] = [self._make() for _ in range(missing)]

    def put_back(self, member: M) -> None:
        """Return a process to the pool. It is ended if it is not usable."""
        self._busy.discard(member)
        if self._closed:
            return  # `close` ends it
        if member.usable:
            self._idle.append(member)
        else:
            self._end(member)

    async def close(self) -> None:
        self._closed = True
        for member in self._busy:
            self._end(member)
        for member in self._idle:
            self._end(member, END_LIMIT_S)
        self._idle.clear()
        await asyncio.gather(*self._endings)

    def _drop_unusable(self) -> None:
        """Remove idle processes that ended since their last call."""
        idle, self._idle = self._idle, []
        for member in idle:
            if member.usable:
                self._idle.append(member)
            else:
                self._end(member)

    def _end(self, member: M, patience_s: float = 0.0) -> None:
        """End a process in a background task, so that callers do not wait for it."""
        ending = asyncio.create_task(member.end(patience_s))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
