"""MERGED"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from outpace.engines.servers.spec import Ready
from outpace.engines.servers.transports.memory import MemoryReady, MemoryTransport, ready_of
from outpace.types import Manifest, Version
from outpace.weights.meeting import meeting_for

Send = Callable[[Manifest, dict[str, Any]], Awaitable[None]]
"""Makes the learner send a snapshot to the receiver that joins the given process group. Raises `UpdateFailed`."""


class CollectiveTransport:
    """Implements `Transport` over a process group of two: the learner and the server's worker.

    prepare   server: start receiving, in a thread of its worker
              learner: send; returns when the worker has all tensors with correct checksums
    swap      server: load the received weights

    `updates` sends the update calls to the server."""

    holds_still = True

    def __init__(
        self, updates: MemoryTransport, send: Send, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> None:
        self._updates = updates
        self._send = send
        self._backend = backend
        self._timeout_s = timeout_s

    async def prepare(self, manifest: Manifest) -> MemoryReady:
        meeting = meeting_for(manifest, self._timeout_s, self._backend)
        await self._updates.initialised()
        await self._updates.update({"kind": "fetch", "meeting": meeting})
        await self._send(manifest, meeting)
        return ready_of(manifest, manifest.nbytes, {"kind": "fetched", "key": meeting["key"]})

    async def swap(self, ready: Ready) -> None:
        await self._updates.swap(ready)

    async def forget(self, version: Version) -> None:
        """Nothing is stored."""

    async def close(self, server_stays: bool) -> None:
        await self._updates.close(server_stays)
