"""Rollouts that users write: `@outpace.rollout`.

An asynchronous function gets the task and the client of its episode. A plain one gets the task and an endpoint, the
OpenAI-compatible URL of its episode, and runs on a thread, where it may block as it likes.
"""

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
    """Make a function a rollout: `async def agent(task, client)` or `def agent(task, endpoint)`."""
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind("task", "client")
    except TypeError:
        raise BadInput(f"rollout.function: {name} should take two arguments: task and client") from None
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return function

    @functools.wraps(function)
    async def on_a_thread(task: Task, client: ModelClient) -> Any:
        return await threads.call(function, task, await client.endpoint())

    return on_a_thread
