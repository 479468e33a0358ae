"""MERGED"""

from __future__ import annotations

import json
from typing import Any

from outpace.errors import one_line
from outpace.rollouts.tools.functions import ToolError

MAX_DEPTH = 100
"""Maximum nesting of objects and lists. JSON parsers fail at somewhat deeper nesting."""


def read_arguments(tool: str, text: str) -> dict[str, Any]:
    """Parse the JSON arguments of a call; empty text means no arguments. Raises `ToolError`.

    A tool may run in another process or behind a shared connection, so text that cannot be encoded and nesting that is
    too deep are rejected here."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments of {tool} are not valid JSON: {one_line(error)}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments of {tool} are not a JSON object")
    if _nests_deeper_than(MAX_DEPTH, arguments):
        raise ToolError(f"the arguments of {tool} are nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogate: valid in JSON, but not in UTF-8
        raise ToolError(f"the arguments of {tool} contain a lone surrogate such as \\ud800") from None
    return arguments


def _nests_deeper_than(limit: int, value: Any) -> bool:
    layer = [value]
    for _ in range(limit):
        layer = [inner for outer in layer for inner in _inside(outer)]
        if not layer:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
