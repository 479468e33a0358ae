"""Gateway server: endpoints for agents, HTTP routes, authentication and error responses.

The server starts listening when the first endpoint is opened.

Invariants
- An endpoint serves one role of one episode and ends with it: `close_session` cancels its in-flight requests.
- After `close` no task, connection or session is left.
- A request is processed only if its `Host` header names this server and it carries the secret of its session.
- Every response, including errors, follows the API format of the request; no exception leaves the handler.
- No CORS headers: pages of other origins have no access.
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
"""Listen backlog: all agents of a worker may connect at once."""
IDLE_LIMIT_S = 120.0
"""Keep-alive timeout of idle connections."""
CLOSE_LIMIT_S = 2.0
"""How long agents may take to read their last response at shutdown."""


class Gateway:
    def __init__(self, host: str, port: int, model_name: str) -> None:
        self._host = "127.0.0.1" if host == "localhost" else host  # localhost may resolve to two addresses
        self._port = port
        self._model = model_name
        self._sessions = Sessions()
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def open(self, client: EpisodeClient, role: str = "policy") -> Endpoint:
        """Return the endpoint at which an agent reaches the policy, for this episode and role."""
        await self.start()
        return self._sessions.open(client, role, self._model).endpoint(self.origin)

    async def close_session(self, client: EpisodeClient) -> PartFailed | None:
        """Close all endpoints of an episode. Returns the component failure its requests met, if any."""
        return await self._sessions.close(client)

    async def close(self) -> None:
        await asyncio.gather(*map(self._sessions.close, self._sessions.clients()))
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @property
    def origin(self) -> str:
        """URL origin of the server, as seen from this machine."""
        host = "127.0.0.1" if self._host in WILDCARDS else self._host
        return f"http://{_url_host(host)}:{self._port}"

    def hosts(self) -> frozenset[str] | None:
        """Return the allowed `Host` headers; None if the server listens on all addresses and cannot know its names."""
        if self._host in WILDCARDS:
            return None
        names = {self._host, "localhost"} if self._host in ("127.0.0.1", "::1") else {self._host}
        return frozenset(f"{_url_host(name)}:{self._port}".lower() for name in names)

    async def start(self) -> None:
        """Start listening; no effect if already started."""
        async with self._starting:
            if self._runner is None:
                self._runner = await self._listen()

    async def _listen(self) -> web.AppRunner:
        from aiohttp import web

        from outpace.rollouts.gateway.routes import make_app

        runner = web.AppRunner(
            make_app(self._sessions, self.hosts),
            handler_cancellation=True,  # a closed connection cancels its request
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


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
