"""MERGED"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import cast

from outpace import errors
from outpace.runtime import stacks
from outpace.runtime.spec import P, PartSpec, build, close


class InlineRuntime:
    """Runs all components in this process."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        # Futures, because a component may need a peer that is still being built.
        self._components: defaultdict[str, asyncio.Future[object]] = defaultdict(loop.create_future)
        # One at a time: heavy libraries must not be imported by two threads at once.
        self._building = asyncio.Lock()
        self.deaths: asyncio.Queue[errors.PartFailed] = asyncio.Queue()  # always empty: there are no child processes

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P:
        """Build the component in this process. `environment` is for child processes and is ignored."""
        # Shielded: cancelling the start of one component must not cancel its peer's future.
        peers = {name: await asyncio.shield(self._components[name]) for name in spec.peers}
        async with self._building:
            component = await build(spec, peers)
        self._components[spec.name].set_result(component)
        return cast(P, component)

    async def restart(self, name: str) -> None:
        raise errors.PartFailed(name, "cannot be restarted: it runs in the controller's process")

    async def kill(self, name: str) -> None:
        raise errors.PartFailed(name, "cannot be killed: it runs in the controller's process")

    async def retire(self, name: str) -> None:
        await close(await self._components.pop(name))

    async def ping(self, name: str, deadline_s: float) -> bool:
        return True  # it shares the caller's event loop

    async def dump(self) -> str:
        return f"{stacks.waits()}\n{stacks.tasks()}\n{stacks.threads()}"

    async def stop(self) -> None:
        for component in reversed(self._components.values()):
            if component.done() and not component.cancelled():
                await close(component.result())
        self._components.clear()
