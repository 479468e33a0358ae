"""Gateway server: endpoints for agents, and their in-flight requests. It starts listening with the first endpoint.

    Exchange: request_sent ─▶ deltas of the text, as far as it is certain ─▶ answer

Invariants
- A session is one role of one episode behind one URL. It is found by an unguessable id, is protected by its own secret,
  and ends with its episode: `close_session` cancels and awaits its requests, and nothing here refers to the episode
  any more.
- After `close` no task, connection or session is left.
- A request is processed only if its `Host` header names this server and it carries the secret of its session.
- Every response, including errors, follows the API format of the request; no exception leaves the handler.
- No CORS headers: pages of other origins have no access.
- The final answer is authoritative. Streamed text is a prefix of its content; the stream ends with the rest. If the
  final answer parses differently (reasoning without an opening tag, for example), it continues as plain text.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.errors import BadInput, ComponentFailed
from outpace.rollouts.gateway.protocol import (
    GatewayReply,
    PolicyRequest,
    stable_prefix,
    stable_text_prefix,
    starts_in_reasoning,
)
from outpace.types import Answer, Endpoint, Ints

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

    async def close(self) -> None:
        self._client = None
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


DECODE_FRACTION = 64
"""Decode the text again when it has grown by 1/64 of its length: frequent enough, and not quadratic in time."""
PROMPT_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opening reasoning tag."""


class Exchange:
    """One in-flight request of an agent. Context manager: leaving it early cancels the request."""

    def __init__(self, session: GatewaySession, request: PolicyRequest) -> None:
        self._session = session
        self._request = request
        self._sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._prompt: list[int] = []
        self.streamed = ""

    async def __aenter__(self) -> Exchange:
        self._task = self._session.start(self._send)
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._task)

    async def request_sent(self) -> str:
        """Wait until the request is sent and return its id; raises the failure if it could not be sent."""
        either: set[asyncio.Future[Any]] = {self._task, self._sent}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._sent.result() if self._sent.done() else (await self.answer()).request_id

    async def answer(self) -> Answer:
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise EpisodeEnded
        try:
            return self._task.result()
        except ComponentFailed as error:  # other failures are left to the agent
            self._session.failure = error
            raise

    async def deltas(self) -> AsyncIterator[str]:
        """Yield new text of the content, as far as it is certain, while the answer grows."""
        tokens: list[int] = []
        read = 0
        while new := await self._new_tokens(len(tokens)):
            tokens += new
            if len(tokens) - read < read // DECODE_FRACTION:
                continue
            read = len(tokens)
            try:
                text = self._certain_text(tokens)
            except Exception:  # boundary to the chat format, which may fail to parse an unfinished answer
                log.debug("cannot parse the unfinished answer; streaming resumes at its end", exc_info=True)
                return
            if text is None:
                return
            if len(text) > len(self.streamed) and text.startswith(self.streamed):
                delta, self.streamed = text[len(self.streamed) :], text
                yield delta

    def continue_streamed(self, reply: GatewayReply, text: str) -> GatewayReply:
        """Return the reply with content that starts with the text already streamed; `text` is the full text."""
        if reply.content.startswith(self.streamed):
            return reply
        return replace(reply, content=text if text.startswith(self.streamed) else self.streamed, reasoning="")

    def _certain_text(self, tokens: list[int]) -> str | None:
        """Return the prefix of the content that these tokens determine; None to stop streaming until the end."""
        chat_format, request = self._session.client.chat_format, self._request
        stops = request.stops(self._session.client)
        if request.prompt is not None:
            return stable_text_prefix(chat_format.decode(tokens), stops)
        read = chat_format.parse(tokens, self._prompt, request.tools)
        if read.calls or read.reasoning or starts_in_reasoning(chat_format.decode(self._prompt[-PROMPT_TAIL:])):
            return None
        return stable_prefix(read.content, stops)

    async def _new_tokens(self, known: int) -> list[int]:
        """Return new tokens of the request; empty once it has ended, or on failure, which `answer` reports."""
        if not self._sent.done():
            return []
        stream_tokens = asyncio.create_task(self._read_stream(known))
        either: set[asyncio.Future[Any]] = {stream_tokens, self._task}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failure = await cancel_and_wait(stream_tokens)
        return [] if self._task.done() or stream_tokens.cancelled() or failure else stream_tokens.result()

    async def _read_stream(self, known: int) -> list[int]:
        tokens: list[int] = (await self._session.client.engine.stream_tokens(self._sent.result(), known)).tolist()
        return tokens

    def _send(self) -> Coroutine[Any, Any, Answer]:
        request, session = self._request, self._session
        options: dict[str, Any] = {"role": session.role, **request.overrides(session.client.max_tokens)}
        if request.stream:
            options["listener"] = self._on_sent
        if request.prompt is not None:
            return session.client.complete(request.prompt, **options)
        return session.client.chat(request.messages, tools=request.tools, **options)

    def _on_sent(self, request_id: str, prompt: Ints) -> None:
        self._prompt = prompt.tolist()
        if not self._sent.done():
            self._sent.set_result(request_id)
