"""MERGED"""

from __future__ import annotations

import inspect
import typing

from outpace import wire


class Signature:
    """The argument and result types of one protocol method, from its type hints."""

    def __init__(self, protocol: type, method: str) -> None:
        function = getattr(protocol, method, None)
        if function is None or method.startswith("_"):
            raise wire.WireError(f"{protocol.__name__} has no method {method!r}")
        hints = typing.get_type_hints(function)
        self.result = hints.pop("return")
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        self.args = tuple[tuple(hints[name] for name in names)] if names else tuple[()]  # type: ignore[misc]


class Signatures:
    def __init__(self, protocol: type) -> None:
        self._protocol = protocol
        self._known: dict[str, Signature] = {}

    def __getitem__(self, method: str) -> Signature:
        if method not in self._known:
            self._known[method] = Signature(self._protocol, method)
        return self._known[method]
