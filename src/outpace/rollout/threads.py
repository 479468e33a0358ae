"""Calls of synchronous user code, away from the event loop.

A thread cannot be killed. Each call gets a daemon thread of its own, so one that hangs can be walked away from: it
holds neither a thread of the loop's pool, which the journal needs, nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `function` returns: on the loop if it is asynchronous, in a thread of its own otherwise."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    returned, error = await _in_thread(partial(function, *args, **kwargs))
    if error is not None:
        raise error
    return await returned if inspect.isawaitable(returned) else returned


def _in_thread(work: Callable[[], Any]) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """The result and the exception as values: a future refuses StopIteration, and SystemExit would end the loop."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(returned: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((returned, error))

    def run() -> None:
        returned, error = None, None
        try:
            returned = context.run(work)
        except BaseException as raised:  # the boundary of the thread: raised again by whoever waits
            error = raised
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, returned, error)

    threading.Thread(target=run, name="outpace-user-code", daemon=True).start()
    return answer
