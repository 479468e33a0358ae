"""Sends user code and user data by value from a parent to its child processes.

This is the only module that uses pickle, and only in one direction: over the socket that our own child inherited, which
no other process can open. Pickled data is never read from a child, a file, or a socket that accepts connections.

Data of strings, numbers, lists and dicts is sent as msgpack. Python callers may pass anything else, such as tuples,
arrays, decimals or objects; msgpack would reject or change those, so they are pickled like functions. Children send
nothing by value.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle

from outpace.errors import BadInput
from outpace.references import FILE_MODULE, load_function


@dataclass(frozen=True)
class Source:
    """How a child obtains a user function or class: by `reference`, or from pickled `code` if that is empty."""

    reference: str = ""
    code: bytes = b""

    def load(self, setting: str) -> Any:
        """Load the object in the process that uses it. `setting` is the dotted config key, for error messages."""
        if self.reference:
            return load_function(self.reference, setting)
        return unpack(self.code)[_OBJECT_KEY]


_OBJECT_KEY = "object"


def by_value(value: Any) -> Source:
    """Return a source that contains the pickled object."""
    return Source(code=pack({_OBJECT_KEY: value}))


def pack(objects: dict[str, Any]) -> bytes:
    """Pickle functions and task lists. Raises `BadInput` that names an object that cannot be pickled."""
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


def unpack(data: bytes) -> dict[str, Any]:
    return dict(cloudpickle.loads(data)) if data else {}
