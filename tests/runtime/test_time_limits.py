"""Time limits, distinguished from timeouts of user code."""

from __future__ import annotations

import asyncio

import pytest

from outpace.runtime.async_tools import TimeLimitError, with_time_limit


async def test_a_result_within_the_limit_is_returned() -> None:
    assert await with_time_limit(60.0, asyncio.sleep(0, "done")) == "done"


async def test_a_call_over_the_limit_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeLimitError):
        await with_time_limit(0.01, hang())
    assert cancelled.is_set()


async def test_a_timeout_error_of_user_code_is_passed_through() -> None:
    async def give_up() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await with_time_limit(60.0, give_up())
