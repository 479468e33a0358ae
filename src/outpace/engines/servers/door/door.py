"""The engine that a server is: `outpace.protocols.Engine` over HTTP.

    callers ─ generate, abort, peek ─▶ Sender ──┐
    controller ─ load ───────────────▶ Updater ─┼─▶ Desk: health, weights, gate, requests under way ─▶ Server
    loops ─ probe, look ─────────────▶ Watch ───┘

    who            waits for                                        who unblocks it
    a request      weights, a healthy server, a place (Gate)        load, a probe, a request that ends, abort, death
    a request      the next token                                   the server; abort; idle_s without one; death
    an update      its turn; each call of the server                the update before; control_s
    broken         death                                            a probe, the end of the process, foreign weights

Invariants
- Nothing waits without end on a server that does not answer: tokens by `idle_s`, calls by `control_s`, probes by
  `probe_deadline_s`.
- When the server is dead every request under way is answered, as lost and with what it has, before `broken` says so.
- Between a start without known weights, or a torn update, and the next successful load nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging

from outpace.engines.servers.door.desk import Desk, DoorSettings
from outpace.engines.servers.door.health import HealthMachine
from outpace.engines.servers.door.limits import Limit
from outpace.engines.servers.door.sending import Sender
from outpace.engines.servers.door.updating import Updater
from outpace.engines.servers.door.watching import Process, Watch
from outpace.engines.servers.spec import STALE, Server, Transport
from outpace.engines.servers.starting.claims import ServerClaim
from outpace.engines.servers.starting.readiness import gone_on
from outpace.errors import PartFailed, RequestFailed, ServerFailed
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, Version

__all__ = ["Door", "DoorSettings"]

log = logging.getLogger(__name__)

_ANSWERS_OUT_S = 0.5  # until lost answers have left this process


class Door:
    """Implements `Engine`. `process` is the server's, where it was started for this door, which then ends it. `claim`
    keeps other runs from the server, and is released with it."""

    def __init__(
        self,
        server: Server,
        transport: Transport,
        health: HealthMachine,
        limit: Limit,
        settings: DoorSettings,
        process: Process | None = None,
        claim: ServerClaim | None = None,
    ) -> None:
        self._claim = claim
        self._desk = Desk(server, health, limit, settings)
        self._process = process
        self._labels = transport.holds_still  # an adapter's version is in its name
        self._sender = Sender(self._desk, spans=self._labels)
        self._updater = Updater(self._desk, transport)
        self._watch = Watch(self._desk, process)
        self._cpu_s = 0.0  # of the server's start

    async def start(self) -> None:
        """The server has answered: from here on it is watched, and where its weights are known it serves.

        Raises a `ServerFailed`."""
        desk = self._desk
        await gone_on(desk.server)
        desk.health.started()
        if desk.settings.version != STALE:
            if self._labels:
                await desk.server.label(desk.settings.version)
            desk.health.loaded()
        if self._process is not None:
            self._cpu_s = self._process.cpu_s()
        desk.react()
        self._watch.start()

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        self._refuse_closed()
        try:
            return await self._sender.generate(request_id, token_ids, sampling, min_version, pinned)
        finally:
            self._updater.tidy()

    async def abort(self, request_ids: list[str]) -> None:
        await self._sender.abort(request_ids)

    async def peek(self, request_id: str, after: int) -> Ints:
        return await self._desk.under_way.peek(request_id, after)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        self._refuse_closed()
        return await self._updater.load(manifest, pinned)

    async def release_pinned(self) -> None:
        """Requests that sample by it come to their end."""
        self._desk.shelf.pinned = None
        self._updater.tidy()

    async def drain(self) -> None:
        """Finish what is under way; take nothing more."""
        self._desk.health.drain()
        self._desk.react()

    async def stats(self) -> EngineStats:
        desk = self._desk
        desk.tally.turns += desk.held  # an update has deadlines of its own, and is no silence
        return EngineStats(
            version=desk.shelf.version,
            running=desk.gate.inside,
            waiting=desk.gate.waiting,
            tokens=desk.tally.tokens,
            prefill_tokens=desk.tally.prefill_tokens,
            steps=desk.tally.pieces,
            busy_s=desk.busy.seconds,
            core_s=await self._core_s(),
            eval_busy_s=desk.eval_busy.seconds,
            slots=desk.settings.slots,
            threads=desk.settings.threads,
            turns=desk.tally.turns,
            health=desk.health.state,
            limit=desk.limit.value,
            retries=desk.tally.retries,
        )

    async def broken(self) -> PartFailed:
        """Waits until the server is dead and all that we have started is gone; says why."""
        await self._desk.died.wait()
        await asyncio.sleep(_ANSWERS_OUT_S)
        why, said = f"{self._desk.server.url}: {self._desk.health.why}", ""
        if self._process is not None:
            said = self._process.log_tail()
            await self._process.stop()  # its successor needs the port and the memory
        return PartFailed(self._desk.settings.name, why, f"{why}\n{said}".strip())

    async def close(self) -> None:
        """Answer what is under way, let a server that is not ours go on without what we gave it, end one that is."""
        self._desk.closed = True
        self._desk.health.ended("the engine was closed")
        self._desk.react()
        await self._watch.close()
        await self._updater.close(server_stays=self._process is None)
        try:
            await self._desk.server.close()
        except ServerFailed as error:
            log.warning("%s: %s", self._desk.settings.name, error)
        if self._process is not None:
            await self._process.stop()
        if self._claim is not None:
            self._claim.release()

    def _refuse_closed(self) -> None:
        if self._desk.closed:
            raise RequestFailed("the engine was closed")

    async def _core_s(self) -> float:
        """Processor time of the server that went into training rollouts; the clock's, where processors say nothing."""
        busy, of_all = self._desk.busy.seconds, self._desk.busy.seconds + self._desk.eval_busy.seconds
        if self._process is None or not self._desk.settings.threads or not busy:
            return busy
        spent = await asyncio.to_thread(self._process.cpu_s) - self._cpu_s
        return min(spent, of_all * self._desk.settings.threads) * busy / of_all
