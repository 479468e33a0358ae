"""Adapters that vLLM registers beside its model, each version under a name of its own.

Nobody has to hold still: requests that run go on with the adapter they were sent with. A version is forgotten, its
folder too, when nobody samples by it any more; until then the server may read the folder again at any time, since it
keeps only a few adapters in memory.
"""

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

_LEAVING_S = 2.0  # for taking our adapters off a server that goes on without us


@dataclass
class AdapterReady:
    version: Version
    nbytes: int
    folder: Path
    adapter: str  # the name to sample by


class AdapterTransport:
    """Implements `Transport`. `directory` is its own, and the server can read it."""

    holds_still = False

    def __init__(self, http: Http, control_s: float, directory: Path) -> None:
        self._http = http
        self._control_s = control_s
        self._folders = AdapterFolders(directory)
        self._thread = OneThread()
        self._registered: dict[Version, str] = {}  # or perhaps so: no answer has come

    async def prepare(self, manifest: Manifest) -> AdapterReady:
        if manifest.adapter is None:
            raise UpdateFailed(f"version {manifest.version} is a whole model, and this server takes adapters")
        folder = await self._thread.run(self._folders.write, manifest)
        name = f"outpace-{manifest.incarnation}-{manifest.version}"
        return AdapterReady(manifest.version, manifest.nbytes, folder, name)

    async def swap(self, ready: Ready) -> None:
        """One that is registered under this name already came by an update of which no answer arrived: it goes."""
        assert isinstance(ready, AdapterReady), "what another transport has prepared"
        order = {"lora_name": ready.adapter, "lora_path": str(ready.folder)}
        self._registered[ready.version] = ready.adapter
        try:
            await self._order("/v1/load_lora_adapter", order)
        except ServerRefused as error:
            if "already" not in str(error):
                del self._registered[ready.version]
                raise
            await self._unload(ready.adapter)
            await self._order("/v1/load_lora_adapter", order)

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
        """As far as that goes: who leaves need not wait for a server that does not answer."""
        try:
            async with asyncio.timeout(_LEAVING_S):
                await asyncio.gather(*(self._unload(name) for name in self._registered.values()))
        except (ServerFailed, TimeoutError) as error:
            log.warning("%s keeps adapters of ours: %s", self._http.url, one_line(error) or "no answer")

    async def _unload(self, name: str) -> None:
        try:
            await self._order("/v1/unload_lora_adapter", {"lora_name": name})
        except ServerRefused as error:
            if error.status != 404:  # it is not there: all the better
                raise

    async def _order(self, path: str, body: dict[str, str]) -> None:
        """These routes answer a success with a plain sentence, which is no JSON and no failure."""
        try:
            await self._http.post(path, body, deadline_s=self._control_s)
        except ServerFaulty as error:
            if not isinstance(error.__cause__, msgspec.DecodeError):
                raise
