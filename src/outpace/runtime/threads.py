"""Helpers for asyncio and user code: threads, time limits, task groups, fairness on the event loop.

- `call_user_function` and `run_in_thread` run synchronous user code off the event loop. A thread cannot be killed, so a
  call that hangs must be safe to abandon: it runs in a daemon thread that neither takes a slot of the loop's own
  executor, which the journal needs, nor blocks the exit of the process. Idle threads are reused.
- `with_time_limit` cancels work at a limit and raises `TimeLimitError`.
- `gather_or_cancel` runs coroutines concurrently and cancels the rest when one fails.
- `LoopFairness` spreads work over several iterations of the event loop.
- `PerLoop` keeps one object per event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

Answer = tuple[Any, BaseException | None]
"""The result and the exception as values: a future rejects StopIteration, and SystemExit in one would end the loop."""

MOST_IDLE = 32
"""Most idle threads that are kept. Additional threads end after their call, so that a burst does not leave threads."""

_idle: list[_UserCodeThread] = []


class _UserCodeThread:
    """A daemon thread that runs one job at a time."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="outpace-user-code", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
            if len(_idle) >= MOST_IDLE:
                return
            _idle.append(self)


def steady_executor(threads: int = 4) -> ThreadPoolExecutor:
    """Return an executor for `asyncio.to_thread` with all of its threads started. By default an executor adds a thread
    whenever all are busy, and a thread count that grows for hours looks like a leak."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="outpace-io")
    all_started = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(all_started.wait)
    all_started.wait()
    return pool


def warm_up(threads: int) -> None:
    """Start idle threads for user code ahead of time, so that the thread count does not grow during the run."""
    _idle.extend(_UserCodeThread() for _ in range(threads - len(_idle)))


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a user function: on the event loop if it is a coroutine function, otherwise in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    returned, error = await in_thread(partial(function, *args, **kwargs))
    if error is not None:
        raise error
    return await returned if inspect.isawaitable(returned) else returned


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Answer]:
    """Run `work` in a daemon thread with a copy of the current context. Cancelling the future abandons the thread."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Answer] = loop.create_future()
    context = contextvars.copy_context()

    def complete(returned: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((returned, error))

    def job() -> None:
        returned, error = None, None
        try:
            returned = context.run(work)
        except BaseException as raised:  # thread boundary: re-raised by the caller
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(complete, returned, error)

    _next_thread().submit(job)
    return outcome


def _next_thread() -> _UserCodeThread:
    try:
        return _idle.pop()
    except IndexError:
        return _UserCodeThread()
