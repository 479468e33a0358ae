"""MERGED"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outpace.engines.servers.http import Http
from outpace.engines.servers.spec import Ready
from outpace.engines.servers.transports.thread import OneThread
from outpace.types import Manifest, Version
from outpace.weights.files import Folders
from outpace.weights.local import LocalSnapshot


@dataclass
class FilesReady:
    version: Version
    nbytes: int
    folder: Path


class FilesTransport:
    """Implements `Transport` over a directory of safetensors files, for any vLLM in dev mode. `directory` belongs to
    this transport and must be readable by the server."""

    holds_still = True

    def __init__(self, http: Http, control_s: float, directory: Path, copy: LocalSnapshot | None = None) -> None:
        """`copy`: a local snapshot that is kept current by deltas."""
        self._http = http
        self._control_s = control_s
        self._folders = Folders(directory)
        self._copy = copy
        self._thread = OneThread()

    async def prepare(self, manifest: Manifest) -> FilesReady:
        return await self._thread.run(self._write, manifest)

    async def swap(self, ready: Ready) -> None:
        assert isinstance(ready, FilesReady), "prepared by another transport"
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(ready.folder)}}
        await self._http.post("/collective_rpc", call, deadline_s=self._control_s)
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

    def _write(self, manifest: Manifest) -> FilesReady:
        """Write the files. First remove those of a failed update, which may be as large."""
        self._folders.keep_only(manifest.version)
        transferred = manifest.nbytes
        if self._copy is not None:
            manifest, transferred = self._copy.bring(manifest)
        return FilesReady(manifest.version, transferred, self._folders.write(manifest))
