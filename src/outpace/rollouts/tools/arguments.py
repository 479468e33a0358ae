"""What a model gives a tool: JSON text from outside, read and bounded before it goes anywhere.

A tool may live in another process or behind a connection that all episodes share. So nothing goes there that cannot be
sent: text that no encoding knows, or nesting that exhausts somebody's stack.
"""

from __future__ import annotations

import json
from typing import Any

from outpace.errors import one_line
from outpace.rollouts.tools.functions import ToolError

MAX_DEPTH = 100
"""Objects and lists inside one another; readers of JSON give up somewhat later."""


def read_arguments(tool: str, text: str) -> dict[str, Any]:
    """The arguments of a call by name; raises `ToolError` with what is wrong with them. No text is no arguments."""
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
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
        raise ToolError(f"the arguments of {tool} hold half a character, such as \\ud800 alone") from None
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
