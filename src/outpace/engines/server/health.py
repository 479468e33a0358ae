"""HealthMonitor: probes one server, reads its load and watches its process.

    probes    every `probe_s`: sample one token; on a busy server  ─▶ health; sooner if requests failed
              any token of another request counts as well
    metrics   every second: read the reported load                 ─▶ concurrency limit; detects a restarted server
    exit      of the process, if we launched it                    ─▶ health

A server paused by our own update cannot answer a probe: probing rests meanwhile, and a probe that overlaps a pause is
ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from outpace.engines.server.protocol import Pressure
from outpace.engines.server.state import ServerState
from outpace.errors import ServerFailed, ServerSilent, one_line

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
        """Wait until the next probe is due. Sooner if requests failed, since a suspect server gets no work."""
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
        """The load without forced preemptions: the server counts requests that recompute after an update."""
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
