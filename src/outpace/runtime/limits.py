"""Time limits of calls of user code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """The call took too long. Ours, unlike a TimeoutError that the function itself may raise."""


def is_ours(error: BaseException) -> bool:
    """Whether what came out of a call of user code is the end of our own task: somebody has given up on it. All else,
    an exit or a cancellation that the code raised by itself included, is the code's."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """What `work` gives. It is cancelled at the limit, with `TimeLimitError`; a thread it waits for is abandoned."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise TimeLimitError from None
        raise
