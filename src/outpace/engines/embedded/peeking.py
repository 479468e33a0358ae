"""MERGED"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outpace.engines.embedded.request import Request
from outpace.types import Ints


@dataclass(frozen=True, eq=False)
class Peek:
    """A reader waits for the tokens of a request beyond the first `after`."""

    request_id: str
    after: int
    answer: asyncio.Future[Ints]


Seen = tuple[Peek, Ints]


class Peeks:
    """Stream requests that wait for new tokens. Compute thread only.

    Their futures belong to the event loop; this class only reads whether they are done.
    """

    def __init__(self) -> None:
        self._waiting: list[Peek] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, stream_request: Peek) -> None:
        self._waiting.append(stream_request)

    def seen(self, under_way: Mapping[str, Request]) -> list[Seen]:
        """Remove and return the stream requests that can be answered now.

        A request that is not active gets no tokens."""
        found: list[Seen] = []
        remaining: list[Peek] = []
        for waiting in self._waiting:
            request = under_way.get(waiting.request_id)
            if request is None:
                found.append((waiting, np.zeros(0, dtype=np.int32)))
            elif len(request.tokens) > waiting.after:
                found.append((waiting, np.array(request.tokens[waiting.after :], dtype=np.int32)))
            elif not waiting.answer.done():
                remaining.append(waiting)
        self._waiting = remaining
        return found
