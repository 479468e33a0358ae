"""Watching one server: does it work, how busy is it, is it still there?

    probing    every `probe_s`, one token really sampled,    ─▶ health; sooner where requests have failed
               or others meanwhile, where it is busy
    looking    every second, what it says of its pressure    ─▶ the limit; whether it is still the same server
    its end    of the process, where we have started it      ─▶ health

A server that we hold still ourselves cannot answer a probe: probing rests, and one that was overtaken by a pause says
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from outpace.engines.servers.door.desk import Desk
from outpace.engines.servers.spec import Pressure
from outpace.errors import ServerFailed, ServerSilent, one_line

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_DOUBT_S = 0.5


class Process(Protocol):
    """The server itself, where we have started it (`launching.ServerProcess`)."""

    async def ended(self) -> str: ...

    async def stop(self) -> None: ...

    def log_tail(self, lines: int = 30) -> str: ...

    def cpu_s(self) -> float: ...


class Watch:
    def __init__(self, desk: Desk, process: Process | None) -> None:
        self._desk = desk
        self._process = process
        self._began: float | None = None
        self._preempted = 0  # at the last look
        self._forced = 0  # preemptions that were our own doing
        self._holds = 0  # of the desk, at the last look
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loops: list[Callable[[], Awaitable[None]]] = [self._probing, self._looking]
        if self._process is not None:
            loops.append(self._mourning)
        self._tasks = [asyncio.create_task(_run(loop)) for loop in loops]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probing(self) -> None:
        while not self._desk.died.is_set():
            await self._pause()
            if not self._desk.held:
                await self.probe()

    async def _pause(self) -> None:
        """Until the next probe: sooner where requests have brought the server into doubt, for nothing is sent then."""
        probe_s = self._desk.settings.probe_s
        try:
            async with asyncio.timeout(probe_s):
                await self._desk.doubted.wait()
                await asyncio.sleep(min(_DOUBT_S, probe_s))
        except TimeoutError:
            return

    async def probe(self) -> None:
        desk, holds = self._desk, self._desk.holds
        desk.doubted.clear()
        try:
            await self._sampled()
            if not desk.health.serves and self._began is not None:  # who answers after a doubt may be another server
                await self._look()
        except ServerFailed as error:
            if desk.holds == holds:
                log.warning("%s: a probe has failed: %s", desk.settings.name, error)
                desk.health.probe_failed(one_line(error))
        else:
            desk.health.probe_passed()
            desk.tally.turns += 1
        desk.react()

    async def _sampled(self) -> None:
        """A probe that waits in the queue of a busy server, while requests of ours get tokens, has shown as much as one
        that is answered."""
        desk, pieces = self._desk, self._desk.tally.pieces
        try:
            await desk.server.probe(desk.settings.probe_deadline_s)
        except ServerSilent:
            if desk.tally.pieces == pieces:
                raise

    async def _looking(self) -> None:
        while not self._desk.died.is_set():
            try:
                await self._look()
            except ServerFailed as error:  # whether it works is for probes to say
                log.debug("%s: %s", self._desk.settings.name, error)
            await asyncio.sleep(min(_LOOK_S, self._desk.settings.probe_s))

    async def _look(self) -> None:
        holds, held = self._desk.holds, self._desk.held
        pressure = await self._desk.server.pressure()
        if not held and self._desk.holds == holds:  # one that an update overtakes belongs to neither side of it
            self.seen(pressure)

    def seen(self, pressure: Pressure) -> None:
        """A look at it. Another beginning is another server: nobody knows what that one holds."""
        desk = self._desk
        if pressure.began is not None:
            if self._began is not None and self._began != pressure.began:
                desk.disown("it was restarted by somebody, and has other weights than ours")
                return
            self._began = pressure.began
        desk.limit.observe(self._unforced(pressure), desk.gate.inside)
        desk.gate.turn()

    def _unforced(self, pressure: Pressure) -> Pressure:
        """Requests that recompute after an update are counted by the server as preempted: no sign of pressure."""
        if self._holds != self._desk.holds and self._desk.settings.kv == "recompute":
            self._forced += pressure.preemptions - self._preempted
        self._holds, self._preempted = self._desk.holds, pressure.preemptions
        counted = max(0, pressure.preemptions - self._forced)
        return Pressure(pressure.running, pressure.waiting, pressure.cache_used, counted, pressure.began)

    async def _mourning(self) -> None:
        assert self._process is not None
        how = await self._process.ended()
        if not self._desk.closed:
            self._desk.health.ended(f"the server has ended: {how}")
            self._desk.react()


async def _run(loop: Callable[[], Awaitable[None]]) -> None:
    try:
        await loop()
    except Exception:  # the boundary of a task that nobody waits for: it must not end unheard
        log.exception("a loop that watches a server has failed")
        raise
