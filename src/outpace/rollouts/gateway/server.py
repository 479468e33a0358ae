"""Gateway server: endpoints for agents. It starts listening with the first endpoint.

Invariants
- A session is one role of one episode behind one URL. It is found by an unguessable id, is protected by its own secret,
  and ends with its episode: `close_session` cancels and awaits its requests and drops all references to the
  episode.
- After `close` no task, connection or session is left.
- A request is processed only if its `Host` header names this server and it carries the secret of its session.
- Every response, including errors, follows the API format of the request; no exception leaves the handler.
- No CORS headers: pages of other origins have no access.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.errors import BadInput, ComponentFailed
from outpace.rollouts.gateway.protocol import PolicyRequest, RequestRejected
from outpace.types import Answer, Endpoint, Message

if TYPE_CHECKING:
    from aiohttp import web

    from outpace.rollouts.client import PolicyClient


T = TypeVar("T")


class EpisodeEnded(Exception):
    """The episode ended before the answer was complete."""


class GatewaySession:
    """One role of one episode, behind one URL."""

    def __init__(self, client: PolicyClient, role: str, model: str) -> None:
        self.id = secrets.token_hex(16)
        self._client: PolicyClient | None = client
        self.role = role
        self.model = model
        self.secret = secrets.token_urlsafe(32)
        self.failure: ComponentFailed | None = None  # a component failure: retrying the request cannot help
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stored: dict[str, list[Message]] = {}  # conversations by response id, for `previous_response_id`

    @property
    def client(self) -> PolicyClient:
        """The episode's client. Raises `EpisodeEnded` after `close`, so that open connections do not keep it alive."""
        if self._client is None:
            raise EpisodeEnded
        return self._client

    def serves(self, client: PolicyClient) -> bool:
        return self._client is client

    def endpoint(self, origin: str, key_in_url: bool = False) -> Endpoint:
        name = f"{self.id}.{self.secret}" if key_in_url else self.id
        return Endpoint(f"{origin}/sessions/{name}/v1", self.secret, self.model)

    def accepts_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="surrogateescape"), self.secret.encode())

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Start a task that is cancelled when the session closes."""
        if self._client is None:
            raise EpisodeEnded
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def with_history(self, request: PolicyRequest) -> PolicyRequest:
        """Return the request with the conversation of its previous response in front of its own messages."""
        if request.previous is None:
            return request
        if request.previous not in self._stored:
            message = (
                f"previous_response_id: {request.previous!r} is not a stored response of this episode and role; "
                "send the whole conversation as input"
            )
            raise RequestRejected(message, param="previous_response_id", code="previous_response_not_found")
        return replace(request, messages=[*self._stored[request.previous], *request.messages])

    def store(self, request: PolicyRequest, answer: Answer) -> None:
        if request.store:
            self._stored[answer.request_id] = [*request.messages, answer.message]

    async def close(self) -> None:
        self._client = None
        self._stored.clear()
        await asyncio.gather(*map(cancel_and_wait, self._tasks))


async def cancel_and_wait(task: asyncio.Task[Any]) -> BaseException | None:
    """Cancel a task and wait until it is done. Returns the exception it raised, if any.

    A task is cancelled only once, so that its clean-up is not interrupted."""
    if not task.cancelling():
        task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.exception()


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
        self._sessions: dict[str, GatewaySession] = {}  # by id
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def open(self, client: PolicyClient, role: str = "policy", key_in_url: bool = False) -> Endpoint:
        """Return the endpoint at which an agent reaches the policy, for this episode and role. With `key_in_url` the
        URL contains the secret, for agents that send another API key."""
        await self.start()
        session = next((session for session in self._sessions_of(client) if session.role == role), None)
        if session is None:
            session = GatewaySession(client, role, self._model)
            self._sessions[session.id] = session
        return session.endpoint(self.origin, key_in_url)

    def find(self, session_id: str) -> GatewaySession | None:
        return self._sessions.get(session_id)

    async def close_session(self, client: PolicyClient) -> ComponentFailed | None:
        """Close all endpoints of an episode. Returns the component failure its requests met, if any."""
        sessions = self._sessions_of(client)
        if not sessions:
            return None
        for session in sessions:
            del self._sessions[session.id]
        await asyncio.gather(*(session.close() for session in sessions))
        return next((session.failure for session in sessions if session.failure is not None), None)

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))
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

    def _sessions_of(self, client: PolicyClient) -> list[GatewaySession]:
        return [session for session in self._sessions.values() if session.serves(client)]

    async def _listen(self) -> web.AppRunner:
        from aiohttp import web

        from outpace.rollouts.gateway.http import make_app

        runner = web.AppRunner(
            make_app(self),
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
