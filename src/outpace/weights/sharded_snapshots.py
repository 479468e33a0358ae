"""Snapshots of a sharded policy: every rank copies its own rows into the same file. No rank gathers the weights.

    first rank   void label, path ──▶ all       copy ── all have copied ──▶ label ─▶ seal: checksums, delta
    others                       path ─▶ open   copy ──┘

The first rank creates and removes the files. The other ranks open the file that it names.

    ShardedSnapshotWriter   ranks on one machine map the file, in shared memory
    SharedFolderWriter      ranks on several machines write to a file in a folder that all machines share

On a network file system two machines must not map the same file: each would write back whole pages, including stale
rows of the others. So the ranks of a SharedFolderWriter write exactly their own bytes, into a new file for each
snapshot, and wait until the file server has them.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
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


class SharedFolderWriter(WeightWriter[_FileBuffer]):
    """Every rank has one. `copy` is a collective; only the first rank's manifests describe snapshots."""

    def __init__(self, directory: Path, incarnation: str, dtype: torch.dtype | None, ranks: Ranks) -> None:
        """Wait for all ranks. Raises `BadInput` if this one does not see the directory made by the first."""
        super().__init__(torch.device("cpu"), incarnation, SnapshotLayout(dtype, start=DATA_OFFSET))
        self._directory = directory
        self._ranks = ranks
        self._files = itertools.count()
        with ranks.errors():
            ranks.barrier()
        if not directory.is_dir():
            raise BadInput(
                f"weights.dir: {socket.gethostname()} does not see {directory}, which the learner made on the first "
                "machine; set a folder that all machines share under the same path"
            )

    def preallocate(self, leased: Collection[Version]) -> None:
        """Nothing is allocated ahead of time: every snapshot gets a new file."""

    def seal(self, draft: SnapshotDraft[_FileBuffer]) -> Manifest:
        """Read back the file, which other machines have written too, and compute the checksums."""
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
        for buffer in self._buffers.all:
            buffer.path.unlink(missing_ok=True)
        if self._ranks.is_first:
            with suppress(OSError):  # not empty, or removed with the run
                self._directory.rmdir()
        super().close()

    def _take(self, version: Version, leased: Collection[Version]) -> _FileBuffer:
        if self._ranks.is_first:
            buffer = super()._take(version, leased)
            self._begin_file(buffer)
            self._ranks.gather(str(buffer.path).encode())
            return buffer
        buffer = self._new_buffer(0)
        buffer.path, buffer.version = Path(self._ranks.gather(b"")[0].decode()), version
        return buffer

    def _begin_file(self, buffer: _FileBuffer) -> None:
        """Give the buffer a new file. From the old one, this machine could read stale rows of other machines: an NFS
        client may keep them while a process on its machine has the file open for writing."""
        buffer.path.unlink(missing_ok=True)
        buffer.path = self._directory / f"{self._incarnation}-{next(self._files)}.weights"
        snapshot.require_space(self._directory, self._layout.end)
        descriptor = os.open(buffer.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, self._layout.end)
        finally:
            os.close(descriptor)

    def _fill(self, buffer: _FileBuffer, tensors: list[Tensor]) -> None:
        with _open_to_write(buffer.path) as descriptor:
            for spec, tensor in zip(self._layout.specs, tensors, strict=True):
                part = slice_of(tensor)
                if part.is_sharded or self._ranks.is_first:
                    stored = part.local.to(device="cpu", dtype=getattr(torch, spec.dtype)).contiguous()
                    array: Any = stored.reshape(-1).view(torch.uint8).numpy()
                    _write(descriptor, memoryview(array), spec.offset + part.start * stored.element_size())
        self._ranks.barrier()
        if self._ranks.is_first:
            with _open_to_write(buffer.path) as descriptor:
                _write(descriptor, memoryview(snapshot.pack_header(self._incarnation, buffer.version)), 0)

    def _new_buffer(self, number: int) -> _FileBuffer:
        """Return a buffer whose file does not exist yet."""
        return _FileBuffer(content=torch.empty(0), views=[], path=self._directory / f"{self._incarnation}-new.weights")


@contextmanager
def _open_to_write(path: Path) -> Iterator[int]:
    """Open with O_DSYNC: a write returns once the server has it, and an NFS client writes only the given bytes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_DSYNC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count


def _checksum(descriptor: int, spec: TensorSpec) -> int:
    checksum, position, end = 0, spec.offset, spec.offset + spec.nbytes
    while position < end:
        piece = os.pread(descriptor, min(snapshot.CHUNK, end - position), position)
        if not piece:
            raise OSError(f"the snapshot ends inside {spec.name}")
        checksum, position = zlib.crc32(piece, checksum), position + len(piece)
    return checksum
