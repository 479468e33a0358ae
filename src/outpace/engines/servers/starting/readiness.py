"""Waiting for a server: until it can be talked to, until it has sampled a first token.

Whoever waits hears every few seconds how far it is, and in the end either that it is ready or one line that says why
it is not: in the server's own words where it has ended, otherwise with the setting to raise.
"""

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
"""Between two looks at a server that is starting."""
SAY_S = 5.0
"""Between two words on how far it is."""
LEFT_S = 10.0
"""A server that is paused for so long was left so: an update takes less."""
PROBE_S = 120.0
"""A first token may take long: kernels are compiled for it."""

Say = Callable[[str], None]


async def until_ready(server: Server, process: ServerProcess, start_s: float, say: Say) -> None:
    """Wait until a server that was started has sampled a token. `BadInput` where it ends first or takes too long."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    ended = asyncio.create_task(process.ended())
    saying = asyncio.create_task(_say_how_far(process, say))
    try:
        while not await _answers(server, ended, began + start_s - loop.time()):
            if ended.done():
                raise BadInput(why_ended(ended.result(), process))
            if loop.time() - began >= start_s:
                raise BadInput(_too_slow(start_s, process))
    finally:
        ended.cancel()
        saying.cancel()


async def until_reached(server: Server, within_s: float) -> None:
    """Wait until a server that somebody else has started answers, for so long if it does not at once; and goes on,
    where it is paused."""
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
    """See to it that a server is not paused. It may be in the middle of somebody's update, which is not to be disturbed
    and soon over; one that stays paused was left so, by a run that has ended. Raises a `ServerFailed`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LEFT_S
    while await server.paused():
        if loop.time() >= until:
            log.info("%s was left paused: it goes on", server.url)
            await server.resume(recompute=True)
            return
        await asyncio.sleep(TRY_S)


async def sampled_once(server: Server) -> None:
    """See to it that a server that answers questions also samples."""
    try:
        await server.probe(PROBE_S)
    except ServerFailed as failed:
        raise BadInput(trouble(server.url, failed)) from failed


async def _answers(server: Server, ended: asyncio.Task[str], left_s: float) -> bool:
    """One try, and a pause after a failed one that ends with the process."""
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


async def _say_how_far(process: ServerProcess, say: Say) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(SAY_S)
        say(f"the server is starting, {loop.time() - began:.0f} s so far: {last_line(process.said())}")


def _too_slow(start_s: float, process: ServerProcess) -> str:
    doing = last_line(process.said()) or "it says nothing"
    return (
        f"the server was not ready within {start_s:g} s ({doing}); raise launch.start_s, or look at {process.log_path}"
    )


def why_ended(how: str, process: ServerProcess) -> str:
    """One line on a server that has ended: its own words where it has left any."""
    cause = cause_of(process.said())
    if "SIGKILL" in how:
        cause = "perhaps the machine has run out of memory"
    return f"the server {how}{f': {cause}' if cause else ''}; its log is {process.log_path}"
