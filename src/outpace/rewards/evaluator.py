"""Reward functions of a single episode: `@outpace.evaluator` on `def f(task, episode) -> float | None`.

A function in TRL's signature sees texts. An evaluator sees the whole attempt: trajectories, metrics, the rewards that
it has already. It is called once per episode, all of a group side by side, plain or asynchronous, and runs where any
other reward would. On the way to a grader process task and episode are msgpack.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from outpace import wire
from outpace.errors import BadInput
from outpace.types import Episode, Task

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__outpace_evaluator__"


def evaluator(function: F) -> F:
    """Marks a function of a task and an episode; it stays callable as it is."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", repr(function))
        raise BadInput(f"@outpace.evaluator: {name} should take two arguments, a task and an episode") from None
    setattr(function, _MARK, True)
    return function


def is_evaluator(function: Any) -> bool:
    return getattr(function, _MARK, False) is True


def wired(task: Task, episode: Episode) -> dict[str, list[Any]]:
    """The arguments of one call, in the form of a reward function's."""
    try:
        return {"task": [wire.encode(task)], "episode": [wire.encode(episode)]}
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as error:
        raise BadInput(f"task {task.id} or its episode cannot be sent to a process: {error}") from None


def call_wired(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> Any:
    """Call an evaluator with what `wired` made."""
    (task,), (episode,) = arguments["task"], arguments["episode"]
    return function(wire.decode(task, Task), wire.decode(episode, Episode))
