"""Servants that are kept for the next call: started when needed, used again, replaced when one had to be killed.

Invariants
- A servant is in the hands of one caller at a time. One that is not usable any more is ended, never handed out.
- `stock` starts some ahead, so that whoever needs one next does not wait for a process to start.
- After `close` no process is left, nor a task or a descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from outpace.runtime.servant import END_LIMIT_S, ServantDied


class Member(Protocol):
    """A servant, or something that has one."""

    @property
    def usable(self) -> bool: ...

    async def end(self, patience_s: float = 0.0) -> None: ...


M = TypeVar("M", bound=Member)


class Household(Generic[M]):
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
        """One that has been used before, if there is one; `ServantDied` after `close`."""
        if self._closed:
            raise ServantDied("was closed")
        self._look_after()
        member = self._idle.pop() if self._idle else self._make()
        self._busy.add(member)
        return member

    def stock(self, spare: int) -> None:
        """Have so many idle, unless it is closed. They are used last."""
        missing = 0 if self._closed else spare - len(self._idle)
        self._idle[:0] = [self._make() for _ in range(missing)]

    def put_back(self, member: M) -> None:
        """Whoever has taken it is done with it, well or not."""
        self._busy.discard(member)
        if self._closed:
            return  # whoever closes ends it
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

    def _look_after(self) -> None:
        """Remove those that have ended by themselves since their last call."""
        idle, self._idle = self._idle, []
        for member in idle:
            if member.usable:
                self._idle.append(member)
            else:
                self._end(member)

    def _end(self, member: M, patience_s: float = 0.0) -> None:
        """In a task of its own: the next call need not wait, nor whoever was cancelled."""
        ending = asyncio.create_task(member.end(patience_s))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
