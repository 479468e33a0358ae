"""MERGED"""

from __future__ import annotations

from typing import Any

from outpace.errors import BadInput
from outpace.runtime import code, values

Arguments = dict[str, list[Any]]


def packed(arguments: Arguments) -> tuple[bytes, bool]:
    """Encode the arguments of a call. Returns the bytes and whether they are by value (`outpace.runtime.by_value`).

    A list that repeats one object is sent as that object once."""
    same = {name: each[0] for name, each in arguments.items() if _is_repeated(each)}
    parts = {"same": same, "each": {name: each for name, each in arguments.items() if name not in same}}
    try:
        return values.packed(parts)
    except BadInput:
        code.pack(arguments)  # raises an error that names the column
        raise


def unpacked(body: bytes, by_value: bool, count: int) -> Arguments:
    """Decode arguments; each becomes a list of `count` values."""
    parts = values.unpacked(body, by_value)
    return {**{name: [value] * count for name, value in parts["same"].items()}, **parts["each"]}


def _is_repeated(each: list[Any]) -> bool:
    return bool(each) and all(value is each[0] for value in each)
