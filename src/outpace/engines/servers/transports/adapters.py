"""Adapters that vLLM registers beside its model, each version under a name of its own.

Nobody has to hold still: requests that run go on with the adapter they were sent with. A version is forgotten, its
folder too, when nobody samples by it any more; until then the server may read the folder again at any time, since it
keeps only a few adapters in memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outpace.engines.servers.http import Http
from outpace.engines.servers.spec import Ready
from outpace.errors import ServerFaulty, ServerRefused, UpdateFailed
from outpace.types import Manifest, Version
from outpace.weights.adapters import AdapterFolders


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
        self._registered: dict[Version, str] = {}

    async def prepare(self, manifest: Manifest) -> AdapterReady:
        if manifest.adapter is None:
            raise UpdateFailed(f"version {manifest.version} is a whole model, and this server takes adapters")
        folder = await asyncio.to_thread(self._folders.write, manifest)
        name = f"outpace-{manifest.incarnation}-{manifest.version}"
        return AdapterReady(manifest.version, manifest.nbytes, folder, name)

    async def swap(self, ready: Ready) -> None:
        """One that is registered under this name already came by an update of which no answer arrived: it goes."""
        assert isinstance(ready, AdapterReady), "what another transport has prepared"
        order = {"lora_name": ready.adapter, "lora_path": str(ready.folder)}
        try:
            await self._order("/v1/load_lora_adapter", order)
        except ServerRefused as error:
            if "already" not in str(error):
                raise
            await self._unload(ready.adapter)
            await self._order("/v1/load_lora_adapter", order)
        self._registered[ready.version] = ready.adapter

    async def forget(self, version: Version) -> None:
        name = self._registered.pop(version, None)
        if name is not None:
            await self._unload(name)
        await asyncio.to_thread(self._folders.remove, version)

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
