"""All parts in this process, behind the same protocols: for debugging, notebooks and tests.

Every part still computes on a thread of its own, so the event loop stays free and the same code paths run.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TypeVar, cast

from outpace import errors
from outpace.runtime import spec as parts
from outpace.runtime import stacks
from outpace.runtime.spec import PartSpec

P = TypeVar("P")


class InlineRuntime:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        # A part may ask for a peer that is still being built beside it: a future serves both orders.
        self._parts: defaultdict[str, asyncio.Future[object]] = defaultdict(loop.create_future)
        # One after the other: heavy libraries must not be imported by two threads at once.
        self._building = asyncio.Lock()
        self.deaths: asyncio.Queue[errors.PartFailed] = asyncio.Queue()  # nobody dies alone here

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P:
        """Build the part here; `environment` would be a child's and does not apply."""
        # Shielded: giving up on one part must not spoil another's place.
        peers = {name: await asyncio.shield(self._parts[name]) for name in spec.peers}
        async with self._building:
            part = await parts.build(spec, peers)
        self._parts[spec.name].set_result(part)
        return cast(P, part)

    async def restart(self, name: str) -> None:
        raise errors.PartFailed(name, "cannot be started again: it lives in the controller's process")

    async def kill(self, name: str) -> None:
        raise errors.PartFailed(name, "cannot be killed: it lives in the controller's process")

    async def retire(self, name: str) -> None:
        await parts.close(await self._parts.pop(name))

    async def ping(self, name: str, deadline_s: float) -> bool:
        return True  # its event loop is the one that asks

    async def dump(self) -> str:
        return f"{stacks.waits()}\n{stacks.tasks()}\n{stacks.threads()}"

    async def stop(self) -> None:
        for part in reversed(self._parts.values()):
            if part.done() and not part.cancelled():
                await parts.close(part.result())
        self._parts.clear()
