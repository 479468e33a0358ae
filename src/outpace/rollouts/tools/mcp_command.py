"""The command of an MCP server: started, watched, and ended together with all that it has started.

    stdio_client ─▶ process, which carries a mark of its own ─▶ streams for the client
                        │ ends ─▶ the connection is told       └ left ─▶ asked to end by the package, then its family is

The package itself looks at the pipe only, which a child that outlives the server may hold open for ever, and ends only
those that have stayed in the process group.
"""

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

_endings: set[asyncio.Task[None]] = set()  # a task that nobody refers to may be collected before it is done


@dataclass
class Watch:
    """Who wants to know of a command: `on_end` is called once if it ends by itself, `last_line` is what it printed last
    on its standard error, once it is over."""

    on_end: Callable[[], None]
    last_line: str = ""


@asynccontextmanager
async def running(words: Sequence[str], watch: Watch) -> AsyncIterator[Any]:
    """The streams of a server that `words` start."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    mark = secrets.token_hex(16)
    # The whole environment: a server may need keys from it.
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
    """A process that cannot be watched, as it has dropped its mark, is noticed by its pipe alone."""
    watch = None if pid is None else _descriptor_of(pid)
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


def _descriptor_of(pid: int) -> int | None:
    """One that can be read once the process has ended; where the system has no such thing, or no such process, none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def _end(looking: asyncio.Task[int | None], mark: str) -> None:
    # The server itself may have ended before it was found; what it has started carries the mark as well.
    leader = await looking or await asyncio.to_thread(_oldest_with, mark)
    if leader is not None and not await family_ended(leader, mark):
        log.warning("an MCP server left processes of group %d that cannot be ended", leader)


def _oldest_with(mark: str) -> int | None:
    """The process that was started with the mark, or else the first that has inherited it."""
    found = [(_started_at(process), process.pid) for process in carriers(mark)]
    return min(found)[1] if found else None


def _started_at(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:  # just ended
        return float("inf")
