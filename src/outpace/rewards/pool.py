"""A few grader processes of one rollout worker.

Invariants
- At most `workers` calls run at once; further ones wait in the order in which they came, and their time does not count
  yet. Nor does the time in which a process starts and imports a function.
- A call that hangs, crashes or is cancelled costs its own process and no other. One whose process is killed by somebody
  else is made once more in another.
- After `close` no process is left, nor a task or a descriptor.
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
        self._places = asyncio.Semaphore(workers)
        self._graders = Household(partial(Grader, memory_mb))

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """Scores of `count` completions, counted from `first` in messages. Raises `RewardFailed` for unusable values,
        `CallRaised` for what the function raised, `TimeLimitError` and `ServantDied`."""
        async with self._places:
            try:
                return await self._called(name, arguments, count, timeout_s, first)
            except ServantKilled:  # once more: the function need not have done anything wrong
                if self._graders.closed:
                    raise
                return await self._called(name, arguments, count, timeout_s, first)

    async def _called(
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
