"""Values of the user on their way to a child and back.

Text, numbers, lists and dicts travel as msgpack. What a Python caller gives may hold anything else: tuples, arrays,
decimals, objects. msgpack would refuse or change those, so on the way down they travel by value, as functions do.
Nothing comes up by value.
"""

from __future__ import annotations

from typing import Any

from outpace import wire
from outpace.errors import BadInput
from outpace.runtime import code

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_ALL = "values"


def packed(values: dict[str, Any]) -> tuple[bytes, bool]:
    """The bytes, and whether they are by value. `BadInput` names a value that cannot be copied at all."""
    plain = encoded(values)
    if plain is not None:
        return plain, False
    try:
        return code.pack({_ALL: values}), True
    except BadInput:
        code.pack(values)  # says which one it is
        raise


def unpacked(body: bytes, by_value: bool) -> dict[str, Any]:
    return dict(code.unpack(body)[_ALL]) if by_value else wire.decode(body, dict[str, Any])


def encoded(value: Any) -> bytes | None:
    """The value as msgpack; None if that would refuse or change it."""
    try:
        return wire.encode(value) if _is_plain(value, set()) else None
    except (ValueError, OverflowError, RecursionError):  # half a surrogate pair, more than 64 bits, a circle or depth
        return None


def sendable(text: str) -> str:
    """Half of a surrogate pair is no character and does not travel."""
    return text.encode("utf-8", "replace").decode()


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
