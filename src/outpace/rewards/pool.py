"""Pool of grader processes of one rollout worker: user reward functions run in processes that can be killed.

    GraderPool.call ─▶ idle or new GraderProcess ─▶ load, once per function ─▶ call ─▶ scores

Invariants
- At most `workers` calls run at once; further calls wait in FIFO order. A call's timeout excludes this wait and the
  time in which a process starts and imports the function.
- A call that hangs, crashes or is cancelled ends only its own process. If a process is killed from outside (the OOM
  killer, for example), the call is retried once in another process.
- Replies of a grader process are validated again on this side.
- After `close` no process, task or file descriptor is left.

All completions of a group share prompt and columns: a list that repeats one object is sent as that object once, and
becomes a list of one repeated object on the other side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from outpace.rewards.handle import Grader
from outpace.rewards.outcomes import Scores
from outpace.runtime.code import Source
from outpace.runtime.household import Household
from outpace.runtime.servant import ServantKilled


class GraderPool:
    def __init__(self, functions: Mapping[str, Source], workers: int = 2, memory_mb: int | None = None) -> None:
        """`memory_mb` limits the address space of each process."""
        self._functions = dict(functions)
        self._slots = asyncio.Semaphore(workers)
        self._graders = Household(partial(Grader, memory_mb))

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """Score `count` completions; `first` is the index of the first one, for messages.

        Raises `RewardFailed` for invalid scores, `CallRaised` for exceptions of the function, `TimeLimitError`, and
        `ServantDied` when the process ended."""
        async with self._slots:
            try:
                return await self._call_once(name, arguments, count, timeout_s, first)
            except ServantKilled:  # killed from outside: retry once
                if self._graders.closed:
                    raise
                return await self._call_once(name, arguments, count, timeout_s, first)

    async def _call_once(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int
    ) -> Scores:
        grader = self._graders.take()
        try:
            await grader.load(name, self._functions[name])
            return (await grader.call(name, arguments, count, timeout_s, first)).values
        finally:
            self._graders.put_back(grader)

    async def close(self) -> None:
        await self._graders.close()
