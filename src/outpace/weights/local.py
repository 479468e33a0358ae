"""MERGED"""

from __future__ import annotations

import logging
import mmap
import zlib
from pathlib import Path

import msgspec

from outpace.errors import CorruptData
from outpace.types import Manifest, TensorSpec
from outpace.weights import snapshot
from outpace.weights.delta import apply

log = logging.getLogger(__name__)


class LocalSnapshot:
    """A local copy of the policy, updated by deltas. Not thread-safe. `damaged_deltas` counts rejected deltas."""

    def __init__(self, directory: Path) -> None:
        self.refused = 0
        self._path = directory / "local.weights"
        self._memory: mmap.mmap | None = None
        self._local: Manifest | None = None

    def bring(self, manifest: Manifest) -> tuple[Manifest, int]:
        """Update the copy; return its manifest and the number of bytes transferred. Raises `CorruptData`."""
        local, self._local = self._local, None
        transferred = self._apply_delta(manifest, local)
        if transferred is None:
            transferred = self._read_whole(manifest)
        self._label(manifest, manifest.version)
        self._local = msgspec.structs.replace(manifest, path=str(self._path), delta=None)
        return self._local, transferred

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._memory = self._local = None

    def _apply_delta(self, manifest: Manifest, local: Manifest | None) -> int | None:
        """Apply the delta; return its size, or None if there is no delta from the local version or it is damaged."""
        if local is None or local.incarnation != manifest.incarnation or _layout(local) != _layout(manifest):
            return None
        if manifest.delta is None or manifest.delta.base != local.version:
            return None
        self._label(manifest, snapshot.VOID)
        try:
            apply(manifest, self._memory)
            self._check(manifest)
        except CorruptData as error:
            self.refused += 1
            log.warning("%s; reading the whole snapshot instead", error)
            return None
        return manifest.delta.nbytes

    def _read_whole(self, manifest: Manifest) -> int:
        with snapshot.opened(manifest) as file:
            memory = self._allocate(snapshot.end_of(manifest.tensors))
            self._label(manifest, snapshot.VOID)
            for spec in manifest.tensors:
                offset = spec.offset
                for piece in file.chunks(spec):
                    memory[offset : offset + len(piece)] = piece
                    offset += len(piece)
        return manifest.nbytes

    def _allocate(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) != nbytes:
            self._memory = None
            self._memory = snapshot.allocate(self._path, nbytes)
        return self._memory

    def _label(self, manifest: Manifest, version: int) -> None:
        assert self._memory is not None
        label = snapshot.label(manifest.incarnation, version)
        self._memory[: len(label)] = label

    def _check(self, manifest: Manifest) -> None:
        assert self._memory is not None
        with memoryview(self._memory) as content:
            for spec in manifest.tensors:
                if _crc32(content, spec) != spec.crc32:
                    raise CorruptData(f"delta of version {manifest.version}: wrong checksum of {spec.name}")


def _crc32(content: memoryview, spec: TensorSpec) -> int:
    with content[spec.offset : spec.offset + spec.nbytes] as piece:
        return zlib.crc32(piece)


def _layout(manifest: Manifest) -> list[tuple[str, str, list[int], int]]:
    return [(spec.name, spec.dtype, spec.shape, spec.offset) for spec in manifest.tensors]
