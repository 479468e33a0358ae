"""User code, and data that msgpack would change, carried by value from a parent to the children it starts.

This is the only place that pickles, in one direction only: down the channel that our own child inherited, which nobody
else can open. Nothing pickled is ever read from a child, a file, or a socket that somebody can connect to.
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
    """Where a child gets a function or class of the user from: `reference`, or `code` where that is empty."""

    reference: str = ""
    code: bytes = b""

    def load(self, setting: str) -> Any:
        """The object, in the process that is to use it; `setting` is the dotted key it came from."""
        if self.reference:
            return load_function(self.reference, setting)
        return unpack(self.code)[_ONE]


_ONE = "object"


def by_value(value: Any) -> Source:
    """A source that carries the object itself."""
    return Source(code=pack({_ONE: value}))


def pack(objects: dict[str, Any]) -> bytes:
    """Functions and task lists by value; names a thing that cannot travel."""
    given = {name: value for name, value in objects.items() if value is not None}
    if not given:
        return b""
    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(given))
    except Exception:  # cloudpickle raises whatever an object's own reduction raises
        for name, value in given.items():
            _refuse_if_stuck(name, value)
        raise


def _refuse_if_stuck(name: str, value: Any) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # as above; now it is known whose
        raise BadInput(f"{name}: {value!r} cannot be sent to a worker process: {error}") from None


def unpack(data: bytes) -> dict[str, Any]:
    return dict(cloudpickle.loads(data)) if data else {}
