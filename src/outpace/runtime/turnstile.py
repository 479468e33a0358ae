"""Fairness on an event loop: work that many tasks want to do at once is spread over several turns of the loop.

All that is ready runs in one turn, and until it is done the loop looks at nothing else: neither at timers nor at
sockets. A thousand episodes whose tools answer in the same moment would each render a prompt, and everything else would
be late by as long as that takes. Here only so many go through per turn, first come, first served.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """For one event loop."""

    def __init__(self, per_turn: int = 16) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._let_in = 0  # who may go on, and has not yet
        self._ticking = False

    async def passed(self) -> None:
        """Wait for one's turn, which mostly is now."""
        loop = asyncio.get_running_loop()
        if not self._ticking:
            self._ticking = True
            loop.call_soon(self._tick, loop)
        if self._left > 0 and not self._waiting and not self._let_in:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        try:
            await place
        finally:
            self._let_in -= place.done() and not place.cancelled()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs once per turn for as long as somebody went through in it. Those let in here go on in the next turn."""
        was_idle = self._left == self._per_turn
        self._left = self._per_turn
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # whoever was cancelled has left
                place.set_result(None)
                self._let_in += 1
                self._left -= 1
        self._ticking = bool(self._waiting) or not was_idle
        if self._ticking:
            loop.call_soon(self._tick, loop)
