"""Calls of synchronous user code, away from the event loop.

A thread cannot be killed, so a call that hangs must be something one can walk away from: it runs in a daemon thread
that holds neither a place in the loop's own pool, which the journal needs, nor the end of the process. Threads that
come back are used again, as far as there is use for them.
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
"""The result and the exception as values: a future refuses StopIteration, and SystemExit in one would end the loop."""

MOST_IDLE = 32
"""Threads that wait for further calls; those beyond end with their call, so that a rush leaves no crowd behind."""

_idle: list[_Thread] = []


class _Thread:
    """A daemon that does one thing at a time and is idle in between."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._live, name="outpace-user-code", daemon=True).start()

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _live(self) -> None:
        while True:
            self._jobs.get()()
            if len(_idle) >= MOST_IDLE:
                return
            _idle.append(self)


def steady_executor(threads: int = 4) -> ThreadPoolExecutor:
    """A pool for `asyncio.to_thread` whose threads are all there from the start. Left to itself a pool adds a thread
    whenever luck has them all busy, and a number that grows for hours looks like a leak."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="outpace-io")
    together = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(together.wait)
    together.wait()
    return pool


def warm_up(threads: int) -> None:
    """Have so many threads for user code idle from the start, for the same reason."""
    _idle.extend(_Thread() for _ in range(threads - len(_idle)))


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `function` returns: on the loop if it is asynchronous, in a thread otherwise."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    returned, error = await in_thread(partial(function, *args, **kwargs))
    if error is not None:
        raise error
    return await returned if inspect.isawaitable(returned) else returned


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Answer]:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()
    context = contextvars.copy_context()

    def settle(returned: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((returned, error))

    def job() -> None:
        returned, error = None, None
        try:
            returned = context.run(work)
        except BaseException as raised:  # the boundary of the thread: raised again by whoever waits
            error = raised
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, returned, error)

    _next_thread().do(job)
    return answer


def _next_thread() -> _Thread:
    try:
        return _idle.pop()
    except IndexError:
        return _Thread()
