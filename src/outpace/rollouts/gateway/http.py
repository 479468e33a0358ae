"""Routes of the gateway: authentication, error responses, plain and streamed replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import hdrs, web

from outpace.errors import BadInput, ContextFull, OutpaceError, RequestFailed, one_line
from outpace.rollouts.gateway.anthropic import MessagesStream, error_body, messages_response, read_messages
from outpace.rollouts.gateway.exchange import Exchange
from outpace.rollouts.gateway.openai import (
    ChatStream,
    CompletionStream,
    chat_response,
    completion_response,
    models,
    read_chat,
    read_completion,
)
from outpace.rollouts.gateway.protocol import GatewayReply, PolicyRequest, RequestRejected
from outpace.rollouts.gateway.responses import ResponseStream, read_response_request, response_object
from outpace.rollouts.gateway.server import EpisodeEnded, Gateway, GatewaySession

log = logging.getLogger(__name__)

MAX_BODY = 4 * 1024 * 1024
SESSION: web.RequestKey[GatewaySession] = web.RequestKey("session", GatewaySession)
NO_RETRY = {"x-should-retry": "false"}
"""API clients retry by default; none of these errors is worth a retry."""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    421: "permission_error",
}


@web.middleware
async def error_middleware(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn every failure into an error response in the request's API format."""
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPException as error:
        return error_response(request, RequestRejected(error.reason, status=error.status))
    except Exception as error:  # boundary: the agent always gets a response
        return error_response(request, to_rejection(error))
    return response


def to_rejection(error: Exception) -> RequestRejected:
    if isinstance(error, RequestRejected):
        return error
    if isinstance(error, EpisodeEnded):
        return RequestRejected("the episode has ended", status=410, code="episode_ended")
    if isinstance(error, ContextFull):
        return RequestRejected(one_line(error), code="context_length_exceeded")
    if isinstance(error, RequestFailed | BadInput):
        return RequestRejected(one_line(error))
    if not isinstance(error, OutpaceError):
        log.error("an agent's request failed", exc_info=error)
    return RequestRejected(f"{type(error).__name__}: {one_line(error)}", status=500)


def error_payload(request: web.Request, refused: RequestRejected) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    if request.path.endswith("/messages"):
        return error_body(kind, str(refused))
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def error_response(request: web.Request, refused: RequestRejected) -> web.Response:
    return json_response(error_payload(request, refused), refused.status, NO_RETRY)


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


async def read_body(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RequestRejected(f"the body is not JSON: {one_line(error)}") from None
    if not isinstance(body, dict):
        raise RequestRejected("the body is not a JSON object")
    return body


def auth_middleware(gateway: Gateway) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Any) -> Any:
        allowed = gateway.hosts()
        if allowed is not None and request.headers.get(hdrs.HOST, "").lower() not in allowed:
            raise RequestRejected("the Host header does not name this server", status=421)
        name, _, key = request.match_info.get("session", "").partition(".")
        session = gateway.find(name)
        if session is None:
            raise RequestRejected("unknown endpoint, or its episode has ended", status=404)
        if not session.accepts_token(key or _bearer_token(request)):
            raise RequestRejected(
                "the API key of this endpoint is missing or wrong", status=401, code="invalid_api_key"
            )
        request[SESSION] = session
        return await handler(request)

    return guard


def _bearer_token(request: web.Request) -> str:
    kind, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


Json = dict[str, Any]

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


ReplyEvents = CompletionStream | MessagesStream | ResponseStream
"""Stream events of the answers to one request."""


@dataclass(frozen=True)
class ApiFormat:
    """One API: how requests are parsed, and how answers are returned, whole or as a stream of server-sent events.

    With `named_events` every event has a type line, and `[DONE]` is not sent."""

    read: Callable[[Json], PolicyRequest]
    response: Callable[[Sequence[GatewayReply], str, PolicyRequest], Json]
    stream: Callable[[str, str, PolicyRequest], ReplyEvents]
    named_events: bool = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        session = request[SESSION]
        policy_request = session.with_history(self.read(await read_body(request)))
        async with Exchange(session, policy_request) as exchange:
            if policy_request.stream:
                return await self._stream(request, exchange, policy_request)
            return json_response(self.response(await exchange.replies(), session.model, policy_request))

    async def _stream(
        self, request: web.Request, exchange: Exchange, policy_request: PolicyRequest
    ) -> web.StreamResponse:
        """Stream the answers. Failures before the request is sent are plain responses; later ones are events."""
        session = request[SESSION]
        events = self.stream(await exchange.request_sent(), session.model, policy_request)
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        try:
            await self._write(response, events.opening())
            async with aclosing(exchange.deltas()) as deltas:
                async for index, text in deltas:
                    await self._write(response, events.delta(text, index))
            await self._write(response, events.closing(await exchange.replies()))
        except ConnectionError:  # the agent closed the connection
            return response
        except Exception as error:  # boundary: a started response can only report errors as events
            await self._write(response, [{"type": "error", **error_payload(request, to_rejection(error))}])
        if not self.named_events:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, events: Iterable[Json]) -> None:
        if data := b"".join(map(self._frame, events)):
            await response.write(data)

    def _frame(self, event: Json) -> bytes:
        name = f"event: {event['type']}\n".encode() if self.named_events else b""
        return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


CHAT = ApiFormat(read_chat, chat_response, ChatStream)
COMPLETION = ApiFormat(read_completion, completion_response, CompletionStream)
RESPONSES = ApiFormat(read_response_request, response_object, ResponseStream, named_events=True)
MESSAGES = ApiFormat(read_messages, messages_response, MessagesStream, named_events=True)


async def list_models(request: web.Request) -> web.Response:
    return json_response(models(request[SESSION].model))


_ROUTES = [
    web.post("/sessions/{session}/v1/chat/completions", CHAT.handle),
    web.post("/sessions/{session}/v1/completions", COMPLETION.handle),
    web.post("/sessions/{session}/v1/responses", RESPONSES.handle),
    web.post("/sessions/{session}/v1/messages", MESSAGES.handle),
    web.get("/sessions/{session}/v1/models", list_models),
]


def make_app(gateway: Gateway) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY, middlewares=[error_middleware, auth_middleware(gateway)])
    app.add_routes(_ROUTES)
    return app
