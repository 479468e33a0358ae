"""MERGED"""

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
    """Serve calls to `target` on a Unix socket, for peers that send the token first."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            async with asyncio.timeout(10):
                offered = await channel.receive(str)
            if not isinstance(offered, str) or not hmac.compare_digest(offered, token):
                log.warning("rejected a connection with a missing or wrong token")
                return
            await serve(target, protocol, channel)
        except asyncio.CancelledError:
            return  # the process is ending; re-raised, asyncio would log it as an error
        except (WireError, TimeoutError) as error:
            log.warning("rejected a connection: %s", error)
        finally:
            channel.close()

    server = await asyncio.start_unix_server(accept, path)
    os.chmod(path, 0o600)
    return server


async def connect(path: str, token: str, deadline_s: float | None = START_DEADLINE_S) -> Channel:
    """Connect to a peer that may still be starting. Retries until `deadline_s`; None retries forever."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    reader, writer = await asyncio.open_unix_connection(path)
                    break
                except (FileNotFoundError, ConnectionError):
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise PartFailed(os.path.basename(path), f"did not accept connections within {deadline_s:g} s") from None
    channel = Channel(reader, writer)
    await channel.send(token)
    return channel
