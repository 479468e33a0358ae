"""Helpers for asyncio and user code: threads, time limits, task groups, fairness on the event loop.

Synchronous user code runs in separate threads (`call_user_function`, `run_in_thread`). A thread cannot be killed, so a
call that hangs must be safe to abandon: it runs in a daemon thread, which neither occupies the loop's executor (the
journal needs it) nor blocks process exit. Idle threads are reused, because `Thread.start` waits until the new thread
runs, which would delay the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import random
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

ThreadResult = tuple[Any, BaseException | None]
"""Result and exception, as values: a future rejects StopIteration, and a SystemExit in it would end the loop."""

MAX_IDLE_THREADS = 32
"""Maximum number of idle threads. Additional threads end after their call, so a burst leaves no threads behind."""

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
            if len(_idle) >= MAX_IDLE_THREADS:
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


def start_idle_threads(threads: int) -> None:
    """Start idle threads for user code ahead of time, so that the thread count does not grow during the run."""
    _idle.extend(_UserCodeThread() for _ in range(threads - len(_idle)))


async def call_user_function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a user function: on the event loop if it is a coroutine function, otherwise in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    returned, error = await run_in_thread(partial(function, *args, **kwargs))
    if error is not None:
        raise error
    return await returned if inspect.isawaitable(returned) else returned


def run_in_thread(work: Callable[[], Any]) -> asyncio.Future[ThreadResult]:
    """Run `work` in a daemon thread with a copy of the current context. Cancelling the future abandons the thread."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[ThreadResult] = loop.create_future()
    context = contextvars.copy_context()

    def complete(returned: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((returned, error))

    def job() -> None:
        nonlocal work
        returned, error = None, None
        try:
            returned = context.run(work)
        except BaseException as raised:  # thread boundary: re-raised by the caller
            error = raised
        del work  # the caller may continue before this frame ends, and expects what `work` holds to be freed
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(complete, returned, error)

    _next_thread().submit(job)
    return outcome


def _next_thread() -> _UserCodeThread:
    try:
        return _idle.pop()
    except IndexError:
        return _UserCodeThread()


T = TypeVar("T")


class TimeLimitError(Exception):
    """The call exceeded its time limit. Distinct from a TimeoutError that the function itself may raise."""


def is_own_cancellation(error: BaseException) -> bool:
    """Return whether an exception from user code means that our own task is being cancelled. Any other exception,
    including an exit or a cancellation raised by the code itself, belongs to the code."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


async def with_time_limit(timeout_s: float, work: Awaitable[T]) -> T:
    """Await `work`. At the limit it is cancelled and `TimeLimitError` raised; a thread it waits for is abandoned."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise TimeLimitError from None
        raise


async def uncancelled(work: asyncio.Future[T]) -> T:
    """Await `work` without cancelling it when this task is cancelled. Costs less than `asyncio.shield`."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Future[T]) -> None:
        if not ended.done():
            ended.set_result(None)
        elif not work.cancelled():
            work.exception()  # marks it as retrieved, so that asyncio does not log it: the waiting task is gone

    work.add_done_callback(wake)
    await ended
    return work.result()


async def gather_or_cancel(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines concurrently and return all results. If one fails, cancel the others, wait until they have ended,
    and raise its exception."""
    if len(work) < 2:
        return [await one for one in work]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for failure in failures:
            if failure is not None:
                raise failure
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class LoopFairness:
    """Limits how many tasks do a piece of work per iteration of one event loop, in FIFO order.

    An event loop runs all ready callbacks in one iteration and checks neither timers nor sockets until they are done.
    If the tools of a thousand episodes returned at the same moment, a thousand prompts would be rendered in one
    iteration and everything else would be delayed."""

    def __init__(self, per_turn: int = 64) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._admitted = 0  # tasks admitted that have not resumed yet
        self._ticking = False

    async def wait_turn(self) -> None:
        """Wait for a slot. Usually there is one immediately."""
        loop = asyncio.get_running_loop()
        if not self._ticking:
            self._ticking = True
            loop.call_soon(self._tick, loop)
        if self._left > 0 and not self._waiting and not self._admitted:
            self._left -= 1
            return
        slot = loop.create_future()
        self._waiting.append(slot)
        try:
            await slot
        finally:
            self._admitted -= slot.done() and not slot.cancelled()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs once per iteration while slots are in use. Tasks admitted here resume in the next iteration."""
        was_idle = self._left == self._per_turn
        self._left = self._per_turn
        while self._waiting and self._left:
            slot = self._waiting.popleft()
            if not slot.done():  # skip cancelled tasks
                slot.set_result(None)
                self._admitted += 1
                self._left -= 1
        self._ticking = bool(self._waiting) or not was_idle
        if self._ticking:
            loop.call_soon(self._tick, loop)


class PerLoop(Generic[T]):
    """One object per event loop, created on first use and dropped with the loop."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = weakref.WeakKeyDictionary()

    def get(self, make: Callable[[], T]) -> T:
        """Return the object of the running loop."""
        loop = asyncio.get_running_loop()
        made = self._made.get(loop)
        if made is None:
            made = self._made[loop] = make()
        return made


def backoff_s(failures: int, first_s: float, longest_s: float, jitter: float = 0.0) -> float:
    """Return the wait after this many failures in a row: `first_s` after the first, doubled with each further one, at
    most `longest_s`. `jitter` varies it by up to this fraction, so that callers that failed together do not retry
    together."""
    pause_s = min(first_s * 2.0 ** min(failures - 1, 60), longest_s)
    return pause_s * random.uniform(1 - jitter, 1 + jitter)
