"""The arguments of a reward function on their way to a grader process.

Text, numbers, lists and dicts travel as msgpack. A column of a Python caller may hold anything else: tuples, arrays,
decimals, objects. msgpack would refuse or change those, so such arguments travel by value, as functions do.
"""

from __future__ import annotations

from typing import Any

from outpace import wire
from outpace.runtime import code

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


def packed(arguments: dict[str, list[Any]]) -> tuple[bytes, bool]:
    """The bytes, and whether they are by value."""
    if _is_plain(arguments, set()):
        try:
            return wire.encode(arguments), False
        except (ValueError, OverflowError, RecursionError):  # half a surrogate pair, more than 64 bits, a circle
            pass
    return code.pack(arguments), True


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
