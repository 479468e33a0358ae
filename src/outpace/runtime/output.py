"""What a servant prints: passed on to the log of its parent, as much of it as a person would read.

A flood must neither fill the disk nor keep the parent's event loop busy. So each call may print so many bytes; what
comes after is read slowly, which holds the writer up, and thrown away.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

MAX_OUTPUT = 64 * 1024
"""Bytes of one call that are kept."""
CHUNK = 64 * 1024
PAUSE_S = 0.01
"""Between two chunks that are thrown away: at most 6 MB/s of it are read."""
LAST_WORDS_S = 0.5
MAX_TAIL = 4096
"""Bytes from the end of all that was printed, which often say how it went wrong."""


class Output:
    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, whose: str) -> None:
        self._left = MAX_OUTPUT
        self._tail = b""
        self._whose = whose
        self._reader = reader
        self._transport = transport
        self._passing = asyncio.create_task(self._pass_on())

    @classmethod
    async def of(cls, descriptor: int, whose: str) -> Output:
        """Reads the pipe `descriptor`, and closes it in the end; `whose` is what people call the writer."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return cls(reader, transport, whose)

    @property
    def last_line(self) -> str:
        """The last line that is not empty, if there is one."""
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def allow(self) -> None:
        """A new call begins."""
        self._left = MAX_OUTPUT

    async def finish(self) -> None:
        """Pass on what is in the pipe. Somebody may still hold its other end: then do not wait for the end of it."""
        await asyncio.wait({self._passing}, timeout=LAST_WORDS_S)
        self._passing.cancel()
        with suppress(asyncio.CancelledError):
            await self._passing
        self._transport.close()

    async def _pass_on(self) -> None:
        while chunk := await self._reader.read(CHUNK):
            self._tail = (self._tail + chunk)[-MAX_TAIL:]
            if self._left <= 0:
                await asyncio.sleep(PAUSE_S)
                continue
            kept, self._left = chunk[: self._left], self._left - len(chunk)
            sys.stderr.write(kept.decode(errors="replace"))
            if self._left <= 0:
                sys.stderr.write(f"\n[{self._whose} printed more than {MAX_OUTPUT} bytes; the rest is dropped]\n")
            sys.stderr.flush()
