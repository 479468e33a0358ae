"""Snapshots of a sharded policy: every rank copies its own rows into the same file. No rank gathers the weights.

    first rank   void label, path ──▶ all       copy ── all have copied ──▶ label ─▶ seal: checksums, delta
    others                       path ─▶ map    copy ──┘

The first rank owns the buffers. The others map its files when they first write into them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from outpace.learner.ranks import Ranks
from outpace.types import Manifest, Version
from outpace.weights.shared_memory import MappedBuffer, SnapshotDraft, SnapshotWriter, copy_slices
from outpace.weights.snapshot import VOID


class ShardedSnapshotWriter(SnapshotWriter):
    """Every rank has one. `copy` is a collective; only the first rank's manifests describe snapshots."""

    def __init__(
        self, directory: Path, incarnation: str, dtype: torch.dtype | None, deltas: Path | None, ranks: Ranks
    ) -> None:
        super().__init__(directory, incarnation, dtype, deltas)
        self._ranks = ranks
        self._mapped: dict[str, MappedBuffer] = {}  # by path, on ranks other than the first

    def preallocate(self, leased: Collection[Version]) -> None:
        if self._ranks.is_first:
            super().preallocate(leased)

    def seal(self, draft: SnapshotDraft[MappedBuffer]) -> Manifest:
        if self._ranks.is_first:
            return super().seal(draft)
        return Manifest(self._incarnation, draft.buffer.version, str(draft.buffer.path), [], draft.timer.seconds())

    def _take(self, version: Version, leased: Collection[Version]) -> MappedBuffer:
        if self._ranks.is_first:
            buffer = super()._take(version, leased)
            self._void(buffer)
            self._ranks.gather(str(buffer.path).encode())
            return buffer
        path = self._ranks.gather(b"")[0].decode()
        if path not in self._mapped:
            self._mapped[path] = self._map(Path(path))
        buffer = self._mapped[path]
        buffer.version = version
        return buffer

    def _fill(self, buffer: MappedBuffer, tensors: list[Tensor]) -> None:
        copy_slices(buffer.views, tensors)
        self._ranks.barrier()
        if self._ranks.is_first:
            buffer.label(self._incarnation, buffer.version)

    def _map(self, path: Path) -> MappedBuffer:
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapping = mmap.mmap(descriptor, self._layout.end, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        return MappedBuffer(
            content=content, views=self._layout.views(content), path=path, mapping=mapping, version=VOID
        )
