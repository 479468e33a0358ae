"""What a part needs to know to come to life, in this process or in a child."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from outpace.errors import PartFailed

P = TypeVar("P")

START_DEADLINE_S = 600.0
"""How long a part may take until it can be called: a large model loads slowly."""


class PartSpec(msgspec.Struct, frozen=True):
    """`factory` and `protocol` are `module:name`; the factory is `async (spec, peers) -> object`.

    `code` holds objects that cannot be imported by name (functions of `__main__` or a notebook), by value. It is only
    ever sent down the private pipe from a parent to the child it started, and nothing like it comes back.
    """

    name: str
    factory: str
    protocol: str
    settings: dict[str, Any] = {}
    code: bytes = b""
    listen: str | None = None  # a socket path on which the part also serves its protocol to its peers
    token: str = ""
    peers: dict[str, str] = {}  # name -> socket path of an engine this part talks to
    peer_protocol: str = "outpace.protocols:Engine"


class Runtime(Protocol):
    """Where parts live. `failure` resolves when a part has died that should be running."""

    failure: asyncio.Future[PartFailed]

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P: ...

    async def stop(self) -> None: ...


Factory = Callable[[PartSpec, dict[str, Any]], Awaitable[object]]


def resolve(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


async def build(spec: PartSpec, peers: dict[str, Any]) -> object:
    factory: Factory = resolve(spec.factory)
    return await factory(spec, peers)


async def close(part: object) -> None:
    """End a part, if it has anything to end."""
    closer = getattr(part, "close", None)
    if closer is not None:
        await closer()
