"""Requests under way: what each has so far, how it is looked at, and how it is ended from outside.

    Running   one request of a caller, over all the parts in which its answer is made
    Part      one sending of it to the server: what came back, and under which weights

Invariant: what was sampled is kept from the moment it arrives. An abort, a silence or a death ends a part; its tokens
stay. Only what other weights than ours have sampled is thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from outpace.engines.continuing import Continued
from outpace.engines.servers.spec import Ask, Piece, Span
from outpace.errors import RequestFailed, ServerFailed, ServerFaulty
from outpace.types import Generation, Ints, Sampling, StopReason, Version
from outpace.wording import plural

_NONE = np.zeros(0, dtype=np.int32)


class Part:
    """`version` is the oldest that its tokens can have: what the server had when it was sent. `spans`: whether the
    server's own account of versions is to be believed."""

    def __init__(self, ask: Ask, version: Version, spans: bool) -> None:
        self.ask = ask
        self.version = version
        self._believed = spans
        self.tokens: list[int] = []
        self.stop: StopReason | None = None
        self.cut: StopReason | ServerFailed | None = None  # why it was ended from outside
        self.heard = asyncio.get_running_loop().time()
        self.ended = asyncio.Event()
        self._logprobs: list[float] = []
        self._spans: list[Span] | None = None
        self._reading: asyncio.Task[None] | None = None

    def take(self, piece: Piece) -> None:
        if len(piece.tokens) != len(piece.logprobs):
            raise ServerFaulty(f"{plural(len(piece.tokens), 'token')} came with {len(piece.logprobs)} logprobs")
        if len(self.tokens) + len(piece.tokens) > self.ask.sampling.max_tokens:
            raise ServerFaulty(f"more than the {self.ask.sampling.max_tokens} tokens came that were asked for")
        self.tokens += piece.tokens
        self._logprobs += piece.logprobs
        self.stop = piece.stop
        self._spans = piece.spans if self._believed else None
        self.heard = asyncio.get_running_loop().time()

    def read_by(self, task: asyncio.Task[None]) -> None:
        self._reading = task

    def end(self, why: StopReason | ServerFailed) -> None:
        """Read no further. What it has, it keeps."""
        if self.cut is None and self.stop is None:
            self.cut = why
            if self._reading is not None:
                self._reading.cancel()

    def void(self) -> None:
        """Read no further, and keep nothing, not even of an answer that is whole: other weights than ours made it."""
        self.stop = None
        self.end("lost")
        self.tokens, self._logprobs, self._spans = [], [], None

    def foreign(self, newest: Version) -> bool:
        """Whether the server says that other weights have sampled than it was told to hold."""
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
    def __init__(self, request_id: str, token_ids: Ints, sampling: Sampling) -> None:
        self.id = request_id
        self.answer = Continued(token_ids, sampling)
        self.stop_strings = bool(sampling.stop_strings)
        self.aborted = False
        self.part: Part | None = None
        self._looks: list[asyncio.Future[None]] = []

    def join(self, part: Part) -> None:
        """What this part has brought is of the answer."""
        self.part = None
        self.answer.add(part.generation())

    def tokens_after(self, after: int) -> Ints:
        under_way = self.part.tokens if self.part is not None else []
        have = self.answer.generation("lost").tokens
        return np.concatenate([have, np.array(under_way, dtype=np.int32)])[after:]

    def count(self) -> int:
        return len(self.answer) + (len(self.part.tokens) if self.part is not None else 0)

    async def moved(self) -> None:
        """Waits until there is more to see, or no more will come."""
        look: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._looks.append(look)
        await look

    def tell(self) -> None:
        looks, self._looks = self._looks, []
        for look in looks:
            if not look.done():
                look.set_result(None)


class UnderWay:
    """All of them, by the caller's id."""

    def __init__(self) -> None:
        self._all: dict[str, Running] = {}

    def begin(self, request_id: str, token_ids: Ints, sampling: Sampling) -> Running:
        if request_id in self._all:
            raise RequestFailed(f"a request {request_id} is already under way")
        running = self._all[request_id] = Running(request_id, token_ids, sampling)
        return running

    def end(self, running: Running) -> None:
        del self._all[running.id]
        running.tell()

    def of(self, request_ids: Iterable[str]) -> list[Running]:
        return [self._all[request_id] for request_id in request_ids if request_id in self._all]

    @property
    def parts(self) -> list[Part]:
        return [running.part for running in self._all.values() if running.part is not None]

    async def peek(self, request_id: str, after: int) -> Ints:
        running = self._all.get(request_id)
        while running is not None and running.count() <= after:
            if self._all.get(request_id) is not running:
                return _NONE
            await running.moved()
        return _NONE if running is None or self._all.get(request_id) is not running else running.tokens_after(after)
