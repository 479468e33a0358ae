"""What a function of the user takes, asked before it is called. Light, since children import it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None: some functions written in C do not tell."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def accepted(function: Callable[..., Any], names: Collection[str]) -> set[str]:
    """Which of the names the function takes as arguments: all of them if it has `**kwargs`, else those it names."""
    parameters = parameters_of(function)
    if parameters is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return set(names)
    return _spelt(parameters) & set(names)


def named(function: Callable[..., Any], names: Collection[str]) -> set[str]:
    """Which of the names the function spells out."""
    return _spelt(parameters_of(function) or []) & set(names) if names else set()


def _spelt(parameters: list[inspect.Parameter]) -> set[str]:
    return {parameter.name for parameter in parameters if parameter.kind in BY_KEYWORD}
