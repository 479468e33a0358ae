"""MERGED"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function, or None for C functions without a signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def accepted(function: Callable[..., Any], names: Collection[str]) -> set[str]:
    """Return the names that the function accepts as arguments: all of them if it has `**kwargs`."""
    parameters = parameters_of(function)
    if parameters is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return set(names)
    return _keyword_names(parameters) & set(names)


def named(function: Callable[..., Any], names: Collection[str]) -> set[str]:
    """Return the names that are explicit parameters of the function."""
    return _keyword_names(parameters_of(function) or []) & set(names) if names else set()


def _keyword_names(parameters: list[inspect.Parameter]) -> set[str]:
    return {parameter.name for parameter in parameters if parameter.kind in BY_KEYWORD}
