"""Who samples, as the workers are told: every change of it reaches all of them, in order, and nobody waits for that.

    EngineLoaded, LoadFailed, EngineLost, EngineJoined, EngineLeft, a pinned weight set ─▶ members ─▶ Worker.fleet

A worker that was away hears of everything when it is back. What a worker believes may be a moment old: an engine itself
refuses or delays what it must not serve.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping

import msgspec

from outpace.errors import PartLost
from outpace.pipeline import events as ev
from outpace.protocols import Worker
from outpace.types import Member, Version


class Roster:
    def __init__(self, sockets: Mapping[str, str], workers: Mapping[str, Worker]) -> None:
        """`sockets`: where each engine is to be called."""
        self._members = {name: Member(name, socket, serves=False) for name, socket in sockets.items()}
        self._workers = workers
        self._news = {name: asyncio.Event() for name in workers}
        self._changed()

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def serving(self) -> list[str]:
        return [member.name for member in self._members.values() if member.serves]

    def hear(self, event: ev.Event, learner: Version) -> None:
        """What the driver has heard of the engines; `learner` is the learner's version."""
        match event:
            case ev.Started(engines):
                for name, version in engines.items():
                    self._change(name, serves=version == learner, version=version)
            case ev.EngineLoaded(engine, version):
                self._change(engine, serves=not self._members[engine].leaving, version=version)
            case ev.LoadFailed(engine, _, torn) if torn:
                self._change(engine, serves=False)
            case ev.EngineLost(engine) | ev.EngineJoined(engine):
                self._change(engine, serves=False, pinned=None)
            case ev.EngineLeft(engine):
                self._members.pop(engine, None)
                self._changed()

    def enter(self, name: str, socket: str) -> None:
        """An engine is about to join."""
        self._members[name] = Member(name, socket, serves=False)

    def leave(self, name: str) -> None:
        """It gets nothing more, and finishes what it has."""
        self._change(name, serves=False, leaving=True)

    def stands_still(self, name: str) -> None:
        """It serves nothing before its next load."""
        self._change(name, serves=False)

    def pin(self, names: Iterable[str], version: Version | None) -> None:
        """These have `version` as their second weight set; None: they have none."""
        for name in names:
            if name in self._members:
                self._change(name, pinned=version)

    def all_pinned(self, names: Iterable[str], version: Version) -> bool:
        """Whether all of these still have it."""
        return {member.name for member in self._members.values() if member.pinned == version} >= set(names)

    def tell_again(self, part: str) -> None:
        """This part is another one than before."""
        self._changed()

    def _change(self, name: str, **fields: object) -> None:
        if name in self._members:
            self._members[name] = msgspec.structs.replace(self._members[name], **fields)
            self._changed()

    def _changed(self) -> None:
        for news in self._news.values():
            news.set()

    # ---------------------------------------------------------------------------------------------------- the workers

    async def tell(self) -> None:
        """For as long as the run lasts: keep the workers informed, each at its own pace."""
        await asyncio.gather(*(self._keep_told(name) for name in self._workers))

    async def _keep_told(self, name: str) -> None:
        while True:
            await self._news[name].wait()
            await self.told(name)

    async def told(self, name: str) -> None:
        """This worker knows of everything so far, if it is up; its successor will."""
        self._news[name].clear()
        with contextlib.suppress(PartLost):
            await self._workers[name].fleet(self.members)
