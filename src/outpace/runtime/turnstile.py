"""MERGED"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Limits how many tasks do a piece of work per iteration of one event loop, in FIFO order.

    An event loop runs all ready callbacks in one iteration and checks neither timers nor sockets until they are done.
    If the tools of a thousand episodes returned at the same moment, a thousand prompts would be rendered in one
    iteration and everything else would be delayed."""

    def __init__(self, per_turn: int = 16) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._admitted = 0  # tasks admitted that have not resumed yet
        self._ticking = False

    async def passed(self) -> None:
        """Wait for a slot. Usually there is one immediately."""
        loop = asyncio.get_running_loop()
        if not self._ticking:
            self._ticking = True
            loop.call_soon(self._tick, loop)
        if self._left > 0 and not self._waiting and not self._admitted:
            self._left -= 1
            return
        slot = loop.create_future()
        self._waiting.append(slot)
        try:
            await slot
        finally:
            self._admitted -= slot.done() and not slot.cancelled()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs once per iteration while slots are in use. Tasks admitted here resume in the next iteration."""
        was_idle = self._left == self._per_turn
        self._left = self._per_turn
        while self._waiting and self._left:
            slot = self._waiting.popleft()
            if not slot.done():  # skip cancelled tasks
                slot.set_result(None)
                self._admitted += 1
                self._left -= 1
        self._ticking = bool(self._waiting) or not was_idle
        if self._ticking:
            loop.call_soon(self._tick, loop)
