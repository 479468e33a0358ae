"""Looking at requests under way: whoever wants the newest tokens of one leaves a `Peek`, answered after a turn.

Nothing is computed or sent for requests that nobody looks at. `Peeks` belongs to the compute thread; the futures in it
belong to the event loop, and all that is read of them here is whether somebody still waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outpace.engines.embedded.request import Request
from outpace.types import Ints


@dataclass(frozen=True, eq=False)
class Peek:
    """Somebody waits for the tokens of a request beyond the first `after`."""

    request_id: str
    after: int
    answer: asyncio.Future[Ints]


Seen = tuple[Peek, Ints]


class Peeks:
    """Those who wait, until there is something to see."""

    def __init__(self) -> None:
        self._waiting: list[Peek] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, peek: Peek) -> None:
        self._waiting.append(peek)

    def seen(self, under_way: Mapping[str, Request]) -> list[Seen]:
        """What can be answered now. A request that is not under way has nothing to show, ever."""
        found: list[Seen] = []
        still: list[Peek] = []
        for peek in self._waiting:
            request = under_way.get(peek.request_id)
            if request is None:
                found.append((peek, np.zeros(0, dtype=np.int32)))
            elif len(request.tokens) > peek.after:
                found.append((peek, np.array(request.tokens[peek.after :], dtype=np.int32)))
            elif not peek.answer.done():
                still.append(peek)
        self._waiting = still
        return found
