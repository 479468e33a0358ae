"""A fake engine with scripted failures. Its tokens are a pure function of the prompt, so any answer can be checked."""

from __future__ import annotations

import asyncio

import numpy as np

from outpace.errors import ComponentLost
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, StopReason, Version

VOCABULARY = 1000


def successor(token: int) -> int:
    """Return the token that every fake engine samples after `token`."""
    return (token * 7 + 3) % VOCABULARY


def answer_to(prompt: Ints, length: int) -> list[int]:
    tokens = [int(prompt[-1])]
    for _ in range(length):
        tokens.append(successor(tokens[-1]))
    return tokens[1:]


def logprobs_of(tokens: list[int]) -> list[float]:
    return [float(np.float32(-token / VOCABULARY)) for token in tokens]


class FakeEngine:
    """`outpace.protocols.Engine`: requests wait until the test ends them, unless `answers_immediately`."""

    def __init__(self, version: Version = 0) -> None:
        self.version = version
        self.answers_immediately = True
        self.samplings: list[Sampling] = []
        self.received: list[str] = []
        self.aborted: list[str] = []
        self.faults: list[Exception | tuple[int, StopReason]] = []  # one per request, used instead of an answer
        self._ends: dict[str, asyncio.Future[tuple[int, StopReason]]] = {}
        self._written: dict[str, list[int]] = {}
        self._changed = asyncio.Condition()

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        assert request_id not in self._ends, "this request is already running"
        self.received.append(request_id)
        self.samplings.append(sampling)
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        self._written[request_id] = []
        await self._notify()
        try:
            length, stop = await self._end_of(end, sampling)
        finally:
            del self._ends[request_id], self._written[request_id]
            await self._notify()
        tokens = answer_to(token_ids, length)
        return Generation(
            np.array(tokens, dtype=np.int32),
            np.array(logprobs_of(tokens), dtype=np.float32),
            np.full(length, self.version, dtype=np.int32),
            stop,
        )

    async def _end_of(self, end: asyncio.Future[tuple[int, StopReason]], sampling: Sampling) -> tuple[int, StopReason]:
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault
        return (sampling.max_tokens, "length") if self.answers_immediately else await end

    def end(self, request_id: str, length: int, stop: StopReason) -> None:
        self._ends[request_id].set_result((length, stop))

    def die(self, name: str = "engine") -> None:
        """Fail every running request with `ComponentLost`."""
        for end in self._ends.values():
            end.set_exception(ComponentLost(name, "closed its connection"))

    async def write(self, request_id: str, tokens: list[int]) -> None:
        self._written[request_id] += tokens
        await self._notify()

    async def wait_for(self, *request_ids: str) -> None:
        """Return once these requests have arrived."""
        async with self._changed:
            await self._changed.wait_for(lambda: set(request_ids) <= self._ends.keys())

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self._ends:
                self.end(request_id, 0, "aborted")

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._written.get(request_id, [0] * after + [0])) > after)
        return np.array(self._written.get(request_id, [])[after:], dtype=np.int32)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError

    async def release_pinned(self) -> None:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        raise NotImplementedError
