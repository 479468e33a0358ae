"""One in-flight request of an agent.

    Exchange: request_sent ─▶ deltas: the certain text of each sample, while it grows ─▶ replies

Invariant: the final answer is authoritative. Streamed text is a prefix of its content; the stream ends with the rest.
If the final answer parses differently (reasoning without an opening tag, for example), the rest is sent as plain text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from outpace.errors import ComponentFailed
from outpace.rollouts.gateway.protocol import (
    GatewayReply,
    PolicyRequest,
    full_text,
    make_reply,
    stable_prefix,
    stable_text_prefix,
    starts_in_reasoning,
)
from outpace.rollouts.gateway.server import EpisodeEnded, GatewaySession, cancel_and_wait
from outpace.types import Answer, Ints

T = TypeVar("T")

log = logging.getLogger(__name__)

DECODE_FRACTION = 64
"""Decode the text again when it has grown by 1/64 of its length: frequent enough, and not quadratic in time."""
PROMPT_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opening reasoning tag."""


@dataclass
class _SentSample:
    """One in-flight sample of the request. `streamed` is the text sent to the agent so far."""

    request_id: str
    prompt: list[int]
    streamed: str = ""


class Exchange:
    """One in-flight request of an agent. Context manager: leaving it early cancels the request."""

    def __init__(self, session: GatewaySession, request: PolicyRequest) -> None:
        self._session = session
        self._request = request
        self._samples: list[_SentSample] = []
        self._all_sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Exchange:
        self._task = self._session.start(self._send)
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._task)

    async def request_sent(self) -> str:
        """Wait until all samples are sent to the engine, and return the request id of the first. Raises the failure if
        sending fails."""
        either: set[asyncio.Future[Any]] = {self._task, self._all_sent}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._samples[0].request_id if self._all_sent.done() else (await self._answers())[0].request_id

    async def replies(self) -> list[GatewayReply]:
        """Return the answers once all are complete, one for each sample."""
        answers, request, client = await self._answers(), self._request, self._session.client
        self._session.store(request, answers[0])
        streamed = {sample.request_id: sample.streamed for sample in self._samples}
        return [
            continue_streamed(
                make_reply(answer, request, client),
                full_text(answer, request, client),
                streamed.get(answer.request_id, ""),
            )
            for answer in answers
        ]

    def deltas(self) -> AsyncGenerator[tuple[int, str], None]:
        """Yield (sample index, new text) while the answers grow. Only text that can no longer change is yielded.

        The caller must close the generator."""
        return _merged([self._deltas(sample) for sample in self._samples])

    async def _answers(self) -> list[Answer]:
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise EpisodeEnded
        try:
            return self._task.result()
        except ComponentFailed as error:  # other failures are left to the agent
            self._session.failure = error
            raise

    async def _deltas(self, sample: _SentSample) -> AsyncIterator[str]:
        tokens: list[int] = []
        read = 0
        while new := await self._new_tokens(sample, len(tokens)):
            tokens += new
            if len(tokens) - read < read // DECODE_FRACTION:
                continue
            read = len(tokens)
            try:
                text = self._certain_text(sample, tokens)
            except Exception:  # boundary to the chat format, which may fail to parse an unfinished answer
                log.debug("cannot parse the unfinished answer; streaming resumes at its end", exc_info=True)
                return
            if text is None:
                return
            if len(text) > len(sample.streamed) and text.startswith(sample.streamed):
                delta, sample.streamed = text[len(sample.streamed) :], text
                yield delta

    def _certain_text(self, sample: _SentSample, tokens: list[int]) -> str | None:
        """Return the prefix of the content that these tokens determine; None to stop streaming until the end."""
        chat_format, request = self._session.client.chat_format, self._request
        stops = request.stops(self._session.client)
        if request.prompt is not None:
            return stable_text_prefix(chat_format.decode(tokens), stops)
        if request.must_call or starts_in_reasoning(chat_format.decode(sample.prompt[-PROMPT_TAIL:])):
            return None
        read = chat_format.parse(tokens, sample.prompt, request.tools)
        return None if read.calls or read.reasoning else stable_prefix(read.content, stops)

    async def _new_tokens(self, sample: _SentSample, known: int) -> list[int]:
        """Return new tokens of a sample; empty once it has ended, or on failure, which `replies` reports."""
        stream_tokens = asyncio.create_task(self._read_stream(sample.request_id, known))
        either: set[asyncio.Future[Any]] = {stream_tokens, self._task}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failure = await cancel_and_wait(stream_tokens)
        return [] if self._task.done() or stream_tokens.cancelled() or failure else stream_tokens.result()

    async def _read_stream(self, request_id: str, known: int) -> list[int]:
        tokens: list[int] = (await self._session.client.engine.stream_tokens(request_id, known)).tolist()
        return tokens

    def _send(self) -> Coroutine[Any, Any, list[Answer]]:
        request, session = self._request, self._session
        options: dict[str, Any] = {"role": session.role, **request.overrides(session.client.max_tokens)}
        if request.stream:
            options["listener"] = self._on_sent
        if request.prompt is not None:
            return session.client.complete_samples(request.n, request.prompt, **options)
        return session.client.chat_samples(
            request.n,
            request.conversation(),
            tools=request.tools,
            must_call=request.must_call,
            chat_template_kwargs=request.template_kwargs,
            **options,
        )

    def _on_sent(self, request_id: str, prompt: Ints) -> None:
        self._samples.append(_SentSample(request_id, prompt.tolist()))
        if len(self._samples) == self._request.n:
            self._all_sent.set_result(None)


def continue_streamed(reply: GatewayReply, text: str, streamed: str) -> GatewayReply:
    """Return the reply with content that starts with the text already streamed; `text` is the full text."""
    if not reply.content.startswith(streamed):
        reply = replace(reply, content=text if text.startswith(streamed) else streamed, reasoning="")
    return replace(reply, unsent=reply.content.removeprefix(streamed))


async def _merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several streams as they arrive, each with the index of its stream."""
    waiting: dict[asyncio.Task[T], int] = {}

    def read(index: int) -> None:
        waiting[asyncio.ensure_future(anext(streams[index]))] = index

    for index in range(len(streams)):
        read(index)
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    item = task.result()
                    read(index)
                    yield index, item
    finally:
        for task in waiting:
            await cancel_and_wait(task)
