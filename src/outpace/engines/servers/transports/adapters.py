"""MERGED"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outpace.engines.servers.http import Http
from outpace.engines.servers.spec import Ready
from outpace.engines.servers.transports.thread import OneThread
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, UpdateFailed, one_line
from outpace.types import Manifest, Version
from outpace.weights.adapters import AdapterFolders

log = logging.getLogger(__name__)

_UNLOAD_ALL_S = 2.0  # timeout for unloading our adapters on close


@dataclass
class AdapterReady:
    version: Version
    nbytes: int
    folder: Path
    adapter: str  # name to use in requests


class AdapterTransport:
    """Implements `Transport` for adapters that vLLM registers beside its model, each version under its own name.

    No pause: running requests continue with the adapter they started with. A version and its folder are removed when no
    request uses it any more. Until then the server may read the folder again at any time, since it keeps only a few
    adapters in memory. `directory` belongs to this transport and must be readable by the server."""

    holds_still = False

    def __init__(self, http: Http, control_s: float, directory: Path) -> None:
        self._http = http
        self._control_s = control_s
        self._folders = AdapterFolders(directory)
        self._thread = OneThread()
        self._registered: dict[Version, str] = {}  # includes calls without a reply

    async def prepare(self, manifest: Manifest) -> AdapterReady:
        if manifest.adapter is None:
            raise UpdateFailed(f"version {manifest.version} is a whole model, but this server expects an adapter")
        folder = await self._thread.run(self._folders.write, manifest)
        name = f"outpace-{manifest.incarnation}-{manifest.version}"
        return AdapterReady(manifest.version, manifest.nbytes, folder, name)

    async def swap(self, ready: Ready) -> None:
        """Register the adapter. One already registered under this name is from a call without a reply: replace it."""
        assert isinstance(ready, AdapterReady), "prepared by another transport"
        call = {"lora_name": ready.adapter, "lora_path": str(ready.folder)}
        self._registered[ready.version] = ready.adapter
        try:
            await self._order("/v1/load_lora_adapter", call)
        except ServerRefused as error:
            if "already" not in str(error):
                del self._registered[ready.version]
                raise
            await self._unload(ready.adapter)
            await self._order("/v1/load_lora_adapter", call)

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
            await self._order("/v1/unload_lora_adapter", {"lora_name": name})
        except ServerRefused as error:
            if error.status != 404:  # already gone
                raise

    async def _order(self, path: str, body: dict[str, str]) -> None:
        """POST to an adapter route. Success is a plain-text reply, so a JSON decoding error is not a failure."""
        try:
            await self._http.post(path, body, deadline_s=self._control_s)
        except ServerFaulty as error:
            if not isinstance(error.__cause__, msgspec.DecodeError):
                raise
