"""What a function of the user takes, asked before it is called. Light, since children import it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def accepted(function: Callable[..., Any], names: Collection[str]) -> set[str]:
    """Which of the names the function takes as arguments: all of them if it has `**kwargs`, else those it names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C do not tell
        return set(names)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return set(names)
    return {parameter.name for parameter in parameters if parameter.kind in _BY_KEYWORD} & set(names)
