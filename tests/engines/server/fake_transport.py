"""A weight transport that transfers nothing, with scripted failures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from outpace.engines.server.protocol import PreparedWeights
from outpace.types import LoadPhases, Manifest


@dataclass
class FakeTransport:
    needs_pause: bool = True
    phases: LoadPhases | None = None  # of a server that pauses by itself
    prepare_fails: Exception | None = None
    swap_fails: Exception | None = None
    swapping: asyncio.Event | None = None  # set when a swap starts; the swap then never ends
    swapped: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)  # the `server_stays` argument of each call

    async def prepare(self, manifest: Manifest) -> PreparedWeights:
        if self.prepare_fails is not None:
            raise self.prepare_fails
        adapter = None if self.needs_pause or self.phases else f"v{manifest.version}"
        return PreparedWeights(manifest.version, 10, {}, adapter)

    async def swap(self, ready: Any) -> LoadPhases | None:
        if self.swapping is not None:
            self.swapping.set()
            await asyncio.Event().wait()
        if self.swap_fails is not None:
            raise self.swap_fails
        self.swapped.append(ready.version)
        return self.phases

    async def forget(self, version: int) -> None:
        self.forgotten.append(version)

    async def close(self, server_stays: bool) -> None:
        self.closed.append(server_stays)
