"""Time limits of calls of user code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """The call took too long. Ours, unlike a TimeoutError that the function itself may raise."""


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """What `work` gives. It is cancelled at the limit, with `TimeLimitError`; a thread it waits for is abandoned."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise TimeLimitError from None
        raise
