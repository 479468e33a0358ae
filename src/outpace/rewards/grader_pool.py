"""Pool of grader processes of one rollout worker: user reward functions run in processes that can be killed.

    GraderPool.call ─▶ idle or new GraderProcess ─▶ load, once per function ─▶ call ─▶ scores

Invariants
- At most `workers` calls run at once; further calls wait in FIFO order. A call's timeout excludes this wait and the
  time in which a process starts and imports the function.
- A call that hangs, crashes or is cancelled ends only its own process. If a process is killed from outside (the OOM
  killer, for example), the call is retried once in another process.
- Replies of a grader process are validated again on this side.
- After `close` no process, task or file descriptor is left.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from outpace.errors import RewardFailed
from outpace.monitoring.metric_table import forward_log
from outpace.rewards.functions import Scores, pack_arguments
from outpace.rewards.grader_process import Grader, ScoresRejected
from outpace.runtime.async_tools import TimeLimitError
from outpace.runtime.by_value import UserCodeSource
from outpace.runtime.user_code import (
    LOAD_LIMIT_S,
    ProcessPool,
    UserCodeDied,
    UserCodeKilled,
    UserCodeProcess,
)


class GraderProcess:
    """Handle of one grader process."""

    def __init__(self, memory_mb: int | None = None) -> None:
        self._process = UserCodeProcess("outpace.rewards.grader_process", Grader, "a reward function", memory_mb)
        self._loaded: set[str] = set()

    @property
    def usable(self) -> bool:
        return self._process.usable

    async def load(self, name: str, source: UserCodeSource) -> None:
        """Load the function in the process unless it is loaded. Raises `UserCodeError` or `UserCodeDied`."""
        if name in self._loaded:
            return
        try:
            await self._process.call(lambda grader: grader.load(name, source.reference, source.code), LOAD_LIMIT_S)
        except TimeLimitError:
            raise UserCodeDied("did not start and import the function in time") from None
        self._loaded.add(name)

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """Call the function. Raises `RewardFailed`, `UserCodeError`, `UserCodeDied` or `TimeLimitError`."""
        body, by_value = pack_arguments(arguments)
        reply = await self._process.call(lambda grader: grader.score(name, count, body, by_value, first), timeout_s)
        if isinstance(reply, ScoresRejected):
            raise RewardFailed(reply.message)
        if not _are_scores(reply.scores, count) or not forward_log(reply.logged, reply.extra):
            raise self._process.broken()
        return reply.scores

    async def end(self, patience_s: float = 0.0) -> None:
        await self._process.end(patience_s)


def _are_scores(values: list[float | None], count: int) -> bool:
    return len(values) == count and all(value is None or math.isfinite(value) for value in values)


class GraderPool:
    def __init__(self, functions: Mapping[str, UserCodeSource], workers: int = 2, memory_mb: int | None = None) -> None:
        """`memory_mb` limits the address space of each process."""
        self._functions = dict(functions)
        self._slots = asyncio.Semaphore(workers)
        self._graders = ProcessPool(partial(GraderProcess, memory_mb))

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """Score `count` completions; `first` is the index of the first one, for messages.

        Raises `RewardFailed` for invalid scores, `UserCodeError` for exceptions of the function, `TimeLimitError`, and
        `UserCodeDied` when the process ended."""
        async with self._slots:
            try:
                return await self._call_once(name, arguments, count, timeout_s, first)
            except UserCodeKilled:  # killed from outside: retry once
                if self._graders.closed:
                    raise
                return await self._call_once(name, arguments, count, timeout_s, first)

    async def _call_once(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int
    ) -> Scores:
        grader = self._graders.take()
        try:
            await grader.load(name, self._functions[name])
            return await grader.call(name, arguments, count, timeout_s, first)
        finally:
            self._graders.put_back(grader)

    async def close(self) -> None:
        await self._graders.close()
