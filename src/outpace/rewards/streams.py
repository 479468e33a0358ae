"""MERGED"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

CHUNK = 64 * 1024
PAUSE_S = 0.01
"""Wait after each dropped chunk, so that backpressure slows down a program that floods its output."""


class Kept:
    """Keeps the first `limit` bytes of a stream; the rest is read and dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = bytearray()
        self.truncated = False

    @property
    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None, "the process was started with pipes"
        while chunk := await stream.read(CHUNK):
            left = self._limit - len(self._bytes)
            self._bytes += chunk[:left]
            if len(chunk) > left:
                self.truncated = True
                await asyncio.sleep(PAUSE_S)


async def feed(stream: asyncio.StreamWriter | None, text: str) -> None:
    """Write `text` to the stream as far as the program reads it, then close the stream."""
    assert stream is not None, "the process was started with pipes"
    with suppress(ConnectionError):  # a program need not read its input
        stream.write(text.encode("utf-8", "replace"))
        await stream.drain()
    stream.close()


async def reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Return a stream reader for the reading end of a pipe, and its transport, which closes the pipe."""
    stream = asyncio.StreamReader(limit=CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )
    return stream, transport
