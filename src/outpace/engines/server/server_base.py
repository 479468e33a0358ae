"""Server: the client of one inference server, and what the clients of vLLM and SGLang have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from typing import Any, TypeVar

import msgspec

from outpace.engines.server.http import HttpClient, status_error
from outpace.engines.server.protocol import Piece, Pressure, ServerFacts, ServerRequest
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, one_line
from outpace.types import Version

T = TypeVar("T")

QUERY_S = 20.0
"""Timeout of a query."""

NO_LOGPROB = -9999.0
"""Placeholder that servers send for a missing logprob."""

_ROUNDING_TOLERANCE = 1e-3  # half-precision softmax can yield a logprob slightly above 0


class Server(ABC):
    """A server at one address. Every method has its own deadline and raises `ServerFailed`.

    `seeded`: send each request's seed. `control_s`: timeout of pause, resume and label calls."""

    def __init__(self, http: HttpClient, *, control_s: float = 120.0, seeded: bool = False) -> None:
        self.url = http.url
        self.http = http
        self._control_s = control_s
        self._seeded = seeded

    @abstractmethod
    async def facts(self) -> ServerFacts: ...

    async def tokenized(self, text: str) -> list[int] | None:
        """Token ids by the server's own tokenizer; None if it has no such route."""
        return await self._tokenized({"prompt": text, "add_special_tokens": False})

    @abstractmethod
    def stream(self, request: ServerRequest) -> AsyncGenerator[Piece, None]:
        """Sample tokens. Closing the iterator early ends the request on the server."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> bool:
        """Abort requests; each stream gets a last piece. False: not supported, the caller must close the streams."""

    @abstractmethod
    async def probe(self, deadline_s: float) -> None:
        """Sample one token, bypassing our own admission queue."""

    @abstractmethod
    async def pressure(self) -> Pressure: ...

    @abstractmethod
    async def pause(self) -> None:
        """Pause at a token boundary. Running requests stay in the server."""

    @abstractmethod
    async def resume(self, recompute: bool) -> None:
        """Resume. With `recompute`, running requests recompute their KV cache, or end as interrupted."""

    @abstractmethod
    async def paused(self) -> bool | None:
        """Whether the server is paused; None if it does not report it."""

    @abstractmethod
    async def label(self, version: Version) -> None:
        """Label tokens sampled from now on with this version, if the server reports versions."""

    async def close(self) -> None:
        await self.http.close()

    async def _control(self, route: str, body: Any = None, query: dict[str, str] | None = None) -> None:
        """POST a control call. All of them are idempotent."""
        reply = await self.http.post(route, body, query=query, deadline_s=self._control_s, repeatable=True)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise ServerFaulty(f"{self.url}{route}: {one_line(reply.get('message', 'failed'))}")

    async def _tokenized(self, body: dict[str, Any]) -> list[int] | None:
        try:
            reply = await self.http.post("/tokenize", body, deadline_s=QUERY_S, repeatable=True)
        except ServerRefused:
            return None
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        return [int(token) for token in tokens] if isinstance(tokens, list) else None


async def read_models(http: HttpClient) -> list[dict[str, Any]]:
    """The models that the server lists, base models first."""
    reply = await http.get("/v1/models", deadline_s=QUERY_S)
    models = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ServerFaulty(f"{http.url}/v1/models: no model in the response")
    return sorted(models, key=lambda model: model.get("parent") is not None)


def decode_chunk(where: str, decoder: msgspec.json.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerFaulty(f"{where}: invalid chunk ({error}): {one_line(payload[:200])}") from error


def check_logprobs(where: str, values: Iterable[float | None]) -> list[float]:
    """Validate logprobs: finite, present, at most 0."""
    return [_check_logprob(where, value) for value in values]


def _check_logprob(where: str, value: float | None) -> float:
    if value is None or not math.isfinite(value) or not NO_LOGPROB < value <= _ROUNDING_TOLERANCE:
        raise ServerFaulty(f"{where}: invalid token logprob {value}")
    return min(value, 0.0)


def stream_error(where: str, message: object, status: int | None) -> ServerFailed:
    """The error for an error message inside a stream."""
    text = f"{where}: {'' if status is None else f'{status} '}{one_line(message)}"
    return ServerFaulty(text) if status is None else status_error(text, status)
