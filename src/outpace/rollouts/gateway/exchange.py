"""MERGED"""

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

DECODE_FRACTION = 64
"""Decode the text again when it has grown by 1/64 of its length: frequent enough, and not quadratic in time."""
PROMPT_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opening reasoning tag."""


class Exchange:
    """One in-flight request of an agent. Context manager: leaving it early cancels the request."""

    def __init__(self, session: Session, request: Wanted) -> None:
        self._session = session
        self._request = request
        self._sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._prompt: list[int] = []
        self.streamed = ""

    async def __aenter__(self) -> Exchange:
        self._task = self._session.start(self._send)
        return self

    async def __aexit__(self, *_: object) -> None:
        await ended(self._task)

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
        except PartFailed as error:  # other failures are left to the agent
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

    def continue_streamed(self, reply: Reply, text: str) -> Reply:
        """Return the reply with content that starts with the text already streamed; `text` is the full text."""
        if reply.content.startswith(self.streamed):
            return reply
        return replace(reply, content=text if text.startswith(self.streamed) else self.streamed, reasoning="")

    def _certain_text(self, tokens: list[int]) -> str | None:
        """Return the prefix of the content that these tokens determine; None to stop streaming until the end."""
        dialect, request = self._session.client.dialect, self._request
        stops = request.stops(self._session.client)
        if request.prompt is not None:
            return plainly_shown(dialect.decode(tokens), stops)
        read = dialect.parse(tokens, self._prompt, request.tools)
        if read.calls or read.reasoning or opens_reasoning(dialect.decode(self._prompt[-PROMPT_TAIL:])):
            return None
        return shown(read.content, stops)

    async def _new_tokens(self, known: int) -> list[int]:
        """Return new tokens of the request; empty once it has ended, or on failure, which `answer` reports."""
        if not self._sent.done():
            return []
        peek = asyncio.create_task(self._peek(known))
        either: set[asyncio.Future[Any]] = {peek, self._task}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failure = await ended(peek)
        return [] if self._task.done() or peek.cancelled() or failure else peek.result()

    async def _peek(self, known: int) -> list[int]:
        tokens: list[int] = (await self._session.client.engine.peek(self._sent.result(), known)).tolist()
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
