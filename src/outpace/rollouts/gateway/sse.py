"""MERGED"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec
from aiohttp import web

from outpace.rollouts.gateway.wanted import Reply

Json = dict[str, Any]

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


class Events(Protocol):
    """Stream events of one API for one answer."""

    def opening(self) -> Iterator[Json]: ...

    def delta(self, text: str) -> Iterator[Json]: ...

    def closing(self, reply: Reply, rest: str) -> Iterator[Json]: ...


class EventWriter:
    """Writes server-sent events. `named`: every event has a type line, and there is no final `[DONE]`."""

    def __init__(self, named: bool) -> None:
        self._named = named
        self.response = web.StreamResponse(headers=HEADERS)

    async def begin(self, request: web.Request) -> None:
        await self.response.prepare(request)

    async def write(self, events: Iterable[Json]) -> None:
        if data := b"".join(map(self._frame, events)):
            await self.response.write(data)

    async def end(self) -> None:
        if not self._named:
            await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    def _frame(self, event: Json) -> bytes:
        name = f"event: {event['type']}\n".encode() if self._named else b""
        return name + b"data: " + msgspec.json.encode(event) + b"\n\n"
