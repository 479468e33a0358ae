"""The arguments of a reward function on their way to a grader process.

All completions of a group have the same prompt and columns: what is the same object many times is sent once, and is
the same object many times on the other side.
"""

from __future__ import annotations

from typing import Any

from outpace.errors import BadInput
from outpace.runtime import code, values

Arguments = dict[str, list[Any]]


def packed(arguments: Arguments) -> tuple[bytes, bool]:
    """The bytes, and whether they are by value; see `outpace.runtime.values`."""
    same = {name: each[0] for name, each in arguments.items() if _are_one(each)}
    parts = {"same": same, "each": {name: each for name, each in arguments.items() if name not in same}}
    try:
        return values.packed(parts)
    except BadInput:
        code.pack(arguments)  # says which column it is
        raise


def unpacked(body: bytes, by_value: bool, count: int) -> Arguments:
    """The arguments again, each a list of `count`."""
    parts = values.unpacked(body, by_value)
    return {**{name: [value] * count for name, value in parts["same"].items()}, **parts["each"]}


def _are_one(each: list[Any]) -> bool:
    return bool(each) and all(value is each[0] for value in each)
