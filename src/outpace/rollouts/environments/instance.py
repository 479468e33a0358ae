"""MERGED"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.rollouts.tools.functions import Tool, tools_of
from outpace.runtime.signature import accepted
from outpace.wording import with_article


class Unusable(Exception):
    """A method returned an unusable value; the message names both."""


@dataclass(frozen=True)
class Act:
    """A call `method(**arguments)` to be made. `convert` checks and converts its result, awaited if needed."""

    method: Callable[..., Any]
    arguments: dict[str, Any]
    convert: Callable[[Any], Any]


class Instance:
    """One environment object: prepares the calls of its methods."""

    def __init__(self, made: Any, setting: str) -> None:
        """Raises `BadInput` if `made` is not an environment; `setting` is the setting that named it."""
        if not callable(getattr(made, "reset", None)):
            raise BadInput(f"{setting}: {type(made).__name__} has no method reset(**columns)")
        self._made = made
        self.tools = _tools(type(made), setting)
        self.judges = hasattr(made, "get_reward")

    def reset(self, columns: dict[str, Any]) -> Act:
        """Pass the columns that `reset` names, or all if it takes `**columns`."""
        names = accepted(self._made.reset, columns)
        return Act(self._made.reset, {name: columns[name] for name in columns if name in names}, _text)

    def call(self, name: str, arguments: dict[str, Any]) -> Act:
        """Raises `ToolError` for invalid arguments."""
        return Act(getattr(self._made, name), self.tools[name].checked(arguments), as_it_is)

    def reward(self) -> Act:
        return Act(self._made.get_reward, {}, _number)


def as_it_is(returned: Any) -> Any:
    return returned


_tools_by_class: dict[type, dict[str, Tool]] = {}


def _tools(environment: type, setting: str) -> dict[str, Tool]:
    """Return the tools of a class, cached: building their schemas is too slow to repeat per episode."""
    if environment not in _tools_by_class:
        _tools_by_class[environment] = tools_of(environment, setting)
    return _tools_by_class[environment]


def _text(returned: Any) -> str | None:
    if returned is not None and not isinstance(returned, str):
        raise Unusable(f"reset returned {with_article(type(returned).__name__)}, not text or None")
    return returned


def _number(returned: Any) -> float:
    try:
        number = float(returned) if isinstance(returned, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Unusable(f"get_reward returned {one_line(repr(returned), 60)}, not a finite number")
    return number
