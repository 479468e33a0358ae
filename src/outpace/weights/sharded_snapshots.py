"""Snapshots of a sharded policy: every rank copies its own rows into the same file. No rank gathers the weights.

    first rank   void label, path ──▶ all       copy ── all have copied ──▶ label ─▶ seal: checksums, delta
    others                       path ─▶ open   copy ──┘

The first rank owns the files. The others open them when they first write into them.

    ShardedSnapshotWriter   ranks on one machine map the file, in shared memory
    SharedFolderWriter      ranks on several machines write to a file in a folder that all machines share

On a network file system two machines must not map the same file: each would write back whole pages, with the old rows
of the others. So those ranks write exactly their own bytes, and wait until the server has them.
"""

from __future__ import annotations

import mmap
import os
import socket
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from outpace.errors import BadInput
from outpace.learner.ranks import Ranks
from outpace.models.slices import slice_of
from outpace.types import Manifest, TensorSpec, Version
from outpace.weights import snapshot
from outpace.weights.shared_memory import (
    MappedBuffer,
    SnapshotBuffer,
    SnapshotDraft,
    SnapshotLayout,
    SnapshotWriter,
    WeightWriter,
    copy_slices,
)
from outpace.weights.snapshot import DATA_OFFSET, VOID


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


@dataclass(kw_only=True)
class _FileBuffer(SnapshotBuffer):
    """A snapshot file. `content` and `views` are empty: no rank maps it."""

    path: Path
    descriptor: int

    def write(self, data: memoryview, position: int) -> None:
        while data:
            count = os.pwrite(self.descriptor, data, position)
            data, position = data[count:], position + count


class SharedFolderWriter(WeightWriter[_FileBuffer]):
    """Every rank has one. `copy` is a collective; only the first rank's manifests describe snapshots."""

    def __init__(self, directory: Path, incarnation: str, dtype: torch.dtype | None, ranks: Ranks) -> None:
        """Wait for all ranks. Raises `BadInput` if this one does not see the directory, which the first has made."""
        super().__init__(torch.device("cpu"), incarnation, SnapshotLayout(dtype, start=DATA_OFFSET))
        self._directory = directory
        self._ranks = ranks
        self._opened: dict[str, _FileBuffer] = {}  # by path, on ranks other than the first
        with ranks.errors():
            ranks.barrier()
        if not directory.is_dir():
            raise BadInput(
                f"weights.dir: {socket.gethostname()} does not see {directory}, which the learner made on the first "
                "machine; set a folder that all machines share under the same path"
            )

    def preallocate(self, leased: Collection[Version]) -> None:
        if self._ranks.is_first:
            super().preallocate(leased)

    def seal(self, draft: SnapshotDraft[_FileBuffer]) -> Manifest:
        """Read the file, in which other machines have written, and compute the checksums."""
        path, version = str(draft.buffer.path), draft.buffer.version
        if not self._ranks.is_first:
            return Manifest(self._incarnation, version, path, [], draft.timer.seconds())
        descriptor = os.open(path, os.O_RDONLY)
        try:
            specs = [msgspec.structs.replace(each, crc32=_checksum(descriptor, each)) for each in self._layout.specs]
        finally:
            os.close(descriptor)
        self._buffers.seal(draft.buffer)
        return Manifest(self._incarnation, version, path, specs, draft.timer.seconds())

    def close(self) -> None:
        for buffer in (*self._buffers.all, *self._opened.values()):
            os.close(buffer.descriptor)
        for buffer in self._buffers.all:
            buffer.path.unlink(missing_ok=True)
        if self._ranks.is_first:
            with suppress(OSError):  # not empty, or removed with the run
                self._directory.rmdir()
        super().close()

    def _take(self, version: Version, leased: Collection[Version]) -> _FileBuffer:
        if self._ranks.is_first:
            buffer = super()._take(version, leased)
            self._label(buffer, VOID)
            self._ranks.gather(str(buffer.path).encode())
            return buffer
        path = self._ranks.gather(b"")[0].decode()
        if path not in self._opened:
            self._opened[path] = _open_buffer(Path(path))
        buffer = self._opened[path]
        buffer.version = version
        return buffer

    def _fill(self, buffer: _FileBuffer, tensors: list[Tensor]) -> None:
        for spec, tensor in zip(self._layout.specs, tensors, strict=True):
            part = slice_of(tensor)
            if part.is_sharded or self._ranks.is_first:
                stored = part.local.to(device="cpu", dtype=getattr(torch, spec.dtype)).contiguous()
                array: Any = stored.reshape(-1).view(torch.uint8).numpy()
                buffer.write(memoryview(array), spec.offset + part.start * stored.element_size())
        self._ranks.barrier()
        if self._ranks.is_first:
            self._label(buffer, buffer.version)

    def _label(self, buffer: _FileBuffer, version: Version) -> None:
        buffer.write(memoryview(snapshot.pack_header(self._incarnation, version)), 0)

    def _new_buffer(self, number: int) -> _FileBuffer:
        path = self._directory / f"{self._incarnation}-{number}.weights"
        snapshot.require_space(path.parent, self._layout.end)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, self._layout.end)
        finally:
            os.close(descriptor)
        return _open_buffer(path)


def _open_buffer(path: Path) -> _FileBuffer:
    """O_DSYNC: a write returns when the server has it, and an NFS client writes no more than it was given."""
    descriptor = os.open(path, os.O_WRONLY | os.O_DSYNC)
    return _FileBuffer(content=torch.empty(0), views=[], path=path, descriptor=descriptor)


def _checksum(descriptor: int, spec: TensorSpec) -> int:
    checksum, position, end = 0, spec.offset, spec.offset + spec.nbytes
    while position < end:
        piece = os.pread(descriptor, min(snapshot.CHUNK, end - position), position)
        if not piece:
            raise OSError(f"the snapshot ends inside {spec.name}")
        checksum, position = zlib.crc32(piece, checksum), position + len(piece)
    return checksum
