"""MERGED"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

MAX_OUTPUT = 64 * 1024
"""Bytes of output that are kept per call."""
CHUNK = 64 * 1024
DROP_PAUSE_S = 0.01
"""Pause between two dropped chunks: at most 6 MB/s are read."""
DRAIN_S = 0.5
MAX_TAIL = 4096
"""Bytes kept from the end of the output, which often show the cause of a failure."""


class Output:
    """Forwards what a child process prints to this process's stderr, up to `MAX_OUTPUT` bytes per call.

    A flood of output must neither fill the disk nor keep the event loop busy: output beyond the limit is read slowly,
    which blocks the writer, and dropped."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, whose: str) -> None:
        self._left = MAX_OUTPUT
        self._tail = b""
        self._whose = whose
        self._reader = reader
        self._transport = transport
        self._forwarding = asyncio.create_task(self._forward())

    @classmethod
    async def of(cls, descriptor: int, whose: str) -> Output:
        """Read the pipe `descriptor` and close it at the end. `whose` names the writer in messages."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return cls(reader, transport, whose)

    @property
    def last_line(self) -> str:
        """The last line that is not blank, or an empty string."""
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def allow(self) -> None:
        """Reset the limit for a new call."""
        self._left = MAX_OUTPUT

    async def finish(self) -> None:
        """Forward what is left in the pipe and close it. Waits at most `DRAIN_S`, because another process may still
        hold the write end."""
        await asyncio.wait({self._forwarding}, timeout=DRAIN_S)
        self._forwarding.cancel()
        with suppress(asyncio.CancelledError):
            await self._forwarding
        self._transport.close()

    async def _forward(self) -> None:
        while chunk := await self._reader.read(CHUNK):
            self._tail = (self._tail + chunk)[-MAX_TAIL:]
            if self._left <= 0:
                await asyncio.sleep(DROP_PAUSE_S)
                continue
            kept, self._left = chunk[: self._left], self._left - len(chunk)
            sys.stderr.write(kept.decode(errors="replace"))
            if self._left <= 0:
                sys.stderr.write(f"\n[{self._whose} printed more than {MAX_OUTPUT} bytes; the rest is dropped]\n")
            sys.stderr.flush()
