"""MERGED"""

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
"""vLLM's adapter routes and their SGLang counterparts."""


class SglangFiles(FilesTransport):
    """Implements `Transport` over files for SGLang."""

    async def swap(self, ready: Ready) -> None:
        assert isinstance(ready, FilesReady), "prepared by another transport"
        await self._http.post(UPDATE, update_of(ready.folder), deadline_s=self._control_s)
        await self._thread.run(self._folders.remove, ready.version)


class SglangAdapters(AdapterTransport):
    """Implements `Transport` for adapters of SGLang."""

    async def _order(self, path: str, body: dict[str, str]) -> None:
        await super()._order(_ADAPTER_ROUTES[path], body)


def update_of(folder: Path) -> dict[str, object]:
    """Body of an update call. The defaults would flush the cache, which kills a server that has requests, and use the
    load format of the server's start, which may be `dummy`."""
    return {
        "model_path": str(folder),
        "load_format": "auto",
        "flush_cache": False,
        "abort_all_requests": False,
    }
