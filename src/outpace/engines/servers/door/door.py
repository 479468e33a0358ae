"""ServerEngine: `outpace.protocols.Engine` over HTTP.

    callers ─ generate, abort, peek ─▶ RequestRunner ─┐
    controller ─ load ───────────────▶ WeightUpdater ─┼─▶ ServerState: health, versions, admission, requests ─▶ Server
    background ─ probes, metrics ────▶ HealthMonitor ─┘

    waiter       waits for                                          woken by
    a request    weights, a healthy server, a slot (AdmissionQueue) load, a probe, a finished request, abort, death
    a request    the next token                                     the server, abort, `idle_s` without a token, death
    an update    the update lock; each call to the server           the previous update; `control_s`
    `broken`     the death of the server                            a probe, process exit, foreign weights

Invariants
- Every wait on an unresponsive server is bounded: tokens by `idle_s`, control calls by `control_s`, probes by
  `probe_deadline_s`.
- When the server dies, every in-flight request returns as lost, with the tokens it has, before `broken` returns.
- After a start with unknown weights, or a torn update, nothing is sent until a load succeeds.
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

_REPLY_FLUSH_S = 0.5  # time for replies of lost requests to leave this process


class Door:
    """Implements `Engine`.

    `process` is set if this run launched the server; `close` then stops it. `claim` keeps other runs off the server and
    is released on `close`."""

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
        self._labels = transport.holds_still  # with adapters, the version is part of the adapter name
        self._runner = Sender(self._desk, spans=self._labels)
        self._updater = Updater(self._desk, transport)
        self._monitor = Watch(self._desk, process)
        self._cpu_s = 0.0  # CPU seconds the server used before `start`

    async def start(self) -> None:
        """Start monitoring the server. It accepts requests at once if its weight version is known, else after `load`.

        Raises `ServerFailed`."""
        state = self._desk
        await gone_on(state.server)
        state.health.started()
        if state.settings.version != STALE:
            if self._labels:
                await state.server.label(state.settings.version)
            state.health.loaded()
        if self._process is not None:
            self._cpu_s = self._process.cpu_s()
        state.react()
        self._monitor.start()

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        self._raise_if_closed()
        try:
            return await self._runner.generate(request_id, token_ids, sampling, min_version, pinned)
        finally:
            self._updater.tidy()

    async def abort(self, request_ids: list[str]) -> None:
        await self._runner.abort(request_ids)

    async def peek(self, request_id: str, after: int) -> Ints:
        return await self._desk.under_way.peek(request_id, after)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        self._raise_if_closed()
        return await self._updater.load(manifest, pinned)

    async def release_pinned(self) -> None:
        """Unpin the pinned version. Requests already sampling from it finish."""
        self._desk.shelf.pinned = None
        self._updater.tidy()

    async def drain(self) -> None:
        """Finish in-flight requests and accept no new ones."""
        self._desk.health.drain()
        self._desk.react()

    async def stats(self) -> EngineStats:
        state = self._desk
        state.tally.turns += state.held  # a paused server is not stalled: updates have their own deadlines
        return EngineStats(
            version=state.shelf.version,
            running=state.gate.inside,
            waiting=state.gate.waiting,
            tokens=state.tally.tokens,
            prefill_tokens=state.tally.prefill_tokens,
            steps=state.tally.pieces,
            busy_s=state.busy.seconds,
            core_s=await self._core_s(),
            eval_busy_s=state.eval_busy.seconds,
            slots=state.settings.slots,
            threads=state.settings.threads,
            turns=state.tally.turns,
            health=state.health.state,
            limit=state.limit.value,
            retries=state.tally.retries,
        )

    async def broken(self) -> PartFailed:
        """Wait until the server is dead and every process we launched is gone. Returns the cause."""
        await self._desk.died.wait()
        await asyncio.sleep(_REPLY_FLUSH_S)
        why, log_tail = f"{self._desk.server.url}: {self._desk.health.why}", ""
        if self._process is not None:
            log_tail = self._process.log_tail()
            await self._process.stop()  # its replacement needs the port and the memory
        return PartFailed(self._desk.settings.name, why, f"{why}\n{log_tail}".strip())

    async def close(self) -> None:
        """End in-flight requests as lost. Stop the server if we launched it, else remove our weights from it."""
        self._desk.closed = True
        self._desk.health.ended("the engine is closed")
        self._desk.react()
        await self._monitor.close()
        await self._updater.close(server_stays=self._process is None)
        try:
            await self._desk.server.close()
        except ServerFailed as error:
            log.warning("%s: %s", self._desk.settings.name, error)
        if self._process is not None:
            await self._process.stop()
        if self._claim is not None:
            self._claim.release()

    def _raise_if_closed(self) -> None:
        if self._desk.closed:
            raise RequestFailed("the engine is closed")

    async def _core_s(self) -> float:
        """CPU seconds the server spent on training rollouts. Wall-clock busy seconds if CPU time is not meaningful."""
        busy, total = self._desk.busy.seconds, self._desk.busy.seconds + self._desk.eval_busy.seconds
        if self._process is None or not self._desk.settings.threads or not busy:
            return busy
        spent = await asyncio.to_thread(self._process.cpu_s) - self._cpu_s
        return min(spent, total * self._desk.settings.threads) * busy / total
