"""Components and where they run.

A component is an engine, the learner, a worker or the producer. `ComponentSpec` describes it as plain data: what to
build, which resources it needs, and when to restart it. A `Runtime` places and starts it, in this process
(`InlineRuntime`) or in a child process (`outpace.runtime.local`). Every runtime passes `tests/runtime/conformance.py`.

With `InlineRuntime`, for debugging, notebooks and tests, every component still computes on its own thread, so the event
loop stays free and the same code paths run.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from outpace.errors import ComponentFailed
from outpace.runtime import diagnostics

P = TypeVar("P")

START_DEADLINE_S = 600.0
"""How long a component may take to become ready: a large model loads slowly."""


ComponentKind = Literal["learner", "engine", "worker", "producer"]


class Resources(msgspec.Struct, frozen=True):
    """What a component needs."""

    cpus: int = 1  # compute threads
    gpus: list[str] | None = None  # as in CUDA_VISIBLE_DEVICES; [] hides all GPUs, None changes nothing
    gpu_memory: float = 1.0  # fraction of each GPU's memory


class RestartSettings(msgspec.Struct, frozen=True):
    """Restart at most `restarts` times within `window_s`."""

    restarts: int
    window_s: float


class ComponentSpec(msgspec.Struct, frozen=True):
    """A component, described so that a runtime on this or another machine can place and build it. `factory` and
    `protocol` are `module:name`; the factory is `async (spec, peers) -> object`.

    `code` holds pickled objects that cannot be imported by name (functions of `__main__` or a notebook). It is only
    sent from a parent to its own child over a private socket, never back, and never to a remote process.
    """

    name: str
    factory: str
    protocol: str
    settings: dict[str, Any] = {}
    kind: ComponentKind = "worker"
    resources: Resources = Resources()
    restart: RestartSettings | None = None  # None: its death ends the run
    environment: dict[str, str] = {}  # extra environment variables of its process
    code: bytes = b""
    listen: str | None = None  # socket path on which the component also serves its protocol to its peers
    token: str = ""
    peers: dict[str, str] = {}  # name -> socket path of an engine that this component calls
    peer_protocol: str = "outpace.protocols:Engine"
    attempt: int = 0  # number of earlier processes of this component
    start_s: float = START_DEADLINE_S  # how long it may take to become ready
    remote: int | None = None  # number of the process that connects and becomes this component; None: a child


class Runtime(Protocol):
    """Starts, restarts and stops components."""

    deaths: asyncio.Queue[ComponentFailed]
    """One item for every component that died unexpectedly: its name, exit reason and the end of its log."""

    async def start(self, protocol: type[P], spec: ComponentSpec) -> P:
        """Start a component. Returns once it is ready."""
        ...

    def spec(self, name: str) -> ComponentSpec:
        """Return the spec of a started component."""
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
        """Return a best-effort report of what every component is doing. Takes about a second."""
        ...

    async def stop(self, finished: bool = False) -> None:
        """Stop all components. `finished`: nothing has failed, so their processes exit with code 0."""
        ...


BROKEN_PREFIX = "broken down: "
"""Prefix of the last line that a component logs before it exits because of an unrecoverable failure."""


@runtime_checkable
class Breakable(Protocol):
    """A component that may fail in a way that only a new process can repair."""

    async def broken(self) -> ComponentFailed:
        """Wait until the component has such a failure, and return it."""
        ...


ComponentFactory = Callable[[ComponentSpec, dict[str, Any]], Awaitable[object]]


def load_object(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


async def build_component(spec: ComponentSpec, peers: dict[str, Any]) -> object:
    factory: ComponentFactory = load_object(spec.factory)
    return await factory(spec, peers)


async def close_component(component: object) -> None:
    """Call the component's `close` method, if it has one."""
    closer = getattr(component, "close", None)
    if closer is not None:
        await closer()


class InlineRuntime:
    """Runs all components in this process."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        # Futures, because a component may need a peer that is still being built.
        self._components: defaultdict[str, asyncio.Future[object]] = defaultdict(loop.create_future)
        self._specs: dict[str, ComponentSpec] = {}
        # One at a time: heavy libraries must not be imported by two threads at once.
        self._building = asyncio.Lock()
        # Always empty: there are no child processes.
        self.deaths: asyncio.Queue[ComponentFailed] = asyncio.Queue()

    async def start(self, protocol: type[P], spec: ComponentSpec) -> P:
        """Build the component in this process. Its resources and environment variables are those of the process."""
        # Shielded: cancelling the start of one component must not cancel its peer's future.
        peers = {name: await asyncio.shield(self._components[name]) for name in spec.peers}
        async with self._building:
            component = await build_component(spec, peers)
        self._components[spec.name].set_result(component)
        self._specs[spec.name] = spec
        return cast(P, component)

    def spec(self, name: str) -> ComponentSpec:
        return self._specs[name]

    async def restart(self, name: str) -> None:
        raise ComponentFailed(name, "cannot be restarted: it runs in the controller's process")

    async def kill(self, name: str) -> None:
        raise ComponentFailed(name, "cannot be killed: it runs in the controller's process")

    async def retire(self, name: str) -> None:
        del self._specs[name]
        await close_component(await self._components.pop(name))

    async def ping(self, name: str, deadline_s: float) -> bool:
        return True  # it shares the caller's event loop

    async def dump(self) -> str:
        return f"{diagnostics.describe_waits()}\n{diagnostics.describe_tasks()}\n{diagnostics.describe_threads()}"

    async def stop(self, finished: bool = False) -> None:
        for component in reversed(self._components.values()):
            if component.done() and not component.cancelled():
                await close_component(component.result())
        self._components.clear()
