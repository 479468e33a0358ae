"""ServerEngine: `outpace.protocols.Engine` over HTTP.

    callers ─ generate, abort ───────▶ RequestRunner ─┐
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

from outpace.engines.server.health import HealthMonitor, ProcessHandle
from outpace.engines.server.launch import ServerClaim, resume_if_left_paused
from outpace.engines.server.protocol import STALE, Server, Transport
from outpace.engines.server.request import RequestRunner
from outpace.engines.server.state import ServerEngineSettings, ServerState
from outpace.engines.server.weight_update import WeightUpdater
from outpace.errors import ComponentFailed, RequestFailed, ServerFailed
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, Version

log = logging.getLogger(__name__)

_REPLY_FLUSH_S = 0.5  # time for replies of lost requests to leave this process


class ServerEngine:
    """Implements `Engine`.

    `process` is set if this run launched the server; `close` then stops it. `claim` keeps other runs off the server and
    is released on `close`."""

    def __init__(
        self,
        server: Server,
        transport: Transport,
        settings: ServerEngineSettings,
        process: ProcessHandle | None = None,
        claim: ServerClaim | None = None,
    ) -> None:
        self._claim = claim
        self._state = ServerState(server, settings)
        self._process = process
        self._labels = transport.needs_pause  # with adapters, the version is part of the adapter name
        self._runner = RequestRunner(self._state, spans=self._labels)
        self._updater = WeightUpdater(self._state, transport)
        self._monitor = HealthMonitor(self._state, process)
        self._cpu_s = 0.0  # CPU seconds the server used before `start`

    async def start(self) -> None:
        """Start monitoring the server. It accepts requests at once if its weight version is known, else after `load`.

        Raises `ServerFailed`."""
        state = self._state
        await resume_if_left_paused(state.server)
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
            self._updater.remove_unused_adapters()

    async def abort(self, request_ids: list[str]) -> None:
        await self._runner.abort(request_ids)

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        return await self._state.active_requests.read(request_id, after)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        self._raise_if_closed()
        return await self._updater.load(manifest, pinned)

    async def release_pinned(self) -> None:
        """Unpin the pinned version. Requests already sampling from it finish."""
        self._state.loaded_versions.pinned = None
        self._updater.remove_unused_adapters()

    async def drain(self) -> None:
        """Finish in-flight requests and accept no new ones."""
        self._state.health.drain()
        self._state.react()

    async def stats(self) -> EngineStats:
        state = self._state
        state.counters.turns += state.paused  # a paused server is not stalled: updates have their own deadlines
        return EngineStats(
            version=state.loaded_versions.version,
            running=state.admission.running,
            waiting=state.admission.waiting,
            tokens=state.counters.tokens,
            prefill_tokens=state.counters.prefill_tokens,
            steps=state.counters.pieces,
            busy_s=state.busy.seconds,
            core_s=await self._core_s(),
            eval_busy_s=state.eval_busy.seconds,
            slots=state.settings.slots,
            threads=state.settings.threads,
            turns=state.counters.turns,
            health=state.health.state,
            limit=state.limit.value,
            retries=state.counters.retries,
        )

    async def broken(self) -> ComponentFailed:
        """Wait until the server is dead and every process we launched is gone. Returns the cause."""
        await self._state.died.wait()
        await asyncio.sleep(_REPLY_FLUSH_S)
        why, log_tail = f"{self._state.server.url}: {self._state.health.why}", ""
        if self._process is not None:
            log_tail = self._process.log_tail()
            await self._process.stop()  # its replacement needs the port and the memory
        return ComponentFailed(self._state.settings.name, why, f"{why}\n{log_tail}".strip())

    async def close(self) -> None:
        """End in-flight requests as lost. Stop the server if we launched it, else remove our weights from it."""
        if self._state.closed:
            return
        self._state.closed = True
        self._state.health.ended("the engine is closed")
        self._state.react()
        await self._monitor.close()
        await self._updater.close(server_stays=self._process is None)
        try:
            await self._state.server.close()
        except ServerFailed as error:
            log.warning("%s: %s", self._state.settings.name, error)
        if self._process is not None:
            await self._process.stop()
        if self._claim is not None:
            self._claim.release()

    def _raise_if_closed(self) -> None:
        if self._state.closed:
            raise RequestFailed("the engine is closed")

    async def _core_s(self) -> float:
        """CPU seconds the server spent on training rollouts. Wall-clock busy seconds if CPU time is not meaningful."""
        busy, total = self._state.busy.seconds, self._state.busy.seconds + self._state.eval_busy.seconds
        if self._process is None or not self._state.settings.threads or not busy:
            return busy
        spent = await asyncio.to_thread(self._process.cpu_s) - self._cpu_s
        return min(spent, total * self._state.settings.threads) * busy / total
