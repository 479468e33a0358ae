"""How weights reach SGLang: as files, of the whole model or of an adapter.

Its other routes are not used. `/update_weights_from_tensor` and `/update_weights_from_ipc` take pickles, and whoever
may send a server pickles may run anything in it. `/update_weights_from_distributed` receives straight into the weights,
by a collective: the server holds still for as long as that takes, nothing is checked before it counts, and a learner
that goes away in the middle leaves a server that waits for it.
"""

from __future__ import annotations

from pathlib import Path

from outpace.engines.servers.spec import Ready
from outpace.engines.servers.transports.adapters import AdapterTransport
from outpace.engines.servers.transports.files import FilesReady, FilesTransport

UPDATE = "/update_weights_from_disk"

_ADAPTER_ROUTES = {
    "/v1/load_lora_adapter": "/load_lora_adapter",
    "/v1/unload_lora_adapter": "/unload_lora_adapter",
}
"""vLLM's names for what SGLang has too."""


class SglangFiles(FilesTransport):
    """Implements `Transport`."""

    async def swap(self, ready: Ready) -> None:
        assert isinstance(ready, FilesReady), "what another transport has prepared"
        await self._http.post(UPDATE, update_of(ready.folder), deadline_s=self._control_s)
        await self._thread.run(self._folders.remove, ready.version)


class SglangAdapters(AdapterTransport):
    """Implements `Transport`."""

    async def _order(self, path: str, body: dict[str, str]) -> None:
        await super()._order(_ADAPTER_ROUTES[path], body)


def update_of(folder: Path) -> dict[str, object]:
    """By default it would flush the cache, which kills a server that has requests, and read the files in the format
    that it was started with, which may be that of dummy weights."""
    return {
        "model_path": str(folder),
        "load_format": "auto",
        "flush_cache": False,
        "abort_all_requests": False,
    }
