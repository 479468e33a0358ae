"""MERGED"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import hdrs, web

from outpace.errors import BadInput, ContextFull, OutpaceError, RequestFailed, one_line
from outpace.rollouts.gateway.anthropic_form import error_body
from outpace.rollouts.gateway.sessions import EpisodeEnded, Session, Sessions
from outpace.rollouts.gateway.wanted import Refused

log = logging.getLogger(__name__)

MAX_BODY = 4 * 1024 * 1024
SESSION: web.RequestKey[Session] = web.RequestKey("session", Session)
NO_RETRY = {"x-should-retry": "false"}
"""API clients retry by default; none of these errors is worth a retry."""

Hosts = Callable[[], frozenset[str] | None]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    421: "permission_error",
}


@web.middleware
async def explained(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn every failure into an error response in the request's API format."""
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPException as error:
        return refusal(request, Refused(error.reason, status=error.status))
    except Exception as error:  # boundary: the agent always gets a response
        return refusal(request, as_refused(error))
    return response


def as_refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, EpisodeEnded):
        return Refused("the episode has ended", status=410, code="episode_ended")
    if isinstance(error, ContextFull):
        return Refused(one_line(error), code="context_length_exceeded")
    if isinstance(error, RequestFailed | BadInput):
        return Refused(one_line(error))
    if not isinstance(error, OutpaceError):
        log.error("an agent's request failed", exc_info=error)
    return Refused(f"{type(error).__name__}: {one_line(error)}", status=500)


def error_in_form(request: web.Request, refused: Refused) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    if request.path.endswith("/messages"):
        return error_body(kind, str(refused))
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def refusal(request: web.Request, refused: Refused) -> web.Response:
    return as_json(error_in_form(request, refused), refused.status, NO_RETRY)


def as_json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


async def read_body(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise Refused(f"the body is not JSON: {one_line(error)}") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    return body


def guarded(sessions: Sessions, hosts: Hosts) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Any) -> Any:
        allowed = hosts()
        if allowed is not None and request.headers.get(hdrs.HOST, "").lower() not in allowed:
            raise Refused("the Host header does not name this server", status=421)
        session = sessions.find(request.match_info.get("session", ""))
        if session is None:
            raise Refused("unknown endpoint, or its episode has ended", status=404)
        if not session.accepts_token(_bearer_token(request)):
            raise Refused("the API key of this endpoint is missing or wrong", status=401, code="invalid_api_key")
        request[SESSION] = session
        return await handler(request)

    return guard


def _bearer_token(request: web.Request) -> str:
    kind, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
