"""User code that cannot be imported by name, carried by value from a parent to the children it starts.

This is the only place that pickles, in one direction only: down a private pipe to our own child. Nothing pickled is
ever read from a socket, a file or a child.
"""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle

from outpace.errors import BadInput
from outpace.references import FILE_MODULE


def pack(objects: dict[str, Any]) -> bytes:
    """Functions and task lists by value; names a thing that cannot travel."""
    given = {name: value for name, value in objects.items() if value is not None}
    if not given:
        return b""
    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):
            cloudpickle.register_pickle_by_value(module)
    for name, value in given.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # cloudpickle raises whatever the object's own reduction raises
            raise BadInput(f"{name}: {value!r} cannot be sent to a worker process: {error}") from None
    return bytes(cloudpickle.dumps(given))


def unpack(data: bytes) -> dict[str, Any]:
    return dict(cloudpickle.loads(data)) if data else {}
