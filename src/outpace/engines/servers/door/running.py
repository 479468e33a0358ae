"""MERGED"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from outpace.engines.continuing import Continued
from outpace.engines.servers.spec import Ask, Piece, Span
from outpace.errors import RequestFailed, ServerFailed, ServerFaulty
from outpace.types import Generation, Ints, Sampling, StopReason, Version
from outpace.wording import plural

_NO_TOKENS = np.zeros(0, dtype=np.int32)


class Part:
    """One HTTP request for (the rest of) a generation.

    `version` is the oldest version its tokens can have: the one loaded when it was sent. `spans`: whether to trust the
    weight versions that the server reports."""

    def __init__(self, ask: Ask, version: Version, spans: bool) -> None:
        self.ask = ask
        self.version = version
        self._trust_spans = spans
        self.tokens: list[int] = []
        self.stop: StopReason | None = None
        self.cut: StopReason | ServerFailed | None = None  # why we ended it
        self.heard = asyncio.get_running_loop().time()
        self.ended = asyncio.Event()
        self._logprobs: list[float] = []
        self._spans: list[Span] | None = None
        self._reader: asyncio.Task[None] | None = None

    def take(self, piece: Piece) -> None:
        if len(piece.tokens) != len(piece.logprobs):
            raise ServerFaulty(f"{plural(len(piece.tokens), 'token')} came with {len(piece.logprobs)} logprobs")
        if len(self.tokens) + len(piece.tokens) > self.ask.sampling.max_tokens:
            raise ServerFaulty(f"the server sent more than max_tokens = {self.ask.sampling.max_tokens} tokens")
        self.tokens += piece.tokens
        self._logprobs += piece.logprobs
        self.stop = piece.stop
        self._spans = piece.spans if self._trust_spans else None
        self.heard = asyncio.get_running_loop().time()

    def read_by(self, task: asyncio.Task[None]) -> None:
        self._reader = task

    def end(self, why: StopReason | ServerFailed) -> None:
        """Stop reading. Tokens received so far are kept."""
        if self.cut is None and self.stop is None:
            self.cut = why
            if self._reader is not None:
                self._reader.cancel()

    def void(self) -> None:
        """Stop reading and discard all tokens, even of a complete output: foreign weights sampled them."""
        self.stop = None
        self.end("lost")
        self.tokens, self._logprobs, self._spans = [], [], None

    def foreign(self, newest: Version) -> bool:
        """Whether the server reports a weight version outside the range that we loaded."""
        return any(not self.version <= version <= newest for version, _, _ in self._spans or [])

    def generation(self) -> Generation:
        versions = np.full(len(self.tokens), self.version, dtype=np.int32)
        if self._spans is not None and _covers(self._spans, len(self.tokens)):
            for version, start, end in self._spans:
                versions[start:end] = version
        return Generation(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=versions,
            stop=self.stop or "lost",
        )


def _covers(spans: Iterable[Span], count: int) -> bool:
    reached = 0
    for _, start, end in spans:
        if start != reached or end < start:
            return False
        reached = end
    return reached == count


class Running:
    """One `generate` call and the output of all its segments."""

    def __init__(self, request_id: str, token_ids: Ints, sampling: Sampling) -> None:
        self.id = request_id
        self.answer = Continued(token_ids, sampling)
        self.stop_strings = bool(sampling.stop_strings)
        self.aborted = False
        self.part: Part | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def join(self, segment: Part) -> None:
        """Append the tokens of a finished segment to the output."""
        self.part = None
        self.answer.add(segment.generation())

    def tokens_after(self, after: int) -> Ints:
        pending = self.part.tokens if self.part is not None else []
        have = self.answer.generation("lost").tokens
        return np.concatenate([have, np.array(pending, dtype=np.int32)])[after:]

    def count(self) -> int:
        return len(self.answer) + (len(self.part.tokens) if self.part is not None else 0)

    async def wait_for_tokens(self) -> None:
        """Wait for more tokens, or for the end of the request."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class UnderWay:
    """All active requests by request id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Running] = {}

    def begin(self, request_id: str, token_ids: Ints, sampling: Sampling) -> Running:
        if request_id in self._by_id:
            raise RequestFailed(f"request {request_id} is already running")
        request = self._by_id[request_id] = Running(request_id, token_ids, sampling)
        return request

    def end(self, request: Running) -> None:
        del self._by_id[request.id]
        request.tell()

    def of(self, request_ids: Iterable[str]) -> list[Running]:
        return [self._by_id[request_id] for request_id in request_ids if request_id in self._by_id]

    @property
    def parts(self) -> list[Part]:
        return [request.part for request in self._by_id.values() if request.part is not None]

    async def peek(self, request_id: str, after: int) -> Ints:
        """Tokens from position `after` on, as soon as there are any. Empty once the request has ended."""
        request = self._by_id.get(request_id)
        while request is not None and request.count() <= after:
            if self._by_id.get(request_id) is not request:
                return _NO_TOKENS
            await request.wait_for_tokens()
        if request is None or self._by_id.get(request_id) is not request:
            return _NO_TOKENS
        return request.tokens_after(after)
