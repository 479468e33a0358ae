"""The arguments of a reward function on their way to a grader process.

Text, numbers, lists and dicts travel as msgpack. A column of a Python caller may hold anything else: tuples, arrays,
decimals, objects. msgpack would refuse or change those, so such arguments travel by value, as functions do.

All completions of a group have the same prompt and columns: what is the same object many times is sent once, and is
the same object many times on the other side.
"""

from __future__ import annotations

from typing import Any

from outpace import wire
from outpace.errors import BadInput
from outpace.runtime import code

Arguments = dict[str, list[Any]]

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


def packed(arguments: Arguments) -> tuple[bytes, bool]:
    """The bytes, and whether they are by value."""
    same = {name: values[0] for name, values in arguments.items() if _are_one(values)}
    parts = {"same": same, "each": {name: values for name, values in arguments.items() if name not in same}}
    if _is_plain(parts, set()):
        try:
            return wire.encode(parts), False
        except (ValueError, OverflowError, RecursionError):  # half a surrogate pair, more than 64 bits, a circle
            pass
    return _by_value(arguments, parts), True


def _by_value(arguments: Arguments, parts: dict[str, Any]) -> bytes:
    try:
        return code.pack(parts)
    except BadInput:
        code.pack(arguments)  # says which column it is
        raise


def unpacked(body: bytes, by_value: bool, count: int) -> Arguments:
    """The arguments again, each a list of `count`."""
    parts = code.unpack(body) if by_value else wire.decode(body, dict[str, dict[str, Any]])
    return {**{name: [value] * count for name, value in parts["same"].items()}, **parts["each"]}


def _are_one(values: list[Any]) -> bool:
    return bool(values) and all(value is values[0] for value in values)


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Whether msgpack gives back an equal value of the same types. What is there many times is looked at once."""
    kind = type(value)
    if kind in _SCALARS or id(value) in seen:
        return True
    seen.add(id(value))
    if kind is list:
        return all(_is_plain(each, seen) for each in value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(_is_plain(each, seen) for each in value.values())
    return False
