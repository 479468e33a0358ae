"""MERGED"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """The call exceeded its time limit. Distinct from a TimeoutError that the function itself may raise."""


def is_ours(error: BaseException) -> bool:
    """Return whether an exception from user code means that our own task is being cancelled. Any other exception,
    including an exit or a cancellation raised by the code itself, belongs to the code."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """Await `work`. At the limit it is cancelled and `TimeLimitError` raised; a thread it waits for is abandoned."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise TimeLimitError from None
        raise
