"""Snapshots of the policy in shared memory: one writer, any number of readers, no locks between processes.

    learner ── copy ──▶ free buffer ── seal: checksums, delta ──▶ Manifest ──▶ readers (`read_snapshot`)

The writer keeps a few snapshot files (normally on a memory file system) mapped and reuses them. All have the same
layout, fixed by the first snapshot.

Invariants
- A buffer that may still be read is never overwritten: not the latest complete snapshot, not one that is being sealed
  or used as the base of a delta, and not a leased one.
- A buffer is added only when all are in use, so the leases bound their number; buffers are never removed. Allocating
  one may take many times as long as a copy, so `preallocate` does it ahead of time on another thread.
- The writer never unmaps a file: a tensor over an unmapped region reads garbage without an error.
"""

from __future__ import annotations

import logging
import mmap
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from outpace.types import Delta, Manifest, TensorSpec, Version
from outpace.weights import delta, snapshot
from outpace.weights.buffers import Buffer, Buffers
from outpace.weights.layout import Layout
from outpace.weights.snapshot import DATA_OFFSET, VOID, SnapshotFile

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _MappedBuffer(Buffer):
    path: Path
    mapping: mmap.mmap
    delta: Path | None = None

    def label(self, incarnation: str, version: Version) -> None:
        label = snapshot.label(incarnation, version)
        self.mapping[: len(label)] = label


class Draft:
    """A copied snapshot without checksums."""

    def __init__(self, buffer: _MappedBuffer, version: Version, seconds: float) -> None:
        self._buffer = buffer
        self.version = version
        self.seconds = seconds


class SnapshotWriter:
    """Writes snapshots: `copy` on the thread that owns the weights, `seal` on any other. Thread-safe."""

    def __init__(
        self,
        directory: str | Path,
        incarnation: str,
        dtype: torch.dtype | None = None,
        deltas: str | Path | None = None,
    ) -> None:
        """Store floating-point tensors as `dtype` (None: unchanged). Write deltas into `deltas` (None: no deltas)."""
        if len(incarnation.encode()) > 64:
            raise ValueError("the incarnation name must be at most 64 bytes")
        self._directory = Path(directory)
        self._incarnation = incarnation
        self._deltas = Path(deltas) if deltas is not None else None
        self._layout = Layout(dtype, start=DATA_OFFSET)
        self._buffers = Buffers(self._new_buffer)

    @property
    def buffers(self) -> int:
        return len(self._buffers.all)

    def publish(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Manifest:
        return self.seal(self.copy(version, tensors, leased))

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._layout.lay_out(tensors)

    def make_ready(self, leased: Collection[Version]) -> None:
        """Allocate the next buffer ahead of time, after `lay_out`: see `BufferPool.preallocate`."""
        self._buffers.make_ready(leased)

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Draft:
        """Copy the tensors into a free buffer. The weights may change again once this returns."""
        started = time.perf_counter()
        distinct = self.lay_out(tensors)
        buffer = self._take(version, leased)
        with torch.no_grad():
            for view, tensor in zip(buffer.views, distinct.values(), strict=True):
                view.copy_(tensor)
        buffer.label(self._incarnation, version)
        return Draft(buffer, version, time.perf_counter() - started)

    def seal(self, draft: Draft) -> Manifest:
        """Compute checksums and delta. The snapshot is complete afterwards."""
        buffer = draft._buffer
        content = buffer.content
        specs = [
            msgspec.structs.replace(spec, crc32=_crc32(content[spec.offset : spec.offset + spec.nbytes]))
            for spec in self._layout.specs
        ]
        changes = self._delta(draft, specs) if self._deltas is not None else None
        self._buffers.seal(buffer)
        return Manifest(self._incarnation, draft.version, str(buffer.path), specs, draft.seconds, changes)

    def close(self) -> None:
        """Remove the files. Readers with an open file can finish reading."""
        for buffer in self._buffers.all:
            buffer.path.unlink(missing_ok=True)
            _remove_delta(buffer)
        self._buffers.all.clear()

    def _delta(self, draft: Draft, specs: list[TensorSpec]) -> Delta | None:
        """Write the delta from the latest complete snapshot.

        None if there is no earlier snapshot, if nearly everything changed, or if writing fails: deltas are optional."""
        assert self._deltas is not None
        path = self._deltas / f"{self._incarnation}-{draft.version}.delta"
        with self._buffers.held_latest() as base:
            if base is None or base.version >= draft.version:
                return None
            header = delta.Header(self._incarnation, base.version, draft.version)
            try:
                changes = delta.write(path, header, base.mapping, draft._buffer.mapping, specs)
            except OSError as error:
                log.warning("publishing version %d without a delta: cannot write the delta: %s", draft.version, error)
                return None
        draft._buffer.delta = path if changes is not None else None
        return changes

    def _take(self, version: Version, leased: Collection[Version]) -> _MappedBuffer:
        """Acquire a buffer for `version` and void its header, so that a late reader detects the reuse."""
        buffer = self._buffers.take(version, leased)
        buffer.label(self._incarnation, VOID)
        _remove_delta(buffer)
        return buffer

    def _new_buffer(self, number: int) -> _MappedBuffer:
        path = self._directory / f"{self._incarnation}-{number}.weights"
        mapping = snapshot.allocate(path, self._layout.end)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        return _MappedBuffer(content=content, views=self._layout.views(content), path=path, mapping=mapping)


def read_snapshot(manifest: Manifest, verify: bool = True) -> dict[str, Tensor]:
    """Return a copy of the snapshot by tensor name. Tied weights appear once, under the first name.

    Raises `CorruptData` when the file holds another snapshot before or after the copy, or, with `verify`, when a
    checksum does not match.
    """
    with snapshot.opened(manifest) as file:
        tensors = {spec.name: _read_tensor(file, spec) for spec in manifest.tensors}
    if verify:
        for spec in manifest.tensors:
            file.compare(spec, _crc32(_bytes_of(tensors[spec.name])))
    return tensors


def _remove_delta(buffer: _MappedBuffer) -> None:
    if buffer.delta is not None:
        buffer.delta.unlink(missing_ok=True)
        buffer.delta = None


def _read_tensor(file: SnapshotFile, spec: TensorSpec) -> Tensor:
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    file.read_into(spec, _buffer_of(_bytes_of(tensor)))
    return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _crc32(data: Tensor) -> int:
    return zlib.crc32(_buffer_of(data))


def _buffer_of(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)
