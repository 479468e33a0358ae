"""Transports that deliver snapshots to servers. Each class implements `outpace.engines.server.protocol.Transport`.

    class                 server   the server loads the weights
    MemoryTransport       vLLM     from shared memory or over CUDA IPC, through outpace's transfer engine
    CollectiveTransport   vLLM     received over a process group while it samples
    FilesTransport        both     from a directory of safetensors files
    AdapterTransport      both     as a new adapter beside the model, without a pause

SGLang's other routes are not used. `/update_weights_from_tensor` and `/update_weights_from_ipc` take pickles, which
can run code in the server. `/update_weights_from_distributed` receives straight into the live weights: the server is
paused for the whole transfer, nothing is verified first, and if the learner dies in the middle the server waits for
it forever.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import PreparedWeights, SendWeights, Transport, TransportTarget
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, UpdateFailed, one_line
from outpace.types import LoadPhases, Manifest, Version
from outpace.weights import snapshot
from outpace.weights.delta import LocalSnapshot
from outpace.weights.files import SnapshotFolders
from outpace.weights.process_group import rendezvous_for

P = ParamSpec("P")
T = TypeVar("T")


class SingleThread:
    """Runs the file operations of a transport in one thread, in the order of the calls.

    A thread cannot be cancelled: a `prepare` that timed out keeps running, and the next one would write to the same
    place. Here the next one waits for its turn, within its own deadline."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "transport")

    async def run(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run `call` in the thread. A call whose caller was cancelled before its turn is skipped."""
        return await asyncio.wrap_future(self._executor.submit(call, *arguments, **options))

    def close(self) -> None:
        """Drop queued calls. A running call finishes in the background."""
        self._executor.shutdown(wait=False, cancel_futures=True)


_REMEDY = """start the server with --weight-transfer-config '{"backend": "outpace"}'"""


class MemoryTransport:
    """Implements `Transport` over shared memory or CUDA IPC, through outpace's transfer engine in vLLM.

    memory   the server's workers map the snapshot file; we verify its checksums before the swap
    ipc      the workers open the snapshot in GPU memory and verify it, since only they can

    A swap is one call. The server pauses, loads, labels and resumes by itself (`outpace_vllm.core_update`): the pause
    excludes the latency of calls to a busy server."""

    needs_pause = False

    def __init__(
        self,
        http: HttpClient,
        control_s: float,
        copy: LocalSnapshot | None = None,
        label: Callable[[Version], str] = str,
        recompute: bool = False,
    ) -> None:
        """`copy`: a local snapshot that is kept current by deltas."""
        self._http = http
        self._control_s = control_s
        self._copy = copy
        self._label = label
        self._recompute = recompute
        self._thread = SingleThread()
        self._initialized = False

    async def prepare(self, manifest: Manifest) -> PreparedWeights:
        await self.ensure_initialized()
        if manifest.device is not None:
            return PreparedWeights(manifest.version, manifest.nbytes, device_update(manifest))
        return await self._thread.run(self._verified, manifest)

    async def swap(self, ready: PreparedWeights) -> LoadPhases:
        return await self.update(ready.source, label=self._label(ready.version), recompute=self._recompute)

    async def forget(self, version: Version) -> None:
        """Nothing is stored."""

    async def close(self, server_stays: bool) -> None:
        try:
            if self._copy is not None:
                await self._thread.run(self._copy.close)
        finally:
            self._thread.close()

    async def ensure_initialized(self) -> None:
        if self._initialized:
            return
        try:
            await self._http.post("/init_weight_transfer_engine", {"init_info": {}}, deadline_s=self._control_s)
        except (ServerFaulty, ServerRefused) as error:
            raise UpdateFailed(f"{error}; {_REMEDY}") from error
        self._initialized = True

    async def update(self, update: dict[str, Any], **options: Any) -> LoadPhases:
        """Run one update in the server. The options are those of `outpace_vllm.core_update.run_update`."""
        body = {"method": "outpace_update", "kwargs": {"update": update, **options}}
        reply = await self._http.post("/collective_rpc", body, deadline_s=self._control_s)
        try:
            return msgspec.convert(reply["results"][0], LoadPhases)
        except (msgspec.ValidationError, LookupError, TypeError) as error:
            raise ServerFaulty(f"{self._http.url}/collective_rpc: unexpected reply {one_line(reply)}") from error

    def _verified(self, manifest: Manifest) -> PreparedWeights:
        transferred = manifest.nbytes
        if self._copy is not None:
            manifest, transferred = self._copy.update_to(manifest)
        else:
            snapshot.verify(manifest)
        return PreparedWeights(manifest.version, transferred, memory_update(manifest))


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


ReloadCall = Callable[[str], tuple[str, dict[str, Any]]]
"""Maps a folder with weights to the route and body of the call that makes a server load it."""


def vllm_reload(folder: str) -> tuple[str, dict[str, Any]]:
    return "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}


def sglang_reload(folder: str) -> tuple[str, dict[str, Any]]:
    """The defaults would flush the cache, which kills a server that has requests, and use the load format of the
    server's start, which may be `dummy`."""
    body = {"model_path": folder, "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
    return "/update_weights_from_disk", body


class FilesTransport:
    """Implements `Transport` over a directory of safetensors files, for SGLang and any vLLM in dev mode. `directory`
    belongs to this transport and must be readable by the server."""

    needs_pause = True

    def __init__(
        self,
        http: HttpClient,
        control_s: float,
        directory: Path,
        copy: LocalSnapshot | None = None,
        reload_call: ReloadCall = vllm_reload,
    ) -> None:
        """`copy`: a local snapshot that is kept current by deltas."""
        self._http = http
        self._control_s = control_s
        self._folders = SnapshotFolders(directory)
        self._copy = copy
        self._reload_call = reload_call
        self._thread = SingleThread()

    async def prepare(self, manifest: Manifest) -> PreparedWeights:
        return await self._thread.run(self._write, manifest)

    async def swap(self, ready: PreparedWeights) -> None:
        route, body = self._reload_call(ready.source["folder"])
        await self._http.post(route, body, deadline_s=self._control_s)
        await self._thread.run(self._folders.remove, ready.version)

    async def forget(self, version: Version) -> None:
        await self._thread.run(self._folders.remove, version)

    async def close(self, server_stays: bool) -> None:
        try:
            await self._thread.run(self._clear)
        finally:
            self._thread.close()

    def _clear(self) -> None:
        self._folders.clear()
        if self._copy is not None:
            self._copy.close()

    def _write(self, manifest: Manifest) -> PreparedWeights:
        """Remove the files of a failed update, which may be as large, then write the new ones."""
        self._folders.keep_only(manifest.version)
        transferred = manifest.nbytes
        if self._copy is not None:
            manifest, transferred = self._copy.update_to(manifest)
        return PreparedWeights(manifest.version, transferred, {"folder": str(self._folders.write(manifest))})


class CollectiveTransport:
    """Implements `Transport` over a process group of two: the learner and the server's worker.

    prepare   server: start receiving, in a thread of its worker
              learner: send; returns when the worker has all tensors with correct checksums
    swap      server: load the received weights

    `updates` sends the update calls to the server."""

    needs_pause = False

    def __init__(
        self, updates: MemoryTransport, send: SendWeights, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> None:
        self._updates = updates
        self._send = send
        self._backend = backend
        self._timeout_s = timeout_s

    async def prepare(self, manifest: Manifest) -> PreparedWeights:
        meeting = rendezvous_for(manifest, self._timeout_s, self._backend)
        await self._updates.ensure_initialized()
        await self._updates.update({"kind": "fetch", "meeting": meeting}, hold=False)
        await self._send(manifest, meeting)
        return PreparedWeights(manifest.version, manifest.nbytes, {"kind": "fetched", "key": meeting["key"]})

    async def swap(self, ready: PreparedWeights) -> LoadPhases:
        return await self._updates.swap(ready)

    async def forget(self, version: Version) -> None:
        """Nothing is stored."""

    async def close(self, server_stays: bool) -> None:
        await self._updates.close(server_stays)


log = logging.getLogger(__name__)

_UNLOAD_ALL_S = 2.0  # timeout for unloading our adapters on close


class AdapterTransport:
    """Implements `Transport` for adapters that the server registers beside its model, each version under its own name.

    No pause: running requests continue with the adapter they started with. A version and its folder are removed when no
    request uses it any more. Until then the server may read the folder again at any time, since it keeps only a few
    adapters in memory. `directory` belongs to this transport and must be readable by the server."""

    needs_pause = False

    def __init__(self, http: HttpClient, control_s: float, directory: Path, routes: str = "/v1") -> None:
        """`routes`: prefix of the adapter routes, empty for SGLang."""
        self._http = http
        self._control_s = control_s
        self._routes = routes
        self._folders = SnapshotFolders(directory)
        self._thread = SingleThread()
        self._registered: dict[Version, str] = {}  # includes calls without a reply

    async def prepare(self, manifest: Manifest) -> PreparedWeights:
        if manifest.adapter is None:
            raise UpdateFailed(f"version {manifest.version} is a whole model, but this server expects an adapter")
        folder = await self._thread.run(self._folders.write, manifest)
        name = f"outpace-{manifest.incarnation}-{manifest.version}"
        source = {"lora_name": name, "lora_path": str(folder)}
        return PreparedWeights(manifest.version, manifest.nbytes, source, adapter=name)

    async def swap(self, ready: PreparedWeights) -> None:
        """Register the adapter. If the name is taken, by an earlier call that got no reply, replace that adapter."""
        name = self._registered[ready.version] = ready.source["lora_name"]
        try:
            await self._post("/load_lora_adapter", ready.source)
        except ServerRefused as error:
            if "already" not in str(error):
                del self._registered[ready.version]
                raise
            await self._unload(name)
            await self._post("/load_lora_adapter", ready.source)

    async def forget(self, version: Version) -> None:
        name = self._registered.pop(version, None)
        try:
            if name is not None:
                await self._unload(name)
        finally:
            await self._thread.run(self._folders.remove, version)

    async def close(self, server_stays: bool) -> None:
        try:
            if server_stays:
                await self._unload_all()
            await self._thread.run(self._folders.clear)
        finally:
            self._thread.close()

    async def _unload_all(self) -> None:
        """Unload our adapters, best effort: closing does not wait for an unresponsive server."""
        try:
            async with asyncio.timeout(_UNLOAD_ALL_S):
                await asyncio.gather(*(self._unload(name) for name in self._registered.values()))
        except (ServerFailed, TimeoutError) as error:
            log.warning("%s: cannot unload adapters of this run: %s", self._http.url, one_line(error) or "no answer")

    async def _unload(self, name: str) -> None:
        try:
            await self._post("/unload_lora_adapter", {"lora_name": name})
        except ServerRefused as error:
            if error.status != 404:  # already gone
                raise

    async def _post(self, path: str, body: dict[str, str]) -> None:
        """POST to an adapter route. Success is a plain-text reply, so a JSON decoding error is not a failure."""
        try:
            await self._http.post(self._routes + path, body, deadline_s=self._control_s)
        except ServerFaulty as error:
            if not isinstance(error.__cause__, msgspec.DecodeError):
                raise


def files_transport(target: TransportTarget) -> Transport:
    vllm = target.kind == "vllm"
    if target.adapters:
        return AdapterTransport(target.http, target.control_s, target.directory, "/v1" if vllm else "")
    reload_call = vllm_reload if vllm else sglang_reload
    return FilesTransport(target.http, target.control_s, target.directory, target.copy, reload_call)


def memory_transport(target: TransportTarget) -> MemoryTransport:
    return MemoryTransport(target.http, target.control_s, target.copy, target.label, target.recompute)


def collective_transport(target: TransportTarget) -> Transport:
    assert target.send is not None, "the process group transport needs the learner"
    updates = memory_transport(target)
    return CollectiveTransport(updates, target.send, "nccl" if target.uses_gpu else "gloo", target.control_s)
