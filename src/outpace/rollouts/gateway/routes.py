"""The routes: read what is wanted, ask, and give the answer back in the form of the protocol."""

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
class Form:
    """One protocol: how its requests are read, and how it gives an answer, whole or in events."""

    read: Callable[[dict[str, Any]], Wanted]
    response: Callable[[Reply, str], dict[str, Any]]
    stream: Callable[[str, str, Wanted], Events]
    named_events: bool = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        session = request[SESSION]
        wanted = self.read(await read_body(request))
        async with Exchange(session, wanted) as exchange:
            if wanted.stream:
                return await self._stream(request, exchange, wanted)
            reply = reply_of(await exchange.answer(), wanted, session.client)
            return as_json(self.response(reply, session.model))

    async def _stream(self, request: web.Request, exchange: Exchange, wanted: Wanted) -> web.StreamResponse:
        """Until the request is on its way a failure is a plain response; after that it is an event."""
        session = request[SESSION]
        events = self.stream(await exchange.begun(), session.model, wanted)
        writer = EventWriter(self.named_events)
        await writer.begin(request)
        try:
            await writer.write(events.opening())
            async for text in exchange.deltas():
                await writer.write(events.delta(text))
            answer = await exchange.answer()
            text = written(answer, wanted, session.client)
            reply = exchange.as_begun(reply_of(answer, wanted, session.client), text)
            await writer.write(events.closing(reply, reply.content.removeprefix(exchange.shown)))
        except ConnectionError:  # the agent has hung up, and is owed nothing
            return writer.response
        except Exception as error:  # the boundary: a response that has begun can only end with an event that says so
            await writer.write([error_in_form(request, as_refused(error))])
        await writer.end()
        return writer.response


CHAT = Form(read_chat, chat_response, ChatStream)
COMPLETION = Form(read_completion, completion_response, CompletionStream)
MESSAGES = Form(read_messages, messages_response, MessagesStream, named_events=True)


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
