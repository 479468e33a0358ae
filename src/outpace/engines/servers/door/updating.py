"""Weights for one server: verified while it samples, taken while it holds still.

    prepare ──▶ pause ──▶ swap ──▶ label ──▶ resume          whole models
       │          │         └─────────┴─────────┴─ fails: torn. Nobody knows what it holds: it serves nothing
       └──────────┴─ fails: resume if need be, the old version goes on

    prepare ──▶ register ──▶ requests from here on use it     adapters: running ones finish under their own

Invariants
- One update at a time; none goes back behind what was served.
- Every call has a deadline. Whoever waits for an update may go away: it is brought to its end.
- A server that is found paused, by an update that was torn, is updated like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

from outpace.engines.servers.door.desk import Desk
from outpace.engines.servers.spec import Ready, ReadyAdapter, Transport
from outpace.errors import CorruptData, OutpaceError, UpdateFailed, UpdateTorn, one_line
from outpace.types import LoadReport, Manifest, Version

log = logging.getLogger(__name__)
T = TypeVar("T")

_LEAVING_S = 2.0
_CLEARING_S = 3.0


class Updater:
    def __init__(self, desk: Desk, transport: Transport) -> None:
        self._desk = desk
        self._transport = transport
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        task = asyncio.create_task(self._load(manifest, pinned))
        self._keep(task)
        return await asyncio.shield(task)

    def tidy(self) -> None:
        """Forget the adapters that nobody needs any more, some time soon."""
        for version in self._desk.shelf.take_unused():
            self._keep(asyncio.create_task(self._forget(version)))

    async def close(self, server_stays: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leave_nothing(server_stays)

    async def _leave_nothing(self, server_stays: bool) -> None:
        try:
            async with asyncio.timeout(_CLEARING_S):
                await self._transport.close(server_stays)
        except (OutpaceError, OSError) as error:
            log.warning("%s: something of ours is left: %s", self._desk.server.url, one_line(error) or "no answer")

    def _keep(self, task: asyncio.Task[T]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        async with self._lock:
            self._refuse(manifest, pinned)
            began = time.perf_counter()
            ready = await self._prepared(manifest)
            pause_s = 0.0
            if self._transport.holds_still:
                pause_s = await self._replace(ready)
            else:
                await self._register(ready, pinned)
            self._desk.react()
            self.tidy()
            return LoadReport(
                version=manifest.version, pause_s=pause_s, seconds=time.perf_counter() - began, bytes=ready.nbytes
            )

    def _refuse(self, manifest: Manifest, pinned: bool) -> None:
        if self._desk.health.state == "dead":
            raise UpdateFailed(f"{self._desk.server.url} is dead: {self._desk.health.why}")
        if pinned and (self._transport.holds_still or not self._desk.settings.pins):
            raise UpdateFailed(f"{self._desk.server.url} cannot hold a second weight set")
        if not pinned and self._desk.shelf.goes_back(manifest.version):
            raise UpdateFailed(f"{self._desk.server.url} does not go back to version {manifest.version}")

    async def _prepared(self, manifest: Manifest) -> Ready:
        try:
            return await self._within("preparing", self._transport.prepare(manifest))
        except (CorruptData, UpdateFailed):
            raise
        except (OutpaceError, OSError) as error:
            raise UpdateFailed(f"version {manifest.version}: {one_line(error)}") from error

    async def _replace(self, ready: Ready) -> float:
        """Seconds from asking the server to pause until it said that it goes on."""
        desk = self._desk
        with desk.holding():
            began = time.perf_counter()
            await self._pause(ready.version)
            try:
                await self._within("the swap", self._transport.swap(ready))
                await self._within("the label", desk.server.label(ready.version))
                desk.shelf.newest = max(desk.shelf.newest, ready.version)
                await self._within("resuming", desk.server.resume(desk.settings.kv == "recompute"))
            except (Exception, asyncio.CancelledError) as error:  # whatever it was: who can say what it holds?
                await self._tear(ready.version, error)
                raise
            paused_s = time.perf_counter() - began
        desk.shelf.put(ready.version)
        desk.health.loaded()
        return paused_s

    async def _pause(self, version: Version) -> None:
        """Where that fails it may be paused all the same."""
        try:
            await self._within("pausing", self._desk.server.pause())
        except (OutpaceError, OSError, asyncio.CancelledError) as error:
            await self._try_resume()
            raise UpdateFailed(f"version {version}: {one_line(error) or 'given up'}") from error

    async def _tear(self, version: Version, error: BaseException) -> None:
        """First those who read from it are sent away, then it goes on, so that probes can tell how it is."""
        cause = one_line(error) or type(error).__name__
        self._desk.torn(f"the update to version {version} has failed half-way: {cause}")
        await self._try_resume()
        raise UpdateTorn(f"{self._desk.server.url}: {self._desk.health.why}") from error

    async def _try_resume(self) -> None:
        settings = self._desk.settings
        patience_s = _LEAVING_S if self._desk.closed else min(settings.control_s, settings.probe_deadline_s)
        try:
            async with asyncio.timeout(patience_s):
                await self._desk.server.resume(recompute=False)
        except (OutpaceError, OSError) as error:
            log.warning("%s may be paused: %s", self._desk.server.url, one_line(error) or "no answer")

    async def _register(self, ready: Ready, pinned: bool) -> None:
        shelf = self._desk.shelf
        if not shelf.holds(ready.version):
            try:
                await self._within("registering", self._transport.swap(ready))
            except (OutpaceError, OSError) as error:
                self._keep(asyncio.create_task(self._forget(ready.version)))
                raise UpdateFailed(f"version {ready.version}: {one_line(error)}") from error
        adapter = ready.adapter if isinstance(ready, ReadyAdapter) else None
        shelf.put(ready.version, adapter, pinned=pinned)
        if not pinned:
            self._desk.health.loaded()

    async def _forget(self, version: Version) -> None:
        try:
            async with self._lock:
                if not self._desk.shelf.holds(version):
                    await self._within("forgetting", self._transport.forget(version))
        except (OutpaceError, OSError) as error:  # it takes up room, no more
            log.warning("%s keeps version %d: %s", self._desk.server.url, version, one_line(error))

    async def _within(self, what: str, call: Awaitable[T]) -> T:
        control_s = self._desk.settings.control_s
        timeout = asyncio.timeout(control_s)
        try:
            async with timeout:
                return await call
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise UpdateFailed(f"{self._desk.server.url}: {what} has taken more than {control_s:g} s") from error
