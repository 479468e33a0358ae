"""Synchronous user code never runs on the event loop, and a hanging call can be abandoned."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from outpace.runtime import async_tools


async def test_a_plain_function_runs_in_another_thread() -> None:
    assert await async_tools.call_user_function(threading.current_thread) is not threading.current_thread()


async def test_a_coroutine_function_runs_on_the_loop() -> None:
    async def where(extra: int) -> tuple[threading.Thread, int]:
        return threading.current_thread(), extra

    assert await async_tools.call_user_function(where, extra=2) == (threading.current_thread(), 2)


async def test_a_coroutine_returned_by_a_plain_function_is_awaited() -> None:
    assert await async_tools.call_user_function(lambda: asyncio.sleep(0, "slept")) == "slept"


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("over"), SystemExit(3)])
async def test_exceptions_reach_the_caller(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises((type(error), RuntimeError)) as caught:
        await async_tools.call_user_function(fail)
    assert error in (caught.value, caught.value.__cause__)


async def test_context_variables_are_visible_in_the_thread() -> None:
    color = contextvars.ContextVar("color", default="none")
    color.set("red")
    assert await async_tools.call_user_function(color.get) == "red"


async def test_a_hanging_call_can_be_abandoned() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await async_tools.call_user_function(release.wait)
    hanging = [thread for thread in threading.enumerate() if thread.name == "outpace-user-code"]
    assert all(thread.daemon for thread in hanging)
    release.set()


async def test_finished_threads_are_reused() -> None:
    threads = set()
    for _ in range(40):
        threads.add(await async_tools.call_user_function(threading.get_ident))
        await asyncio.sleep(0.005)  # the thread returns to the pool shortly after its result
    assert len(threads) < 20


def test_a_steady_executor_starts_all_threads_at_once_and_adds_none() -> None:
    before = threading.active_count()
    with async_tools.steady_executor(3) as pool:
        assert threading.active_count() == before + 3
        list(pool.map(abs, range(50)))
        assert threading.active_count() == before + 3
