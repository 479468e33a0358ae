"""MERGED"""

from __future__ import annotations

from typing import Any

from outpace import wire
from outpace.errors import BadInput
from outpace.runtime import code

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_VALUES_KEY = "values"


def packed(values: dict[str, Any]) -> tuple[bytes, bool]:
    """Return the encoded values and whether they are pickled. Raises `BadInput` that names a value that cannot be."""
    plain = encoded(values)
    if plain is not None:
        return plain, False
    try:
        return code.pack({_VALUES_KEY: values}), True
    except BadInput:
        code.pack(values)  # raises an error that names the value
        raise


def unpacked(body: bytes, by_value: bool) -> dict[str, Any]:
    """Decode what `encode_values` returned. `by_value`: the bytes are pickled."""
    return dict(code.unpack(body)[_VALUES_KEY]) if by_value else wire.decode(body, dict[str, Any])


def encoded(value: Any) -> bytes | None:
    """Encode a value as msgpack. Returns None if msgpack would reject or change it."""
    try:
        return wire.encode(value) if _is_plain(value, set()) else None
    except (ValueError, OverflowError, RecursionError):  # a lone surrogate, over 64 bits, a cycle or deep nesting
        return None


def sendable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Return whether msgpack decodes to an equal value of the same types. Repeated objects are checked once."""
    kind = type(value)
    if kind in _SCALARS or id(value) in seen:
        return True
    seen.add(id(value))
    if kind is list:
        return all(_is_plain(each, seen) for each in value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(_is_plain(each, seen) for each in value.values())
    return False
