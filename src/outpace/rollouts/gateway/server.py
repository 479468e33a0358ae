"""The gateway as a worker holds it: it listens once the first endpoint is asked for.

Invariants
- An endpoint is good for one role of one episode, and ends with it: `close_session` cancels what still runs for it.
- After `close` no task, connection or session is left.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from outpace.errors import BadInput, PartFailed
from outpace.rollouts.gateway.sessions import EpisodeClient, Sessions
from outpace.types import Endpoint

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::", "")
BACKLOG = 1024
"""Connections that may wait to be accepted: all agents of a worker may start at once."""
IDLE_LIMIT_S = 120.0
"""How long a connection may be idle between two requests."""
CLOSE_LIMIT_S = 2.0
"""How long an agent may take to read its last response."""


class Gateway:
    def __init__(self, host: str, port: int, model_name: str) -> None:
        self._host = "127.0.0.1" if host == "localhost" else host  # a name may stand for two addresses
        self._port = port
        self._model = model_name
        self._sessions = Sessions()
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def open(self, client: EpisodeClient, role: str = "policy") -> Endpoint:
        """Where an agent finds the policy, for this episode and role."""
        await self.start()
        return self._sessions.open(client, role, self._model).endpoint(self.origin)

    async def close_session(self, client: EpisodeClient) -> PartFailed | None:
        """End all endpoints of an episode; what its requests met that no other attempt could do better, if anything."""
        return await self._sessions.close(client)

    async def close(self) -> None:
        await asyncio.gather(*map(self._sessions.close, self._sessions.clients()))
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @property
    def origin(self) -> str:
        """Where it is reached from this machine."""
        host = "127.0.0.1" if self._host in WILDCARDS else self._host
        return f"http://{_in_url(host)}:{self._port}"

    def hosts(self) -> frozenset[str] | None:
        """What a request may call this server; None: it listens on all addresses, whose names it does not know."""
        if self._host in WILDCARDS:
            return None
        names = {self._host, "localhost"} if self._host in ("127.0.0.1", "::1") else {self._host}
        return frozenset(f"{_in_url(name)}:{self._port}".lower() for name in names)

    async def start(self) -> None:
        """Listen, unless it does already."""
        async with self._starting:
            if self._runner is None:
                self._runner = await self._listen()

    async def _listen(self) -> web.AppRunner:
        from aiohttp import web

        from outpace.rollouts.gateway.routes import make_app

        runner = web.AppRunner(
            make_app(self._sessions, self.hosts),
            handler_cancellation=True,  # an agent that hangs up gives up on its answer
            access_log=None,
            logger=log,
            keepalive_timeout=IDLE_LIMIT_S,
            shutdown_timeout=CLOSE_LIMIT_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host or None, self._port, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise BadInput(f"gateway.port: cannot listen on {self._host}:{self._port}: {error.strerror}") from error
        self._port = runner.addresses[0][1]
        return runner


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
