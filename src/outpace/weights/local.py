"""A copy of the policy that follows what is published, by deltas where it can and whole where it must.

Invariants
- The copy is a snapshot file like any other, void while it changes. Whoever reads it needs to know nothing of deltas.
- What comes out of a delta has the checksums of the manifest, or else the whole snapshot is read.
- A file that somebody may have mapped is never shortened: another one takes its place.
"""

from __future__ import annotations

import logging
import mmap
import zlib
from pathlib import Path

import msgspec

from outpace.errors import CorruptData
from outpace.types import Manifest, TensorSpec
from outpace.weights import delta, snapshot

log = logging.getLogger(__name__)


class LocalSnapshot:
    """Not to be used from two threads at once. `refused` counts the deltas that were damaged."""

    def __init__(self, directory: Path) -> None:
        self.refused = 0
        self._path = directory / "local.weights"
        self._memory: mmap.mmap | None = None
        self._held: Manifest | None = None

    def bring(self, manifest: Manifest) -> tuple[Manifest, int]:
        """The same snapshot as it lies here, and how many bytes had to travel. Raises `CorruptData`."""
        held, self._held = self._held, None
        travelled = self._follow(manifest, held)
        if travelled is None:
            travelled = self._read_whole(manifest)
        self._label(manifest, manifest.version)
        self._held = msgspec.structs.replace(manifest, path=str(self._path), delta=None)
        return self._held, travelled

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._memory = self._held = None

    def _follow(self, manifest: Manifest, held: Manifest | None) -> int | None:
        """None: there is no delta from what lies here, or it is damaged."""
        if held is None or held.incarnation != manifest.incarnation or _layout(held) != _layout(manifest):
            return None
        if manifest.delta is None or manifest.delta.base != held.version:
            return None
        self._label(manifest, snapshot.VOID)
        try:
            delta.apply(manifest, self._memory)
            self._check(manifest)
        except CorruptData as error:
            self.refused += 1
            log.warning("%s; the whole snapshot is read instead", error)
            return None
        return manifest.delta.nbytes

    def _read_whole(self, manifest: Manifest) -> int:
        with snapshot.opened(manifest) as file:
            memory = self._room(snapshot.end_of(manifest.tensors))
            self._label(manifest, snapshot.VOID)
            for spec in manifest.tensors:
                offset = spec.offset
                for piece in file.chunks(spec):
                    memory[offset : offset + len(piece)] = piece
                    offset += len(piece)
        return manifest.nbytes

    def _room(self, nbytes: int) -> mmap.mmap:
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
                    raise CorruptData(f"what a delta makes of {spec.name} is not version {manifest.version}")


def _crc32(content: memoryview, spec: TensorSpec) -> int:
    with content[spec.offset : spec.offset + spec.nbytes] as piece:
        return zlib.crc32(piece)


def _layout(manifest: Manifest) -> list[tuple[str, str, list[int], int]]:
    return [(spec.name, spec.dtype, spec.shape, spec.offset) for spec in manifest.tensors]
