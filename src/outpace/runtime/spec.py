"""What a part needs to know to come to life, in this process or in a child."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

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
    attempt: int = 0  # how many processes have been this part before
    start_s: float = START_DEADLINE_S  # how long it may take until it can be called


class Runtime(Protocol):
    """Where parts live."""

    deaths: asyncio.Queue[PartFailed]
    """One item for every part that has died and should be running: its name, how it ended, the end of its log."""

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P:
        """Bring a part to life; returns once it can be called."""
        ...

    async def restart(self, name: str) -> None:
        """Bring a dead part to life again; what `start` has returned goes on with it.

        Raises what `start` would. A part that dies before it can be called is no item of `deaths`."""
        ...

    async def kill(self, name: str) -> None:
        """End a part that cannot be talked to any more; its death is told as any other's."""
        ...

    async def retire(self, name: str) -> None:
        """End a part that is not needed any more. That is no death, and it cannot be started again."""
        ...

    async def ping(self, name: str, deadline_s: float) -> bool:
        """Whether the event loop of a part still turns."""
        ...

    async def dump(self) -> str:
        """What every part is doing, as far as it can still say so; takes about a second."""
        ...

    async def stop(self) -> None: ...


BROKEN = "broken down: "
"""How the last line begins that a part logs which has broken down; the cause follows."""


@runtime_checkable
class Breakable(Protocol):
    """A part that may break down in a way that only a new process can mend."""

    async def broken(self) -> PartFailed:
        """Waits for that; says why."""
        ...


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
