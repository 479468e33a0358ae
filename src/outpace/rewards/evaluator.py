"""MERGED"""

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
    """Mark a function `f(task, episode) -> float | None` as a reward function; it stays callable as before."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", repr(function))
        raise BadInput(f"@outpace.evaluator: {name} must take two arguments, a task and an episode") from None
    setattr(function, _MARK, True)
    return function


def is_evaluator(function: Any) -> bool:
    return getattr(function, _MARK, False) is True


def wired(task: Task, episode: Episode) -> dict[str, list[Any]]:
    """Encode the arguments of one evaluator call in the shape of a reward function's arguments."""
    try:
        return {"task": [wire.encode(task)], "episode": [wire.encode(episode)]}
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as error:
        raise BadInput(f"task {task.id} or its episode cannot be sent to a grader process: {error}") from None


def call_wired(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> Any:
    """Call an evaluator with arguments from `encode_evaluator_arguments`."""
    (task,), (episode,) = arguments["task"], arguments["episode"]
    return function(wire.decode(task, Task), wire.decode(episode, Episode))
