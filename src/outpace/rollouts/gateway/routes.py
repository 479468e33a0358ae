"""MERGED"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from outpace.rollouts.gateway.anthropic_form import MessagesStream, messages_response, read_messages
from outpace.rollouts.gateway.app import (
    MAX_BODY,
    SESSION,
    Hosts,
    as_json,
    as_refused,
    error_in_form,
    explained,
    guarded,
    read_body,
)
from outpace.rollouts.gateway.exchange import Exchange
from outpace.rollouts.gateway.openai_form import read_chat, read_completion
from outpace.rollouts.gateway.openai_replies import (
    ChatStream,
    CompletionStream,
    chat_response,
    completion_response,
    models,
)
from outpace.rollouts.gateway.sessions import Sessions
from outpace.rollouts.gateway.sse import Events, EventWriter
from outpace.rollouts.gateway.wanted import Reply, Wanted, reply_of, written


@dataclass(frozen=True)
class ApiFormat:
    """One API: how requests are parsed, and how an answer is returned, whole or as a stream of events."""

    read: Callable[[dict[str, Any]], Wanted]
    response: Callable[[Reply, str], dict[str, Any]]
    stream: Callable[[str, str, Wanted], Events]
    named_events: bool = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        session = request[SESSION]
        policy_request = self.read(await read_body(request))
        async with Exchange(session, policy_request) as exchange:
            if policy_request.stream:
                return await self._stream(request, exchange, policy_request)
            reply = reply_of(await exchange.answer(), policy_request, session.client)
            return as_json(self.response(reply, session.model))

    async def _stream(self, request: web.Request, exchange: Exchange, policy_request: Wanted) -> web.StreamResponse:
        """Stream the answer. Failures before the request is sent are plain responses; later ones are events."""
        session = request[SESSION]
        events = self.stream(await exchange.request_sent(), session.model, policy_request)
        writer = EventWriter(self.named_events)
        await writer.begin(request)
        try:
            await writer.write(events.opening())
            async for text in exchange.deltas():
                await writer.write(events.delta(text))
            answer = await exchange.answer()
            text = written(answer, policy_request, session.client)
            reply = exchange.continue_streamed(reply_of(answer, policy_request, session.client), text)
            await writer.write(events.closing(reply, reply.content.removeprefix(exchange.streamed)))
        except ConnectionError:  # the agent closed the connection
            return writer.response
        except Exception as error:  # boundary: a started response can only report errors as events
            await writer.write([error_in_form(request, as_refused(error))])
        await writer.end()
        return writer.response


CHAT = ApiFormat(read_chat, chat_response, ChatStream)
COMPLETION = ApiFormat(read_completion, completion_response, CompletionStream)
MESSAGES = ApiFormat(read_messages, messages_response, MessagesStream, named_events=True)


async def list_models(request: web.Request) -> web.Response:
    return as_json(models(request[SESSION].model))


_ROUTES = [
    web.post("/sessions/{session}/v1/chat/completions", CHAT.handle),
    web.post("/sessions/{session}/v1/completions", COMPLETION.handle),
    web.post("/sessions/{session}/v1/messages", MESSAGES.handle),
    web.get("/sessions/{session}/v1/models", list_models),
]


def make_app(sessions: Sessions, hosts: Hosts) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY, middlewares=[explained, guarded(sessions, hosts)])
    app.add_routes(_ROUTES)
    return app
