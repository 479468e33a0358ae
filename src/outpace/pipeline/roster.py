"""Who samples, as the workers are told: every change of it reaches all of them, in order, and nobody waits for that.

    EngineLoaded, LoadFailed, EngineLost, EngineJoined, EngineLeft, a pinned weight set ─▶ members ─▶ Worker.fleet

A worker that was away hears of everything when it is back. What a worker believes may be a moment old: an engine itself
refuses or delays what it must not serve.
"""

from __future__ import annotations

import asyncio
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
        self._changed = asyncio.Event()
        self._changed.set()

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
                self._changed.set()

    def enter(self, name: str, socket: str) -> None:
        """An engine is about to join."""
        self._members[name] = Member(name, socket, serves=False)

    def leave(self, name: str) -> None:
        """It gets nothing more, and finishes what it has."""
        self._change(name, serves=False, leaving=True)

    def pin(self, names: Iterable[str], version: Version | None) -> None:
        """These have `version` as their second weight set; None: they have none."""
        for name in names:
            if name in self._members:
                self._change(name, pinned=version)

    def tell_again(self) -> None:
        """Some worker is another one than before."""
        self._changed.set()

    def _change(self, name: str, **fields: object) -> None:
        if name in self._members:
            self._members[name] = msgspec.structs.replace(self._members[name], **fields)
            self._changed.set()

    # ---------------------------------------------------------------------------------------------------- the workers

    async def tell(self) -> None:
        """For as long as the run lasts: keep the workers informed."""
        while True:
            await self._changed.wait()
            await self.told()

    async def told(self) -> None:
        """All workers that are up know of everything so far."""
        self._changed.clear()
        members = self.members
        await asyncio.gather(*(self._tell(worker, members) for worker in self._workers.values()))

    async def _tell(self, worker: Worker, members: list[Member]) -> None:
        try:
            await worker.fleet(members)
        except PartLost:
            return  # its successor is told all of it
