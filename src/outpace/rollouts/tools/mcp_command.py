"""MERGED"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from outpace.runtime.family import MARK, carriers, family_ended
from outpace.runtime.output import Output

log = logging.getLogger(__name__)

_endings: set[asyncio.Task[None]] = set()  # keeps references: asyncio may garbage-collect an unreferenced task


@dataclass
class Watch:
    """Observer of a server command. `on_end` is called once if the command exits by itself.
    Afterwards `last_line` holds its last line on stderr."""

    on_end: Callable[[], None]
    last_line: str = ""


@asynccontextmanager
async def running(words: Sequence[str], watch: Watch) -> AsyncIterator[Any]:
    """Start a server command and yield its streams. On exit, end it with its whole process tree.

    The `mcp` package only watches the pipe, which a surviving child may hold open forever, and only ends processes
    that stay in the process group. So the environment of the command carries a mark that identifies its processes."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    mark = secrets.token_hex(16)
    # Pass the whole environment: a server may need API keys.
    parameters = StdioServerParameters(command=words[0], args=list(words[1:]), env={**os.environ, MARK: mark})
    looking: asyncio.Task[int | None] | None = None
    reading, writing = os.pipe()
    printed = await Output.of(reading, f"the MCP server {words[0]}")
    try:
        with os.fdopen(writing, "w") as errors:
            async with stdio_client(parameters, errlog=errors) as streams:
                looking = asyncio.create_task(asyncio.to_thread(_oldest_with, mark))
                with _watched(await asyncio.shield(looking), watch.on_end):
                    yield streams
    finally:
        await asyncio.shield(printed.finish())
        watch.last_line = printed.last_line
        if looking is not None:
            ending = asyncio.create_task(_end(looking, mark))
            _endings.add(ending)
            ending.add_done_callback(_endings.discard)
            await asyncio.shield(ending)


@contextmanager
def _watched(pid: int | None, on_end: Callable[[], None]) -> Iterator[None]:
    """Call `on_end` when the process exits. Without a pid (the process dropped its mark), only the pipe shows it."""
    watch = None if pid is None else _pidfd(pid)
    if watch is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(watch)
        on_end()

    loop.add_reader(watch, ended)
    try:
        yield
    finally:
        loop.remove_reader(watch)
        os.close(watch)


def _pidfd(pid: int) -> int | None:
    """Return a pidfd, which becomes readable when the process exits, or None if that is not possible."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def _end(looking: asyncio.Task[int | None], mark: str) -> None:
    # The server may have exited before it was found; its children carry the mark as well.
    leader = await looking or await asyncio.to_thread(_oldest_with, mark)
    if leader is not None and not await family_ended(leader, mark):
        log.warning("cannot end all processes of an MCP server (process group %d)", leader)


def _oldest_with(mark: str) -> int | None:
    """Return the oldest process with the mark: the server, or the first child that inherited it."""
    found = [(_started_at(process), process.pid) for process in carriers(mark)]
    return min(found)[1] if found else None


def _started_at(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:  # just ended
        return float("inf")
