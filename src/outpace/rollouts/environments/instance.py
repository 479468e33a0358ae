"""One instance of an environment class: what its methods take, and what becomes of what they return.

Nothing is called here: an `Act` is a method ready to be called, by whoever knows on which thread. So the same code
stands behind environments of this process and those in processes of their own.
"""

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
    """A method returned something that cannot be used; the text says which and what."""


@dataclass(frozen=True)
class Act:
    """`method(**arguments)`, whose result, once it has been awaited if need be, is for `understood`."""

    method: Callable[..., Any]
    arguments: dict[str, Any]
    understood: Callable[[Any], Any]


class Instance:
    def __init__(self, made: Any, setting: str) -> None:
        """Raises `BadInput` if it is no environment; `setting` is where it was named."""
        if not callable(getattr(made, "reset", None)):
            raise BadInput(f"{setting}: {type(made).__name__} has no method reset(**columns)")
        self._made = made
        self.tools = _tools(type(made), setting)
        self.judges = hasattr(made, "get_reward")

    def reset(self, columns: dict[str, Any]) -> Act:
        """With all columns that the method names, or simply all if it takes `**columns`."""
        taken = accepted(self._made.reset, columns)
        return Act(self._made.reset, {name: columns[name] for name in columns if name in taken}, _text)

    def call(self, name: str, arguments: dict[str, Any]) -> Act:
        """Raises `ToolError` for arguments that do not fit."""
        return Act(getattr(self._made, name), self.tools[name].checked(arguments), as_it_is)

    def reward(self) -> Act:
        return Act(self._made.get_reward, {}, _number)


def as_it_is(returned: Any) -> Any:
    return returned


_known: dict[type, dict[str, Tool]] = {}


def _tools(environment: type, setting: str) -> dict[str, Tool]:
    """Made once per class: describing the tools costs more than an episode should pay."""
    if environment not in _known:
        _known[environment] = tools_of(environment, setting)
    return _known[environment]


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
