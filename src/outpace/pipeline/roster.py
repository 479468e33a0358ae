"""Engine registry and fleet membership: which engines sample, and how engines join and leave a running run.

    EngineLoaded, LoadFailed, EngineLost, EngineJoined, EngineLeft, pinned weights ─▶ EngineRegistry ─▶ Worker.fleet

`EngineRegistry` sends every change to all workers, in order, without blocking the driver. A worker that was down gets
the full list when it is back. A worker's view may be slightly stale: an engine itself rejects or delays requests that
it must not serve.

    add      requested ─▶ started or connected ─▶ EngineJoined: stale ─▶ first load ─▶ serves: joined
    remove   gets no new requests ─▶ finishes its requests, up to a timeout ─▶ stopped ─▶ EngineLeft

`FleetMembership` carries out these orders. Removing an engine costs only the requests it could not finish in time,
which continue on other engines.
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
    """The engines of a run and what each serves, kept in sync with all workers."""

    def __init__(self, sockets: Mapping[str, str], workers: Mapping[str, Worker]) -> None:
        """`sockets` maps each engine to the socket on which workers call it."""
        self._members = {name: Member(name, socket, serves=False) for name, socket in sockets.items()}
        self._workers = workers
        self._updates = {name: asyncio.Event() for name in workers}
        self._notify_workers()

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def serving(self) -> list[str]:
        return [member.name for member in self._members.values() if member.serves]

    def hear(self, event: ev.Event, learner: Version) -> None:
        """Apply an event about the engines; `learner` is the learner's version."""
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
                self._notify_workers()

    def enter(self, name: str, socket: str) -> None:
        """Add an engine that is about to join."""
        self._members[name] = Member(name, socket, serves=False)

    def leave(self, name: str) -> None:
        """Mark an engine as leaving: it gets no new requests and finishes its current ones."""
        self._change(name, serves=False, leaving=True)

    def stands_still(self, name: str) -> None:
        """Mark an engine as not serving until its next load."""
        self._change(name, serves=False)

    def pin(self, names: Iterable[str], version: Version | None) -> None:
        """Record that these engines hold `version` as their second weight set; None: they hold none."""
        for name in names:
            if name in self._members:
                self._change(name, pinned=version)

    def all_pinned(self, names: Iterable[str], version: Version) -> bool:
        """Return whether all of these engines still hold `version` pinned."""
        return {member.name for member in self._members.values() if member.pinned == version} >= set(names)

    def tell_again(self, component: str) -> None:
        """Send the fleet to all workers again, after a component was restarted."""
        self._notify_workers()

    def _change(self, name: str, **fields: object) -> None:
        if name in self._members:
            self._members[name] = msgspec.structs.replace(self._members[name], **fields)
            self._notify_workers()

    def _notify_workers(self) -> None:
        for update in self._updates.values():
            update.set()

    # ------------------------------------------------------------------------------------------------------- workers

    async def tell(self) -> None:
        """Send changes to the workers, each at its own pace, for as long as the run lasts."""
        await asyncio.gather(*(self._keep_updated(name) for name in self._workers))

    async def _keep_updated(self, name: str) -> None:
        while True:
            await self._updates[name].wait()
            await self._send_fleet(name)

    async def _send_fleet(self, name: str) -> None:
        """Send the current fleet to this worker. If it is down, its replacement gets it."""
        self._updates[name].clear()
        with contextlib.suppress(PartLost):
            await self._workers[name].fleet(self.members)
