"""Components and where they run.

A component is an engine, the learner or a worker. `ComponentSpec` describes how to build one; a `Runtime` starts it, in
this process (`InlineRuntime`) or in a child process (`outpace.runtime.local`).

With `InlineRuntime`, for debugging, notebooks and tests, every component still computes on its own thread, so the event
loop stays free and the same code paths run.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from outpace.errors import PartFailed

P = TypeVar("P")

START_DEADLINE_S = 600.0
"""How long a component may take to become ready: a large model loads slowly."""


class PartSpec(msgspec.Struct, frozen=True):
    """How to build a component. `factory` and `protocol` are `module:name`; the factory is `async (spec, peers) ->
    object`.

    `code` holds pickled objects that cannot be imported by name (functions of `__main__` or a notebook). It is only
    sent from a parent to its own child over a private socket, never back.
    """

    name: str
    factory: str
    protocol: str
    settings: dict[str, Any] = {}
    code: bytes = b""
    listen: str | None = None  # socket path on which the component also serves its protocol to its peers
    token: str = ""
    peers: dict[str, str] = {}  # name -> socket path of an engine that this component calls
    peer_protocol: str = "outpace.protocols:Engine"
    attempt: int = 0  # number of earlier processes of this component
    start_s: float = START_DEADLINE_S  # how long it may take to become ready


class Runtime(Protocol):
    """Starts, restarts and stops components."""

    deaths: asyncio.Queue[PartFailed]
    """One item for every component that died unexpectedly: its name, exit reason and the end of its log."""

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P:
        """Start a component. Returns once it is ready."""
        ...

    async def restart(self, name: str) -> None:
        """Restart a dead component. The object that `start` returned works again afterwards.

        Raises what `start` raises. A component that dies before it is ready is not added to `deaths`."""
        ...

    async def kill(self, name: str) -> None:
        """Kill a component that no longer responds. Its death is added to `deaths`."""
        ...

    async def retire(self, name: str) -> None:
        """Stop a component for good. It is not added to `deaths` and cannot be restarted."""
        ...

    async def ping(self, name: str, deadline_s: float) -> bool:
        """Return whether the event loop of a component still responds."""
        ...

    async def dump(self) -> str:
        """Return a report of what every component is doing, as far as available. Takes about a second."""
        ...

    async def stop(self) -> None: ...


BROKEN = "broken down: "
"""Prefix of the last line that a component logs before it exits because of an unrecoverable failure."""


@runtime_checkable
class Breakable(Protocol):
    """A component that may fail in a way that only a new process can repair."""

    async def broken(self) -> PartFailed:
        """Wait for such a failure and return it."""
        ...


Factory = Callable[[PartSpec, dict[str, Any]], Awaitable[object]]


def resolve(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


async def build(spec: PartSpec, peers: dict[str, Any]) -> object:
    factory: Factory = resolve(spec.factory)
    return await factory(spec, peers)


async def close(component: object) -> None:
    """Call the component's `close` method, if it has one."""
    closer = getattr(component, "close", None)
    if closer is not None:
        await closer()
