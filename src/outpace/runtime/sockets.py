"""Unix sockets between parts of one machine: private to the user, and opened with a token.

A peer must send the token as its first frame; anything else closes the connection before a call is looked at.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os

from outpace.errors import PartFailed
from outpace.runtime.rpc import Channel, serve
from outpace.runtime.spec import START_DEADLINE_S
from outpace.wire import WireError

log = logging.getLogger(__name__)


async def listen(path: str, token: str, target: object, protocol: type) -> asyncio.Server:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            async with asyncio.timeout(10):
                offered = await channel.receive(str)
            if not isinstance(offered, str) or not hmac.compare_digest(offered, token):
                log.warning("a connection without the right token was refused")
                return
            await serve(target, protocol, channel)
        except asyncio.CancelledError:
            return  # the process is ending; raised further, asyncio would log it as if something had gone wrong
        except (WireError, TimeoutError) as error:
            log.warning("a connection was refused: %s", error)
        finally:
            channel.close()

    server = await asyncio.start_unix_server(greet, path)
    os.chmod(path, 0o600)
    return server


async def connect(path: str, token: str, deadline_s: float | None = START_DEADLINE_S) -> Channel:
    """Connect to a peer that may still be starting, and may take as long as any part may. None: without an end."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    reader, writer = await asyncio.open_unix_connection(path)
                    break
                except (FileNotFoundError, ConnectionError):
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise PartFailed(os.path.basename(path), f"did not listen within {deadline_s:g} s") from None
    channel = Channel(reader, writer)
    await channel.send(token)
    return channel
