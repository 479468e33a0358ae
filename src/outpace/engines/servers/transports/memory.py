"""Weights that the server takes out of memory by itself, through outpace's transfer engine in it.

    memory   the snapshot file is mapped by the server's workers; its checksums are verified here, outside the pause
    ipc      the snapshot is in GPU memory that the workers open; they verify it, for nobody else can

vLLM counts an update as open from `start` to `finish`, or until it fails. One that somebody else has left open, a door
that was killed for instance, is closed first.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from outpace.engines.servers.http import Http
from outpace.engines.servers.spec import Ready
from outpace.engines.servers.transports.thread import OneThread
from outpace.engines.servers.vllm.labels import label_of
from outpace.errors import ServerFaulty, ServerRefused, UpdateFailed
from outpace.types import Manifest, Version
from outpace.weights import snapshot
from outpace.weights.local import LocalSnapshot

_REMEDY = """is it started with --weight-transfer-config '{"backend": "outpace"}'?"""


@dataclass
class MemoryReady:
    version: Version
    nbytes: int
    update: dict[str, Any]
    label: str  # of the weights, for servers that account for them


def ready_of(manifest: Manifest, nbytes: int, update: dict[str, Any]) -> MemoryReady:
    return MemoryReady(manifest.version, nbytes, update, label_of(manifest.incarnation, manifest.version))


class MemoryTransport:
    """Implements `Transport`."""

    holds_still = True

    def __init__(self, http: Http, control_s: float, copy: LocalSnapshot | None = None) -> None:
        """`copy`: follow by deltas what is published."""
        self._http = http
        self._control_s = control_s
        self._copy = copy
        self._thread = OneThread()
        self._initialised = False

    async def prepare(self, manifest: Manifest) -> MemoryReady:
        await self.initialised()
        if manifest.device is not None:
            return ready_of(manifest, manifest.nbytes, device_update(manifest))
        return await self._thread.run(self._verified, manifest)

    async def swap(self, ready: Ready) -> None:
        assert isinstance(ready, MemoryReady), "what another transport has prepared"
        await self.update(ready.update, ready.label)

    async def forget(self, version: Version) -> None:
        """Nothing is kept for it."""

    async def close(self, server_stays: bool) -> None:
        try:
            if self._copy is not None:
                await self._thread.run(self._copy.close)
        finally:
            self._thread.close()

    async def initialised(self) -> None:
        if self._initialised:
            return
        try:
            await self._order("/init_weight_transfer_engine", {"init_info": {}})
        except (ServerFaulty, ServerRefused) as error:
            raise UpdateFailed(f"{error}; {_REMEDY}") from error
        self._initialised = True

    async def update(self, update: dict[str, Any], label: str | None = None) -> None:
        """One update from beginning to end. With a `label`, the server's weights have that one afterwards."""
        try:
            await self._order("/start_weight_update")
        except ServerFaulty:
            await self._close_open_update()
            await self._order("/start_weight_update")
        await self._order("/update_weights", {"update_info": update})
        await self._order("/finish_weight_update", {"weight_version": label} if label is not None else {})

    async def _close_open_update(self) -> None:
        """Repeatable: a server that has just failed a call may drop the connection, and with it the next call."""
        await self._http.post("/finish_weight_update", {}, deadline_s=self._control_s, repeatable=True)

    def _verified(self, manifest: Manifest) -> MemoryReady:
        travelled = manifest.nbytes
        if self._copy is not None:
            manifest, travelled = self._copy.bring(manifest)
        else:
            snapshot.verify(manifest)
        return ready_of(manifest, travelled, memory_update(manifest))

    async def _order(self, path: str, body: dict[str, Any] | None = None) -> None:
        await self._http.post(path, body if body is not None else {}, deadline_s=self._control_s)


def memory_update(manifest: Manifest) -> dict[str, Any]:
    label = {"incarnation": manifest.incarnation, "version": manifest.version}
    return {"kind": "memory", "path": manifest.path, "label": label, "tensors": _tensors(manifest)}


def device_update(manifest: Manifest) -> dict[str, Any]:
    assert manifest.device is not None
    return {
        "kind": "ipc",
        "device": manifest.device.device,
        "handle": base64.b64encode(manifest.device.handle).decode(),
        "nbytes": manifest.device.nbytes,
        "sums": manifest.device.sums,
        "tensors": _tensors(manifest),
    }


def _tensors(manifest: Manifest) -> list[dict[str, Any]]:
    kept = ("name", "dtype", "shape", "offset", "nbytes")
    return [{field: getattr(spec, field) for field in kept} for spec in manifest.tensors]
