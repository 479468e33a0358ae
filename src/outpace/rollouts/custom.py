"""MERGED"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from outpace.errors import BadInput
from outpace.protocols import ModelClient, Rollout
from outpace.runtime import threads
from outpace.types import Task


def rollout(function: Callable[..., Any]) -> Rollout:
    """Turn a function into a rollout: `async def agent(task, client)` or `def agent(task, endpoint)`."""
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind("task", "client")
    except TypeError:
        message = f"rollout.function: {name} must take two arguments: task and client (endpoint if not async)"
        raise BadInput(message) from None
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return function

    @functools.wraps(function)
    async def on_a_thread(task: Task, client: ModelClient) -> Any:
        return await threads.call(function, task, await client.endpoint())

    return on_a_thread
