"""A few grader processes of one rollout worker: started when needed, used again, replaced when one had to be killed.

Invariants
- At most `workers` calls run at once; further ones wait in the order in which they came, and their time does not count
  yet. Nor does the time in which a process starts and imports a function.
- A call that hangs, crashes or is cancelled costs its own process and no other.
- After `close` no process is left, nor a task or a descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from outpace.rewards.handle import END_LIMIT_S, Grader, Source
from outpace.rewards.outcomes import GraderDied, Scores, TimeLimitError


class GraderPool:
    def __init__(self, functions: Mapping[str, Source], workers: int = 2, memory_mb: int | None = None) -> None:
        """`memory_mb` limits the address space of each process."""
        self._functions = dict(functions)
        self._memory_mb = memory_mb
        self._places = asyncio.Semaphore(workers)
        self._idle: list[Grader] = []
        self._busy: set[Grader] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    async def call(self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float) -> Scores:
        """Scores of `count` completions. Raises `RewardFailed` for unusable values, `CallRaised` for what the function
        raised, `TimeLimitError` and `GraderDied`."""
        async with self._places:
            grader = self._take()
            try:
                await self._load(grader, name)
                return (await grader.call(name, arguments, count, timeout_s)).values
            finally:
                self._put_back(grader)

    async def close(self) -> None:
        self._closed = True
        for grader in self._busy:
            self._end(grader)
        for grader in self._idle:
            self._end(grader, END_LIMIT_S)
        self._idle.clear()
        await asyncio.gather(*self._endings)

    async def _load(self, grader: Grader, name: str) -> None:
        try:
            await grader.load(name, self._functions[name])
        except TimeLimitError:
            raise GraderDied("could not start and import the function in time") from None
        except OSError as error:
            raise GraderDied(f"could not be started: {error}") from error

    def _take(self) -> Grader:
        if self._closed:
            raise GraderDied("was closed")
        while self._idle:
            grader = self._idle.pop()
            if grader.usable:
                break
            self._end(grader)  # ended by itself since its last call
        else:
            grader = Grader(self._memory_mb)
        self._busy.add(grader)
        return grader

    def _put_back(self, grader: Grader) -> None:
        self._busy.discard(grader)
        if self._closed:
            return  # whoever closes ends it
        if grader.usable:
            self._idle.append(grader)
        else:
            self._end(grader)

    def _end(self, grader: Grader, patience_s: float = 0.0) -> None:
        """In a task of its own: the next call need not wait, nor whoever was cancelled."""
        ending = asyncio.create_task(grader.end(patience_s))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
