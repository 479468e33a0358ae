"""Transports that bring snapshots to servers. Each class implements `outpace.engines.server.protocol.Transport`.

    class                 server   the server loads the weights
    MemoryTransport       vLLM     from shared memory or over CUDA IPC, through outpace's transfer engine
    CollectiveTransport   vLLM     received over a process group while it samples
    FilesTransport        vLLM     from a directory of safetensors files
    AdapterTransport      vLLM     as a new adapter beside the model, without a pause
    SglangFiles           SGLang   from a directory of safetensors files
    SglangAdapters        SGLang   as a new adapter beside the model

SGLang's other routes are not used. `/update_weights_from_tensor` and `/update_weights_from_ipc` take pickles, which
can run code in the server. `/update_weights_from_distributed` receives straight into the live weights: the server is
paused for the whole transfer, nothing is verified first, and if the learner dies in the middle the server waits for
it forever.
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

_REMEDY = """start the server with --weight-transfer-config '{"backend": "outpace"}'"""


@dataclass
class MemoryReady:
    version: Version
    nbytes: int
    update: dict[str, Any]
    label: str  # of the weights, for servers that report versions


def ready_of(manifest: Manifest, nbytes: int, update: dict[str, Any]) -> MemoryReady:
    return MemoryReady(manifest.version, nbytes, update, label_of(manifest.incarnation, manifest.version))


class MemoryTransport:
    """Implements `Transport` over shared memory or CUDA IPC, through outpace's transfer engine in vLLM.

    memory   the server's workers map the snapshot file; we verify its checksums before the pause
    ipc      the workers open the snapshot in GPU memory and verify it, since only they can

    vLLM considers an update open from `start` to `finish`, or until it fails. An update left open, for instance by a
    killed engine, is closed first."""

    holds_still = True

    def __init__(self, http: Http, control_s: float, copy: LocalSnapshot | None = None) -> None:
        """`copy`: a local snapshot that is kept current by deltas."""
        self._http = http
        self._control_s = control_s
        self._copy = copy
        self._thread = OneThread()
        self._initialized = False

    async def prepare(self, manifest: Manifest) -> MemoryReady:
        await self.initialised()
        if manifest.device is not None:
            return ready_of(manifest, manifest.nbytes, device_update(manifest))
        return await self._thread.run(self._verified, manifest)

    async def swap(self, ready: Ready) -> None:
        assert isinstance(ready, MemoryReady), "prepared by another transport"
        await self.update(ready.update, ready.label)

    async def forget(self, version: Version) -> None:
        """Nothing is stored."""

    async def close(self, server_stays: bool) -> None:
        try:
            if self._copy is not None:
                await self._thread.run(self._copy.close)
        finally:
            self._thread.close()

    async def initialised(self) -> None:
        if self._initialized:
            return
        try:
            await self._post("/init_weight_transfer_engine", {"init_info": {}})
        except (ServerFaulty, ServerRefused) as error:
            raise UpdateFailed(f"{error}; {_REMEDY}") from error
        self._initialized = True

    async def update(self, update: dict[str, Any], label: str | None = None) -> None:
        """Run one update from start to finish, and label the server's weights with `label` if given."""
        try:
            await self._post("/start_weight_update")
        except ServerFaulty:
            await self._close_open_update()
            await self._post("/start_weight_update")
        await self._post("/update_weights", {"update_info": update})
        await self._post("/finish_weight_update", {"weight_version": label} if label is not None else {})

    async def _close_open_update(self) -> None:
        """Close an update that was left open. Repeatable: after a failed call the server may drop the connection."""
        await self._http.post("/finish_weight_update", {}, deadline_s=self._control_s, repeatable=True)

    def _verified(self, manifest: Manifest) -> MemoryReady:
        transferred = manifest.nbytes
        if self._copy is not None:
            manifest, transferred = self._copy.bring(manifest)
        else:
            snapshot.verify(manifest)
        return ready_of(manifest, transferred, memory_update(manifest))

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
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
