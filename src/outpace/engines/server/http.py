"""HTTP client for one server, with uniform errors, and a parser for server-sent events.

Invariants
- Every failure is a `ServerGone`, `ServerSilent`, `ServerFaulty` or `ServerRefused`: one line with the address and the
  cause.
- Only idempotent calls are retried: reads, and a `post` marked `repeatable`. A 4xx response is never retried.
- The number of connections is unlimited: a limit here would silently cap concurrent requests.
- In an event stream only `data:` payloads count; keep-alive comments are dropped. Lines may have any length: one event
  can carry the logprobs of many tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from outpace.errors import ServerFailed, ServerFaulty, ServerGone, ServerRefused, ServerSilent, one_line
from outpace.runtime.async_tools import backoff_s


class EventStreamParser:
    """Incremental parser: feed it bytes, get the payloads of complete events."""

    def __init__(self) -> None:
        self._line_parts: list[bytes] = []  # of the incomplete line
        self._data: list[bytes] = []  # of the incomplete event

    def feed(self, chunk: bytes) -> list[bytes]:
        *ends, rest = chunk.split(b"\n")
        payloads = []
        for end in ends:
            self._line_parts.append(end)
            line = b"".join(self._line_parts).removesuffix(b"\r")
            self._line_parts.clear()
            payload = self._process_line(line)
            if payload is not None:
                payloads.append(payload)
        if rest:
            self._line_parts.append(rest)
        return payloads

    def _process_line(self, line: bytes) -> bytes | None:
        """Process one line. A blank line completes an event and returns its payload."""
        if line:
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            return None
        if not self._data:
            return None
        payload = b"\n".join(self._data)
        self._data.clear()
        return payload


T = TypeVar("T")

_CONNECT_S = 10.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S, _JITTER = 0.25, 8.0, 0.5
_KEEP_ALIVE_S = 2.0  # below uvicorn's 5 s: a request sent on a connection the server is closing would be lost
_ERROR_BODY_S = 5.0  # timeout for the body of an error response
_BUSY = frozenset({408, 429})
_TLS_ALERT = b"\x15\x03"  # first bytes of a TLS alert, as a plain HTTP client sees it


class HttpClient:
    """Client of one server. `retries`: how often a repeatable call is retried; may be 0."""

    def __init__(self, url: str, api_key: str | None = None, retries: int = 2) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, *, deadline_s: float, query: Mapping[str, str] | None = None) -> Any:
        """GET a JSON response. The deadline applies to each attempt."""
        return _decode(f"{self.url}{path}", await self._read("GET", path, None, deadline_s, query, repeatable=True))

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
        """POST and return the JSON response; None if it is empty. Retried only if `repeatable`."""
        return _decode(f"{self.url}{path}", await self._read("POST", path, body, deadline_s, query, repeatable))

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """Yield the payloads of a stream of server-sent events, up to `[DONE]`. An early close ends the request."""
        parser = EventStreamParser()
        async with self._response("POST", path, body, None) as response:
            async for chunk in response.content.iter_any():
                for payload in parser.feed(chunk):
                    if payload == b"[DONE]":
                        return
                    yield payload
        raise ServerGone(f"{self.url}{path}: the server closed the stream before its end")

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
                deadline(f"{self.url}{path}", deadline_s),
                self._response(method, path, body, query) as response,
            ):
                return await response.read()

        return await with_retries(once, self._retries if repeatable else 0)

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a successful response. Every failure, here or while the caller reads it, is raised as `ServerFailed`."""
        where = f"{self.url}{path}"
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        try:
            response = await self._client_session().request(
                method, where, data=data, params=query, headers=headers, allow_redirects=False
            )
            try:
                if response.status >= 300:
                    raise await _error_of(where, response)
                yield response
            finally:
                # A failing server closes the connection after its response: do not reuse it.
                used_up = response.content.at_eof() and response.status < 500
                response.release() if used_up else response.close()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _transport_error(where, error) from error

    def _client_session(self) -> aiohttp.ClientSession:
        """The client session, created by the first call: it is bound to the running event loop."""
        if self._closed:
            raise ServerGone(f"{self.url}: the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        return self._session


async def with_retries(call: Callable[[], Awaitable[T]], retries: int) -> T:
    """Await `call`, retrying up to `retries` times on failure. A rejection (`ServerRefused`) is not retried."""
    for failures in range(1, retries + 1):
        try:
            return await call()
        except ServerRefused:
            raise
        except ServerFailed:
            await asyncio.sleep(backoff_s(failures, _FIRST_BACKOFF_S, _MAX_BACKOFF_S, _JITTER))
    return await call()


@asynccontextmanager
async def deadline(where: str, seconds: float) -> AsyncIterator[None]:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise ServerSilent(f"{where}: no answer within {seconds:g} s") from error


def _decode(where: str, body: bytes) -> Any:
    if not body.strip():
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerFaulty(f"{where}: the response is not JSON ({error}): {one_line(body[:200])}") from error


async def _error_of(where: str, response: aiohttp.ClientResponse) -> ServerFailed:
    """The error for an error response, even if its body never arrives."""
    try:
        async with asyncio.timeout(_ERROR_BODY_S):
            message_body = await response.content.read(4096)
    except TimeoutError:
        message_body = b"(no response body)"
    return _response_error(where, response, message_body)


def _response_error(where: str, response: aiohttp.ClientResponse, body: bytes) -> ServerFailed:
    """The error for a response that is not a success. Redirects are rejected: they would drop the posted body."""
    status = response.status
    if status < 400:
        target = response.headers.get("Location", "elsewhere")
        return ServerRefused(f"{where}: the server redirects to {one_line(target)}; use that address instead", status)
    message = f"{where}: {status} {response.reason or ''}".rstrip() + f": {_error_message(body)}"
    return status_error(message, status)


def status_error(message: str, status: int) -> ServerFailed:
    """The error for an error status: `ServerRefused` for a client error that a retry would not fix."""
    return ServerRefused(message, status) if 400 <= status < 500 and status not in _BUSY else ServerFaulty(message)


def _error_message(body: bytes) -> str:
    """The message of an error response, from any of the usual JSON envelopes."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return one_line(body.decode(errors="replace"))
    for key in ("error", "detail", "message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return one_line(content)


def _transport_error(where: str, error: Exception) -> ServerFailed:
    """Convert a transport error into a `ServerFailed`."""
    cause = one_line(error) or type(error).__name__
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return ServerGone(f"{where}: the TLS certificate is not trusted ({cause})")
        case aiohttp.ClientSSLError():
            return ServerGone(f"{where}: no TLS connection ({cause}); if the server uses plain HTTP, use http://")
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return ServerGone(f"{where}: no connection ({cause})")
        case aiohttp.ServerDisconnectedError() if where.startswith("http://"):
            return ServerGone(
                f"{where}: the server closed the connection without a response; if it uses TLS, use https://"
            )
        case aiohttp.ClientPayloadError() | aiohttp.ClientConnectionError() | OSError():
            return ServerGone(f"{where}: the connection broke ({cause})")
        case aiohttp.InvalidURL():
            return ServerRefused(f"{where}: not a valid URL")
        case aiohttp.ClientResponseError() if _is_tls_alert(error):
            return ServerGone(f"{where}: the server uses TLS; use https://")
        case _:
            return ServerFaulty(f"{where}: the response is not HTTP ({cause})")


def _is_tls_alert(error: aiohttp.ClientResponseError) -> bool:
    return "\\x15\\x03" in error.message or _TLS_ALERT.decode("latin-1") in error.message
