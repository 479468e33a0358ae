"""One request under way: asked of the episode's client, looked at while it grows, cancelled when nobody wants it.

    begun ─▶ deltas of the text, as far as it is sure ─▶ answer

The answer decides. What was shown of it is a beginning of its content, and whoever streams sends the rest. Where an
answer turns out to be read otherwise (reasoning that nobody saw beginning), it goes on as plain text instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from outpace.errors import PartFailed
from outpace.rollouts.gateway.reveal import opens_reasoning, plainly_shown, shown
from outpace.rollouts.gateway.sessions import EpisodeEnded, Session, ended
from outpace.rollouts.gateway.wanted import Reply, Wanted
from outpace.types import Answer, Ints

log = logging.getLogger(__name__)

OFTEN = 64
"""A text is decoded anew when it has grown by one part in so many: often enough, and never in quadratic time."""
PROMPT_END = 16
"""Tokens at the end of a prompt in which reasoning may have been opened."""


class Exchange:
    """Used as a context: whoever leaves it early gives up on the answer."""

    def __init__(self, session: Session, wanted: Wanted) -> None:
        self._session = session
        self._wanted = wanted
        self._sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._prompt: list[int] = []
        self.shown = ""

    async def __aenter__(self) -> Exchange:
        self._work = self._session.start(self._ask)
        return self

    async def __aexit__(self, *_: object) -> None:
        await ended(self._work)

    async def begun(self) -> str:
        """The id of the request, once it is on its way; raises what kept it from getting there."""
        either: set[asyncio.Future[Any]] = {self._work, self._sent}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._sent.result() if self._sent.done() else (await self.answer()).request_id

    async def answer(self) -> Answer:
        await asyncio.wait({self._work})
        if self._work.cancelled():
            raise EpisodeEnded
        try:
            return self._work.result()
        except PartFailed as error:  # what the agent asked in vain is for the agent to handle
            self._session.serious = error
            raise

    async def deltas(self) -> AsyncIterator[str]:
        """What is sure of the content, piece by piece, while the answer grows."""
        tokens: list[int] = []
        read = 0
        while new := await self._look(len(tokens)):
            tokens += new
            if len(tokens) - read < read // OFTEN:
                continue
            read = len(tokens)
            try:
                text = self._sure(tokens)
            except Exception:  # the boundary to a dialect, which may have no reading for half an answer
                log.debug("an answer cannot be read before its end", exc_info=True)
                return
            if text is None:
                return
            if len(text) > len(self.shown) and text.startswith(self.shown):
                delta, self.shown = text[len(self.shown) :], text
                yield delta

    def as_begun(self, reply: Reply, text: str) -> Reply:
        """The reply so that it begins with what was shown of it; `text` is all that the policy wrote."""
        if reply.content.startswith(self.shown):
            return reply
        return replace(reply, content=text if text.startswith(self.shown) else self.shown, reasoning="")

    def _sure(self, tokens: list[int]) -> str | None:
        """The beginning of the content that these tokens are enough to know; None: no more of it before the end."""
        dialect, wanted = self._session.client.dialect, self._wanted
        stops = wanted.stops(self._session.client)
        if wanted.prompt is not None:
            return plainly_shown(dialect.decode(tokens), stops)
        read = dialect.parse(tokens, self._prompt, wanted.tools)
        if read.calls or read.reasoning or opens_reasoning(dialect.decode(self._prompt[-PROMPT_END:])):
            return None
        return shown(read.content, stops)

    async def _look(self, known: int) -> list[int]:
        """New tokens of the request; none once it has ended. A look that fails is none: the answer will say why."""
        if not self._sent.done():
            return []
        look = asyncio.create_task(self._peek(known))
        either: set[asyncio.Future[Any]] = {look, self._work}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failure = await ended(look)
        return [] if self._work.done() or look.cancelled() or failure else look.result()

    async def _peek(self, known: int) -> list[int]:
        tokens: list[int] = (await self._session.client.engine.peek(self._sent.result(), known)).tolist()
        return tokens

    def _ask(self) -> Coroutine[Any, Any, Answer]:
        wanted, session = self._wanted, self._session
        options: dict[str, Any] = {"role": session.role, **wanted.overrides(session.client.max_tokens)}
        if wanted.stream:
            options["listener"] = self._hear
        if wanted.prompt is not None:
            return session.client.complete(wanted.prompt, **options)
        return session.client.chat(wanted.messages, tools=wanted.tools, **options)

    def _hear(self, request_id: str, prompt: Ints) -> None:
        self._prompt = prompt.tolist()
        if not self._sent.done():
            self._sent.set_result(request_id)
