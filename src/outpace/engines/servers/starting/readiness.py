"""MERGED"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from outpace.engines.servers.checks import trouble
from outpace.engines.servers.spec import Server
from outpace.engines.servers.starting.causes import cause_of, last_line
from outpace.engines.servers.starting.launching import ServerProcess
from outpace.errors import BadInput, ServerFailed

log = logging.getLogger(__name__)

TRY_S = 0.5
"""Poll interval while a server starts."""
SAY_S = 5.0
"""Interval of progress reports."""
LEFT_S = 10.0
"""A server paused for longer was left paused: an update takes less."""
PROBE_S = 120.0
"""Timeout for the first token, which may compile kernels."""

Say = Callable[[str], None]


async def until_ready(server: Server, process: ServerProcess, start_s: float, say: Say) -> None:
    """Wait until a launched server has sampled a token. Raises `BadInput` if it exits first or takes too long."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    ended = asyncio.create_task(process.ended())
    reporting = asyncio.create_task(_report_progress(process, say))
    try:
        while not await _probe_once(server, ended, began + start_s - loop.time()):
            if ended.done():
                raise BadInput(why_ended(ended.result(), process))
            if loop.time() - began >= start_s:
                raise BadInput(_too_slow(start_s, process))
    finally:
        ended.cancel()
        reporting.cancel()


async def until_reached(server: Server, within_s: float) -> None:
    """Wait up to `within_s` until a server that we did not launch answers, and resume it if it was left paused."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while True:
        try:
            await gone_on(server)
            return
        except ServerFailed as failed:
            if loop.time() >= until:
                raise BadInput(trouble(server.url, failed)) from failed
        await asyncio.sleep(TRY_S)


async def gone_on(server: Server) -> None:
    """Resume a server that was left paused by an earlier run. A short pause may be a running update of another client,
    so wait before resuming. Raises `ServerFailed`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LEFT_S
    while await server.paused():
        if loop.time() >= until:
            log.info("%s was left paused; resuming it", server.url)
            await server.resume(recompute=True)
            return
        await asyncio.sleep(TRY_S)


async def sampled_once(server: Server) -> None:
    """Raise `BadInput` unless the server can sample a token."""
    try:
        await server.probe(PROBE_S)
    except ServerFailed as failed:
        raise BadInput(trouble(server.url, failed)) from failed


async def _probe_once(server: Server, ended: asyncio.Task[str], left_s: float) -> bool:
    """Probe once. After a failure wait for the next attempt, or for the process to exit."""
    probing = asyncio.create_task(server.probe(PROBE_S))
    try:
        await asyncio.wait({probing, ended}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        if probing.done():
            probing.result()
            return True
    except ServerFailed:
        await asyncio.wait({ended}, timeout=TRY_S)
    finally:
        probing.cancel()
    return False


async def _report_progress(process: ServerProcess, say: Say) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(SAY_S)
        say(f"the server is starting, {loop.time() - began:.0f} s so far: {last_line(process.said())}")


def _too_slow(start_s: float, process: ServerProcess) -> str:
    doing = last_line(process.said()) or "no output"
    return f"the server was not ready within {start_s:g} s ({doing}); raise launch.start_s or see {process.log_path}"


def why_ended(how: str, process: ServerProcess) -> str:
    """One line on why a server exited: the error in its log, if any."""
    cause = cause_of(process.said())
    if "SIGKILL" in how:
        cause = "the machine may have run out of memory"
    return f"the server {how}{f': {cause}' if cause else ''}; see {process.log_path}"
