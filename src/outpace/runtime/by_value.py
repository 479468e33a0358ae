"""Sends user code and user data by value from a parent to its child processes.

This is the only module that uses pickle, and only in one direction: over the socket that our own child inherited, which
no other process can open. Pickled data is never read from a child, a file, or a socket that accepts connections.

Plain data (strings, numbers, lists, dicts) is sent as msgpack. Python callers may pass anything else, such as tuples,
arrays, decimals or objects; msgpack would reject or change those, so they are pickled like functions. Children send
nothing by value.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle

from outpace.errors import BadInput
from outpace.runtime import wire
from outpace.runtime.references import FILE_MODULE, load_function


@dataclass(frozen=True)
class UserCodeSource:
    """How a child obtains a user function or class: by `reference`, or from pickled `code` if it is empty."""

    reference: str = ""
    code: bytes = b""

    def load(self, setting: str) -> Any:
        """Load the object in the process that uses it. `setting` is the dotted config key, for error messages."""
        if self.reference:
            return load_function(self.reference, setting)
        return unpickle_objects(self.code)[_OBJECT_KEY]


_OBJECT_KEY = "object"


def source_by_value(value: Any) -> UserCodeSource:
    """Return a source that contains the pickled object."""
    return UserCodeSource(code=pickle_objects({_OBJECT_KEY: value}))


def pickle_objects(objects: dict[str, Any]) -> bytes:
    """Pickle functions and task lists. Raises a `BadInput` that names the object that cannot be pickled."""
    given = {name: value for name, value in objects.items() if value is not None}
    if not given:
        return b""
    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(given))
    except Exception:  # an object's own `__reduce__` may raise anything
        for name, value in given.items():
            _check_picklable(name, value)
        raise


def _check_picklable(name: str, value: Any) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # an object's own `__reduce__` may raise anything
        raise BadInput(
            f"{name}: {value!r} cannot be pickled for a worker process: {error}; pass an object that can be pickled"
        ) from None


def unpickle_objects(data: bytes) -> dict[str, Any]:
    return dict(cloudpickle.loads(data)) if data else {}


_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_VALUES_KEY = "values"


def encode_values(values: dict[str, Any]) -> tuple[bytes, bool]:
    """Return the encoded values and whether they are pickled. Raises a `BadInput` that names an invalid value."""
    plain = encode_plain(values)
    if plain is not None:
        return plain, False
    try:
        return pickle_objects({_VALUES_KEY: values}), True
    except BadInput:
        pickle_objects(values)  # raises an error that names the value
        raise


def decode_values(body: bytes, by_value: bool) -> dict[str, Any]:
    """Decode what `encode_values` returned. `by_value`: the bytes are pickled."""
    return dict(unpickle_objects(body)[_VALUES_KEY]) if by_value else wire.decode(body, dict[str, Any])


def encode_plain(value: Any) -> bytes | None:
    """Encode a value as msgpack. Returns None if msgpack would reject or change it."""
    try:
        return wire.encode(value) if _is_plain(value, set()) else None
    except (ValueError, OverflowError, RecursionError):  # a lone surrogate, over 64 bits, a cycle or deep nesting
        return None


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
