"""The ways to the engines of a fleet: made when an engine joins, kept while anybody uses them.

Calling an engine that has just joined may take as long as any part may take to start, so it is done in the background;
until then, and while a connection is lost, the engine cannot be reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from outpace.errors import OutpaceError, PartFailed
from outpace.protocols import Engine
from outpace.runtime.peers import reachable, watch
from outpace.runtime.rpc import close_proxy
from outpace.types import Member

log = logging.getLogger(__name__)

Connect = Callable[[Member], Awaitable[Engine]]


async def no_way(member: Member) -> Engine:
    raise PartFailed(member.name, "is none of the engines that this process was given, and cannot be called")


class Links:
    def __init__(self, engines: Mapping[str, Engine], connect: Connect, changed: Callable[[], None]) -> None:
        """`changed` is called whenever an engine can be reached that could not, or the other way round."""
        self._engines: dict[str, Engine] = {}
        self._connect = connect
        self._changed = changed
        self._calling: dict[str, asyncio.Task[None]] = {}
        for name, engine in engines.items():
            self._add(name, engine)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def reaches(self, name: str) -> bool:
        return name in self._engines and reachable(self._engines[name])

    def call(self, members: Sequence[Member]) -> None:
        """Connect to those of them that there is no way to yet."""
        for member in members:
            if member.name not in self._engines and member.name not in self._calling:
                self._calling[member.name] = asyncio.create_task(self._called(member), name=f"calling {member.name}")

    def keep_only(self, names: Collection[str]) -> None:
        for name in self._calling.keys() - set(names):
            self._calling.pop(name).cancel()
        for name in self._engines.keys() - set(names):
            close_proxy(self._engines.pop(name))

    def close(self) -> None:
        self.keep_only(())

    def _add(self, name: str, engine: Engine) -> None:
        self._engines[name] = engine
        watch(engine, self._changed)

    async def _called(self, member: Member) -> None:
        try:
            self._add(member.name, await self._connect(member))
        except (OutpaceError, OSError) as error:
            log.warning("engine %s cannot be called, until it is named again: %s", member.name, error)
        finally:
            if self._calling.get(member.name) is asyncio.current_task():
                del self._calling[member.name]
        self._changed()
