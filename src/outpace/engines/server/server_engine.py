"""ServerEngine: `outpace.protocols.Engine` over HTTP.

    callers ─ generate, abort ───────▶ RequestRunner ─┐
    controller ─ load ───────────────▶ WeightUpdater ─┼─▶ ServerState: health, versions, admission, requests ─▶ Server
    background ─ probes, metrics ────▶ HealthMonitor ─┘

    waiter       waits for                                          woken by
    a request    weights, a healthy server, a slot (AdmissionQueue) load, a probe, a finished request, abort, death
    a request    the next token                                     the server, abort, `idle_s` without a token, death
    an update    the update lock; each call to the server           the previous update; `control_s`
    `broken`     the death of the server                            a probe, process exit, foreign weights

    HealthMonitor
    probes    every `probe_s`: sample one token; on a busy server  ─▶ health; sooner if requests failed
              any token of another request counts as well
    metrics   every second: read the reported load                 ─▶ concurrency limit; detects a restarted server
    exit      of the process, if we launched it                    ─▶ health

A server paused by our own update cannot answer a probe: none is sent meanwhile, and a probe that fails while
overlapping a pause is ignored.

Invariants
- Every wait on an unresponsive server is bounded: tokens by `idle_s`, control calls by `control_s`, probes by
  `probe_deadline_s`.
- When the server dies, every in-flight request returns as lost, with the tokens it has, before `broken` returns.
- After a start with unknown weights, or a torn update, nothing is sent until a load succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from outpace.engines.server.launch import ServerClaim, resume_if_left_paused
from outpace.engines.server.protocol import STALE, Pressure, Server, Transport
from outpace.engines.server.request import RequestRunner
from outpace.engines.server.state import ServerEngineSettings, ServerState
from outpace.engines.server.weight_update import WeightUpdater
from outpace.errors import ComponentFailed, EngineClosed, ServerFailed, ServerSilent, one_line
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, Version

log = logging.getLogger(__name__)

_METRICS_S = 1.0
_SUSPECT_PROBE_S = 0.5


class ProcessHandle(Protocol):
    """The process of a server that we launched (`ServerProcess`)."""

    async def ended(self) -> str: ...

    async def stop(self) -> None: ...

    def log_tail(self, lines: int = 30) -> str: ...

    def cpu_s(self) -> float: ...


class HealthMonitor:
    """Background tasks that probe a server, read its load and wait for its process."""

    def __init__(self, state: ServerState, process: ProcessHandle | None) -> None:
        self._state = state
        self._process = process
        self._began: float | None = None
        self._preempted = 0  # at the last observation
        self._forced = 0  # preemptions caused by our own updates
        self._holds = 0  # pauses so far, at the last observation
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loops: list[Callable[[], Awaitable[None]]] = [self._probe_loop, self._metrics_loop]
        if self._process is not None:
            loops.append(self._wait_for_exit)
        self._tasks = [asyncio.create_task(_logging_errors(loop)) for loop in loops]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe_loop(self) -> None:
        while not self._state.died.is_set():
            await self._wait_for_next_probe()
            if not self._state.paused:
                await self.probe()

    async def _wait_for_next_probe(self) -> None:
        """Wait until the next probe is due: sooner if requests failed, since a suspect server gets no work."""
        probe_s = self._state.settings.probe_s
        try:
            async with asyncio.timeout(probe_s):
                await self._state.probe_soon.wait()
                await asyncio.sleep(min(_SUSPECT_PROBE_S, probe_s))
        except TimeoutError:
            return

    async def probe(self) -> None:
        state, pauses = self._state, self._state.pauses
        state.probe_soon.clear()
        try:
            await self._sample_token()
            if not state.health.serves and self._began is not None:  # it may have been restarted
                await self._read_load()
        except ServerFailed as error:
            if state.pauses == pauses:
                log.warning("%s: probe failed: %s", state.settings.name, error)
                state.health.probe_failed(one_line(error))
        else:
            state.health.probe_passed()
            state.counters.turns += 1
        state.react()

    async def _sample_token(self) -> None:
        """Sample one token. A probe that times out in the queue of a busy server passes if other requests got tokens
        meanwhile."""
        state, pieces = self._state, self._state.counters.pieces
        try:
            await state.server.probe(state.settings.probe_deadline_s)
        except ServerSilent:
            if state.counters.pieces == pieces:
                raise

    async def _metrics_loop(self) -> None:
        while not self._state.died.is_set():
            try:
                await self._read_load()
            except ServerFailed as error:  # probes decide about health
                log.debug("%s: %s", self._state.settings.name, error)
            await asyncio.sleep(min(_METRICS_S, self._state.settings.probe_s))

    async def _read_load(self) -> None:
        pauses, paused = self._state.pauses, self._state.paused
        pressure = await self._state.server.pressure()
        if not paused and self._state.pauses == pauses:  # skip an observation that overlaps a pause
            self._observe(pressure)

    def _observe(self, pressure: Pressure) -> None:
        """Adapt the limit to the observed load. A changed start time means a restarted server with unknown weights."""
        state = self._state
        if pressure.began is not None:
            if self._began is not None and self._began != pressure.began:
                state.reject_foreign_weights("the server was restarted and no longer has the weights of this run")
                return
            self._began = pressure.began
        state.limit.observe(self._without_forced_preemptions(pressure), state.admission.running)
        state.admission.wake()

    def _without_forced_preemptions(self, pressure: Pressure) -> Pressure:
        """The load without forced preemptions: the server also counts requests that recompute after an update."""
        if self._holds != self._state.pauses and self._state.settings.kv == "recompute":
            self._forced += pressure.preemptions - self._preempted
        self._holds, self._preempted = self._state.pauses, pressure.preemptions
        counted = max(0, pressure.preemptions - self._forced)
        return Pressure(pressure.running, pressure.waiting, pressure.cache_used, counted, pressure.began)

    async def _wait_for_exit(self) -> None:
        assert self._process is not None
        how = await self._process.ended()
        if not self._state.closed:
            self._state.health.ended(f"the server process {how}")
            self._state.react()


async def _logging_errors(loop: Callable[[], Awaitable[None]]) -> None:
    try:
        await loop()
    except Exception:  # nothing awaits this task, so log the error here
        log.exception("a server monitoring task failed")
        raise


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
        self._labels = not settings.pins  # with adapters, the version is part of the adapter name
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
            raise EngineClosed("the engine is closed")

    async def _core_s(self) -> float:
        """CPU seconds the server spent on training rollouts. Wall-clock busy seconds if CPU time is not meaningful."""
        busy, total = self._state.busy.seconds, self._state.busy.seconds + self._state.eval_busy.seconds
        if self._process is None or not self._state.settings.threads or not busy:
            return busy
        spent = await asyncio.to_thread(self._process.cpu_s) - self._cpu_s
        return min(spent, total * self._state.settings.threads) * busy / total
