"""The pipes of a sandboxed program: fed without waiting for it, read without growing with it."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

CHUNK = 64 * 1024
PAUSE_S = 0.01
"""Between two chunks that are thrown away: a flood is read slowly, which holds the writer up."""


class Kept:
    """The first `limit` bytes of a stream; what comes after is read and dropped."""

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
    """Write all of `text` as far as somebody reads it, and close."""
    assert stream is not None, "the process was started with pipes"
    with suppress(ConnectionError):  # a program need not read its input
        stream.write(text.encode("utf-8", "replace"))
        await stream.drain()
    stream.close()


async def reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Of the reading end of a pipe, which the transport closes."""
    stream = asyncio.StreamReader(limit=CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )
    return stream, transport
