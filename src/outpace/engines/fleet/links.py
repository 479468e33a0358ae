"""MERGED"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from outpace.errors import OutpaceError, PartFailed
from outpace.protocols import Engine
from outpace.runtime.peers import reachable, watch
from outpace.runtime.rpc import close_proxy
from outpace.types import Member

Connect = Callable[[Member], Awaitable[Engine]]


async def no_way(member: Member) -> Engine:
    raise PartFailed(member.name, "is not one of the engines given to this process, and there is no way to connect")


class Links:
    """Connections to the engines of a fleet: opened in the background when an engine joins, kept while in use."""

    def __init__(self, engines: Mapping[str, Engine], connect: Connect, changed: Callable[[], None]) -> None:
        """`changed` is called whenever an engine becomes reachable or unreachable."""
        self._engines: dict[str, Engine] = {}
        self._connect = connect
        self._changed = changed
        self._connecting: dict[str, asyncio.Task[None]] = {}
        for name, engine in engines.items():
            self._add(name, engine)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def reaches(self, name: str) -> bool:
        return name in self._engines and reachable(self._engines[name])

    def call(self, members: Sequence[Member]) -> None:
        """Start connecting to members without a connection."""
        for member in members:
            if member.name not in self._engines and member.name not in self._connecting:
                self._connecting[member.name] = asyncio.create_task(self._open(member), name=f"connect {member.name}")

    def keep_only(self, names: Collection[str]) -> None:
        for name in self._connecting.keys() - set(names):
            self._connecting.pop(name).cancel()
        for name in self._engines.keys() - set(names):
            close_proxy(self._engines.pop(name))

    def close(self) -> None:
        self.keep_only(())

    def _add(self, name: str, engine: Engine) -> None:
        self._engines[name] = engine
        watch(engine, self._changed)

    async def _open(self, member: Member) -> None:
        try:
            self._add(member.name, await self._connect(member))
        except (OutpaceError, OSError) as error:
            message = "cannot connect to engine %s, will retry at the next member update: %s"
            logging.getLogger(__name__).warning(message, member.name, error)
        finally:
            if self._connecting.get(member.name) is asyncio.current_task():
                del self._connecting[member.name]
        self._changed()
