"""Snapshots of the policy in shared memory: one writer, any number of readers, no locks between them.

The writer keeps a few snapshot files (normally on a memory file system) mapped and reuses them.

Invariants
- What somebody may read, the base of a delta that is being written included, is not overwritten
  (`outpace.weights.buffers`).
- The writer never unmaps a file: a tensor over an unmapped region reads garbage without any error.
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
class _Buffer(Buffer):
    path: Path
    mapping: mmap.mmap
    delta: Path | None = None

    def label(self, incarnation: str, version: Version) -> None:
        label = snapshot.label(incarnation, version)
        self.mapping[: len(label)] = label


class Draft:
    """A snapshot that is copied but has no checksums yet."""

    def __init__(self, buffer: _Buffer, version: Version, seconds: float) -> None:
        self._buffer = buffer
        self.version = version
        self.seconds = seconds


class SnapshotWriter:
    """`copy` on the thread that owns the weights, `seal` on any other. Safe to call from two threads at once."""

    def __init__(
        self,
        directory: str | Path,
        incarnation: str,
        dtype: torch.dtype | None = None,
        deltas: str | Path | None = None,
    ) -> None:
        """Floating-point tensors are stored as `dtype` (None: as they are). What each snapshot changes goes to a file
        in `deltas` (None: nowhere)."""
        if len(incarnation.encode()) > 64:
            raise ValueError("an incarnation's name is at most 64 bytes")
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
        """For a thread that has the time, after `lay_out`: see `Buffers.make_ready`."""
        self._buffers.make_ready(leased)

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Draft:
        """Copy the tensors into a free buffer. Only this part needs the weights to hold still."""
        started = time.perf_counter()
        distinct = self.lay_out(tensors)
        buffer = self._take(version, leased)
        with torch.no_grad():
            for view, tensor in zip(buffer.views, distinct.values(), strict=True):
                view.copy_(tensor)
        buffer.label(self._incarnation, version)
        return Draft(buffer, version, time.perf_counter() - started)

    def seal(self, draft: Draft) -> Manifest:
        """Compute the checksums, and what has changed; from then on the snapshot is complete."""
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
        """Remove the files. Readers that hold one open finish their read."""
        for buffer in self._buffers.all:
            buffer.path.unlink(missing_ok=True)
            _remove_delta(buffer)
        self._buffers.all.clear()

    def _delta(self, draft: Draft, specs: list[TensorSpec]) -> Delta | None:
        """What has changed since the latest complete snapshot. None where there is none before, where nearly all has
        changed, or where it cannot be written: a delta saves bytes, nobody depends on it."""
        assert self._deltas is not None
        path = self._deltas / f"{self._incarnation}-{draft.version}.delta"
        with self._buffers.held_latest() as base:
            if base is None or base.version >= draft.version:
                return None
            header = delta.Header(self._incarnation, base.version, draft.version)
            try:
                changes = delta.write(path, header, base.mapping, draft._buffer.mapping, specs)
            except OSError as error:
                log.warning("version %d goes out whole: what it changes cannot be written: %s", draft.version, error)
                return None
        draft._buffer.delta = path if changes is not None else None
        return changes

    def _take(self, version: Version, leased: Collection[Version]) -> _Buffer:
        """One for `version`, with a void header, so that a late reader sees the reuse."""
        buffer = self._buffers.take(version, leased)
        buffer.label(self._incarnation, VOID)
        _remove_delta(buffer)
        return buffer

    def _new_buffer(self, number: int) -> _Buffer:
        path = self._directory / f"{self._incarnation}-{number}.weights"
        mapping = snapshot.allocate(path, self._layout.end)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        return _Buffer(content=content, views=self._layout.views(content), path=path, mapping=mapping)


def read_snapshot(manifest: Manifest, verify: bool = True) -> dict[str, Tensor]:
    """Copy the snapshot out, by tensor name; tied weights come once, under the name the model lists first.

    Raises `CorruptData` when the file holds another snapshot (before, or by the end of, the copy) or, with `verify`,
    when a checksum does not match.
    """
    with snapshot.opened(manifest) as file:
        tensors = {spec.name: _read_tensor(file, spec) for spec in manifest.tensors}
    if verify:
        for spec in manifest.tensors:
            file.compare(spec, _crc32(_bytes_of(tensors[spec.name])))
    return tensors


def _remove_delta(buffer: _Buffer) -> None:
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
