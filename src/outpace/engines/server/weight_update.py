"""WeightUpdater: loads new weights into one server. Verifies them while it samples, swaps them while it is paused.

    prepare ──▶ pause ──▶ swap ──▶ label ──▶ resume          whole models
       │          │         └─────────┴─────────┴─ failure: torn. The weights are unknown; no requests until a load
       └──────────┴─ failure: resume if paused, keep the old version

    prepare ──▶ swap                                         the same, if the server pauses and resumes by itself
    prepare ──▶ register ──▶ new requests use it             adapters: running requests keep their own

Calls to a server with hundreds of streams take seconds. A server that pauses by itself keeps sampling and receiving
requests meanwhile. A request sent before we know of the swap counts as sampled by the old version.

Invariants
- One update at a time; versions never go backwards.
- Every call has a deadline. Cancelling `load` does not cancel the update, which runs to completion.
- A server left paused by a torn update can be updated like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from outpace.engines.server.protocol import PreparedWeights, Transport
from outpace.engines.server.state import ServerState
from outpace.errors import CorruptData, OutpaceError, UpdateFailed, UpdateTorn, one_line
from outpace.types import LoadPhases, LoadReport, Manifest, Version

log = logging.getLogger(__name__)
T = TypeVar("T")

_RESUME_ON_CLOSE_S = 2.0
_CLEAN_UP_S = 3.0


class WeightUpdater:
    """Loads weight versions into one server."""

    def __init__(self, state: ServerState, transport: Transport) -> None:
        self._state = state
        self._transport = transport
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        task = asyncio.create_task(self._load(manifest, pinned))
        self._track(task)
        return await asyncio.shield(task)

    def remove_unused_adapters(self) -> None:
        """Remove unused adapters in the background."""
        for version in self._state.loaded_versions.remove_unused():
            self._track(asyncio.create_task(self._remove_adapter(version)))

    async def close(self, server_stays: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._clean_up(server_stays)

    async def _clean_up(self, server_stays: bool) -> None:
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                await self._transport.close(server_stays)
        except (OutpaceError, OSError) as error:
            reason = one_line(error) or "no answer"
            log.warning("%s: weights of this run may remain on the server: %s", self._state.server.url, reason)

    def _track(self, task: asyncio.Task[T]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        async with self._lock:
            self._check_allowed(manifest, pinned)
            began = time.perf_counter()
            ready = await self._prepare(manifest)
            prepared = time.perf_counter()
            phases = LoadPhases()
            if ready.adapter is None:
                phases = await self._replace(ready)
            else:
                await self._register(ready, pinned)
            self._state.react()
            self.remove_unused_adapters()
            return LoadReport(
                version=manifest.version,
                pause_s=phases.pause_s,
                seconds=time.perf_counter() - began,
                bytes=ready.nbytes,
                phases=msgspec.structs.replace(phases, prepare_s=prepared - began),
            )

    def _check_allowed(self, manifest: Manifest, pinned: bool) -> None:
        if self._state.health.state == "dead":
            raise UpdateFailed(f"{self._state.server.url} is dead: {self._state.health.why}")
        if pinned and not self._state.settings.pins:
            raise UpdateFailed(f"{self._state.server.url} cannot hold a second weight set")
        if not pinned and self._state.loaded_versions.is_downgrade(manifest.version):
            raise UpdateFailed(f"{self._state.server.url} cannot go back to version {manifest.version}")

    async def _prepare(self, manifest: Manifest) -> PreparedWeights:
        try:
            return await self._with_deadline("preparing the update", self._transport.prepare(manifest))
        except (CorruptData, UpdateFailed):
            raise
        except (OutpaceError, OSError) as error:
            raise UpdateFailed(f"version {manifest.version}: {one_line(error)}") from error

    async def _replace(self, ready: PreparedWeights) -> LoadPhases:
        """Replace the weights of the whole model."""
        state, pauses = self._state, self._transport.needs_pause
        with state.updating(paused=pauses):
            began = time.perf_counter()
            if pauses:
                await self._pause(ready.version)
            try:
                phases = await self._swap(ready, time.perf_counter() - began)
            except (Exception, asyncio.CancelledError) as error:  # after any failure the weights are unknown
                await self._mark_torn(ready.version, error)
                raise
        state.loaded_versions.record_load(ready.version)
        state.health.loaded()
        return phases

    async def _swap(self, ready: PreparedWeights, hold_s: float) -> LoadPhases:
        """Swap the weights, then label them and resume if the server does not do so by itself."""
        state, began = self._state, time.perf_counter()
        state.loaded_versions.newest = max(state.loaded_versions.newest, ready.version)  # its tokens may arrive at once
        phases = await self._with_deadline("swapping the weights", self._transport.swap(ready))
        if phases is not None:
            return phases
        await self._with_deadline("labeling the weights", state.server.label(ready.version))
        if not self._transport.needs_pause:
            return LoadPhases()
        copied = time.perf_counter()
        await self._with_deadline("resuming the server", state.server.resume(state.settings.kv == "recompute"))
        return LoadPhases(hold_s=hold_s, copy_s=copied - began, resume_s=time.perf_counter() - copied)

    async def _pause(self, version: Version) -> None:
        """Pause the server. On failure resume it, in case it did pause."""
        try:
            await self._with_deadline("pausing the server", self._state.server.pause())
        except (OutpaceError, OSError, asyncio.CancelledError) as error:
            await self._try_resume()
            raise UpdateFailed(f"version {version}: {one_line(error) or 'cancelled'}") from error

    async def _mark_torn(self, version: Version, error: BaseException) -> None:
        """Mark the weights as unknown and end all requests, then resume the server so that probes work again."""
        cause = one_line(error) or type(error).__name__
        self._state.torn(f"the update to version {version} failed half-way: {cause}")
        await self._try_resume()
        raise UpdateTorn(f"{self._state.server.url}: {self._state.health.why}") from error

    async def _try_resume(self) -> None:
        settings = self._state.settings
        patience_s = _RESUME_ON_CLOSE_S if self._state.closed else min(settings.control_s, settings.probe_deadline_s)
        try:
            async with asyncio.timeout(patience_s):
                await self._state.server.resume(recompute=False)
        except (OutpaceError, OSError) as error:
            log.warning("%s may still be paused: %s", self._state.server.url, one_line(error) or "no answer")

    async def _register(self, ready: PreparedWeights, pinned: bool) -> None:
        versions = self._state.loaded_versions
        if not versions.has_adapter(ready.version):
            try:
                await self._with_deadline("registering the adapter", self._transport.swap(ready))
            except (OutpaceError, OSError) as error:
                self._track(asyncio.create_task(self._remove_adapter(ready.version)))
                raise UpdateFailed(f"version {ready.version}: {one_line(error)}") from error
        versions.record_load(ready.version, ready.adapter, pinned=pinned)
        if not pinned:
            self._state.health.loaded()

    async def _remove_adapter(self, version: Version) -> None:
        try:
            async with self._lock:
                if not self._state.loaded_versions.has_adapter(version):
                    await self._with_deadline("removing the adapter", self._transport.forget(version))
        except (OutpaceError, OSError) as error:  # it only wastes memory
            log.warning("%s: cannot remove adapter version %d: %s", self._state.server.url, version, one_line(error))

    async def _with_deadline(self, what: str, call: Awaitable[T]) -> T:
        control_s = self._state.settings.control_s
        timeout = asyncio.timeout(control_s)
        try:
            async with timeout:
                return await call
        except TimeoutError as error:
            if not timeout.expired():
                raise
            late = f"{what} took more than engine.control_s = {control_s:g} s"
            raise UpdateFailed(f"{self._state.server.url}: {late}") from error
