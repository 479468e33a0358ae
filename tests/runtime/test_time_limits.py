"""Time limits: ours are told from those of the user's own code."""

from __future__ import annotations

import asyncio

import pytest

from outpace.runtime.async_tools import TimeLimitError, with_time_limit


async def test_what_comes_back_in_time_is_returned() -> None:
    assert await with_time_limit(60.0, asyncio.sleep(0, "done")) == "done"


async def test_what_does_not_come_back_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeLimitError):
        await with_time_limit(0.01, hang())
    assert cancelled.is_set()


async def test_a_timeout_of_the_users_own_stays_one() -> None:
    async def give_up() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await with_time_limit(60.0, give_up())
