"""Calls to one server over HTTP, and one vocabulary for how they fail.

Invariants
- Every failure is one of `ServerGone`, `ServerSilent`, `ServerFaulty` and `ServerRefused`: one line that names the
  address and the cause.
- Only what may be done twice is retried: reading, and a `post` whose caller says so. What the server calls wrong (4xx)
  is never asked again.
- As many connections as there are calls: a limit here would be a silent limit on how many requests a server gets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from outpace.engines.servers.sse import Events
from outpace.errors import ServerFailed, ServerFaulty, ServerGone, ServerRefused, ServerSilent, one_line

T = TypeVar("T")

_CONNECT_S = 10.0
_PAUSE_S = 0.25  # before the first retry, and twice as long before each further one, give or take a half
_KEEP_OPEN_S = 2.0  # below the 5 s of uvicorn: a connection that the server is about to close would lose a request
_COMPLAINT_S = 10.0  # for the words of an error answer, whose head has come
_BUSY = frozenset({408, 429})
_TLS_ALERT = b"\x15\x03"  # how a TLS server's word of refusal begins, as seen by a client that speaks plain HTTP


class Http:
    """One server. `retries`: how often a call that may be repeated is made again; zero is legal."""

    def __init__(self, url: str, api_key: str | None = None, retries: int = 2) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, *, deadline_s: float, query: Mapping[str, str] | None = None) -> Any:
        """What it answers, as JSON. The deadline is that of one attempt."""
        return _decoded(f"{self.url}{path}", await self._read("GET", path, None, deadline_s, query, repeatable=True))

    async def text(self, path: str, *, deadline_s: float) -> str:
        return (await self._read("GET", path, None, deadline_s, None, repeatable=True)).decode(errors="replace")

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        deadline_s: float,
        query: Mapping[str, str] | None = None,
        repeatable: bool = False,
    ) -> Any:
        """What it answers, as JSON; None where it answers nothing."""
        return _decoded(f"{self.url}{path}", await self._read("POST", path, body, deadline_s, query, repeatable))

    async def events(
        self, path: str, body: Any, *, first_s: float | None = None, idle_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The payloads of a stream of server-sent events, up to `[DONE]`. Leaving early ends the request.

        `first_s` bounds the wait for the first payload, `idle_s` that for each further one; None: it has no end."""
        where, wait_s, parser = f"{self.url}{path}", first_s, Events()
        async with self._response("POST", path, body, None, wait_s) as response, aclosing(_chunks(response)) as chunks:
            while True:
                payloads: list[bytes] = []
                async with _deadline(where, wait_s):
                    while not payloads:
                        chunk = await anext(chunks, None)
                        if chunk is None:
                            raise ServerGone(f"{where}: it closed the stream before its end")
                        payloads = parser.feed(chunk)
                for payload in payloads:
                    if payload == b"[DONE]":
                        return
                    yield payload
                wait_s = idle_s

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _read(
        self,
        method: str,
        path: str,
        body: Any,
        deadline_s: float,
        query: Mapping[str, str] | None,
        repeatable: bool,
    ) -> bytes:
        async def once() -> bytes:
            async with (
                _deadline(f"{self.url}{path}", deadline_s),
                self._response(method, path, body, query, None) as response,
            ):
                return await response.read()

        return await retried(once, self._retries if repeatable else 0)

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None, head_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is not an error; whatever goes wrong, here or in the caller's reading, is a `ServerFailed`."""
        where = f"{self.url}{path}"
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with _deadline(where, head_s):
                response = await self._open().request(
                    method, where, data=data, params=query, headers=headers, allow_redirects=False
                )
            try:
                if response.status >= 300:
                    raise await _refused(where, response, head_s)
                yield response
            finally:
                # A server in trouble ends the connection after its answer; the next call must not try to use it.
                used_up = response.content.at_eof() and response.status < 500
                response.release() if used_up else response.close()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _named(where, error) from error

    def _open(self) -> aiohttp.ClientSession:
        """Made at the first call: it belongs to the event loop that runs then."""
        if self._closed:
            raise ServerGone(f"{self.url}: nobody here calls it any more")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEP_OPEN_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        return self._session


async def retried(call: Callable[[], Awaitable[T]], retries: int) -> T:
    """What `call` gives, made again up to `retries` times while the server fails, but not when it refuses."""
    for attempt in range(retries):
        try:
            return await call()
        except ServerRefused:
            raise
        except ServerFailed:
            await asyncio.sleep(jittered(attempt))
    return await call()


def jittered(attempt: int) -> float:
    """Seconds to wait before trying again; not the same for everybody whom the same failure has hit."""
    return _PAUSE_S * float(2 ** min(attempt, 5)) * random.uniform(0.5, 1.5)


async def _chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    async for chunk in response.content.iter_any():
        yield chunk


@asynccontextmanager
async def _deadline(where: str, seconds: float | None) -> AsyncIterator[None]:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise ServerSilent(f"{where}: no answer within {seconds:g} s") from error


def _decoded(where: str, body: bytes) -> Any:
    if not body.strip():
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerFaulty(f"{where}: its answer is not JSON ({error}): {one_line(body[:200])}") from error


async def _refused(where: str, response: aiohttp.ClientResponse, within_s: float | None) -> ServerFailed:
    """What an error answer says. Its status counts even if its words never come."""
    try:
        async with asyncio.timeout(min(within_s or _COMPLAINT_S, _COMPLAINT_S)):
            complaint = await response.content.read(4096)
    except TimeoutError:
        complaint = b"and no more of its answer"
    return _refusal(where, response, complaint)


def _refusal(where: str, response: aiohttp.ClientResponse, body: bytes) -> ServerFailed:
    """What an answer that is not a success means. A redirect would lose the body of what was posted: it is refused."""
    status = response.status
    if status < 400:
        target = response.headers.get("Location", "elsewhere")
        return ServerRefused(f"{where}: it redirects to {one_line(target)}: give that address instead", status)
    message = f"{where}: {status} {response.reason or ''}".rstrip() + f": {_complaint(body)}"
    return ServerFaulty(message) if status >= 500 or status in _BUSY else ServerRefused(message, status)


def _complaint(body: bytes) -> str:
    """The words of an error answer, out of whichever envelope they come in."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return one_line(body.decode(errors="replace"))
    for key in ("error", "detail", "message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return one_line(content)


def _named(where: str, error: Exception) -> ServerFailed:
    """What went wrong below HTTP, in words."""
    cause = one_line(error) or type(error).__name__
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return ServerGone(f"{where}: its TLS certificate is not trusted ({cause})")
        case aiohttp.ClientSSLError():
            return ServerGone(f"{where}: no TLS connection ({cause}); does it speak http:// instead?")
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return ServerGone(f"{where}: no connection ({cause})")
        case aiohttp.ServerDisconnectedError() if where.startswith("http://"):
            return ServerGone(f"{where}: it closed the connection without an answer; if it speaks TLS, say https://")
        case aiohttp.ClientPayloadError() | aiohttp.ClientConnectionError() | OSError():
            return ServerGone(f"{where}: the connection broke ({cause})")
        case aiohttp.InvalidURL():
            return ServerRefused(f"{where}: this is not an address")
        case aiohttp.ClientResponseError() if _speaks_tls(error):
            return ServerGone(f"{where}: it speaks TLS; say https://")
        case _:
            return ServerFaulty(f"{where}: what it answers is not HTTP ({cause})")


def _speaks_tls(error: aiohttp.ClientResponseError) -> bool:
    return "\\x15\\x03" in error.message or _TLS_ALERT.decode("latin-1") in error.message
