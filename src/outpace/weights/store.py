"""Snapshots of the policy in shared memory: one writer, any number of readers, no locks between them.

The writer keeps a few snapshot files (normally on a memory file system) mapped and reuses them.

Invariants
- Neither the latest complete snapshot, nor one that is being sealed or is the base of a delta that is being written,
  nor a leased one is ever overwritten. Files are added only when all are in use, so their number is bounded by the
  leases.
- The writer never unmaps a file: a tensor over an unmapped region reads garbage without any error.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.types import Delta, Manifest, TensorSpec, Version
from outpace.weights import delta, snapshot
from outpace.weights.snapshot import DATA_OFFSET, VOID, SnapshotFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Slot:
    """One tensor's fixed place in every buffer."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    offset: int
    nbytes: int


@dataclass
class _Buffer:
    path: Path
    mapping: mmap.mmap
    content: Tensor  # the whole file as uint8
    views: list[Tensor]
    version: Version = VOID
    sealed: bool = True
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
        self._dtype = dtype
        self._deltas = Path(deltas) if deltas is not None else None
        self._slots: list[_Slot] = []
        self._buffers: list[_Buffer] = []
        self._latest: Version = VOID
        self._bases: list[Version] = []  # of the deltas that are being written
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held by whoever makes a buffer, which may take a second

    @property
    def buffers(self) -> int:
        return len(self._buffers)

    def publish(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Manifest:
        return self.seal(self.copy(version, tensors, leased))

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decide where everything lies; returns what is stored."""
        distinct = distinct_tensors(tensors)
        slots = _layout(distinct, self._dtype)
        if not self._slots:
            self._slots = slots
        assert slots == self._slots, "the tensors of a policy keep their names, shapes and dtypes"
        return distinct

    def make_ready(self, leased: Collection[Version]) -> None:
        """See to it that the next `copy` finds a buffer, if those leased now are the ones leased then: making one takes
        many times as long as the copy. For a thread that has the time, after `lay_out`."""
        with self._making:
            if not self._free(leased):
                self._add_buffer()

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
            TensorSpec(
                name=slot.name,
                dtype=str(slot.dtype).removeprefix("torch."),
                shape=slot.shape,
                offset=slot.offset,
                nbytes=slot.nbytes,
                crc32=_crc32(content[slot.offset : slot.offset + slot.nbytes]),
            )
            for slot in self._slots
        ]
        changes = self._delta(draft, specs) if self._deltas is not None else None
        with self._lock:
            buffer.sealed = True
            self._latest = max(self._latest, draft.version)
        return Manifest(self._incarnation, draft.version, str(buffer.path), specs, draft.seconds, changes)

    def close(self) -> None:
        """Remove the files. Readers that hold one open finish their read."""
        for buffer in self._buffers:
            buffer.path.unlink(missing_ok=True)
            _remove_delta(buffer)
        self._buffers = []

    def _delta(self, draft: Draft, specs: list[TensorSpec]) -> Delta | None:
        """What has changed since the latest complete snapshot. None where there is none before, where nearly all has
        changed, or where it cannot be written: a delta saves bytes, nobody depends on it."""
        assert self._deltas is not None
        with self._lock:
            base = next((b for b in self._buffers if b.version == self._latest and b.sealed), None)
            if base is None or base.version >= draft.version:
                return None
            self._bases.append(base.version)
        path = self._deltas / f"{self._incarnation}-{draft.version}.delta"
        header = delta.Header(self._incarnation, base.version, draft.version)
        try:
            changes = delta.write(path, header, base.mapping, draft._buffer.mapping, specs)
        except OSError as error:
            log.warning("version %d goes out whole: what it changes cannot be written: %s", draft.version, error)
            return None
        finally:
            with self._lock:
                self._bases.remove(base.version)
        draft._buffer.delta = path if changes is not None else None
        return changes

    def _take(self, version: Version, leased: Collection[Version]) -> _Buffer:
        """Choose a buffer for `version` and void its header, so that a late reader sees the reuse."""
        if not self._free(leased):
            self.make_ready(leased)
        with self._lock:
            buffer = min(self._unused(leased), key=lambda b: b.version)
            buffer.version, buffer.sealed = version, False
        buffer.label(self._incarnation, VOID)
        _remove_delta(buffer)
        return buffer

    def _free(self, leased: Collection[Version]) -> bool:
        with self._lock:
            return bool(self._unused(leased))

    def _unused(self, leased: Collection[Version]) -> list[_Buffer]:
        used = {self._latest, *self._bases, *leased} - {VOID}
        return [b for b in self._buffers if b.sealed and b.version not in used]

    def _add_buffer(self) -> None:
        end = max((slot.offset + slot.nbytes for slot in self._slots), default=DATA_OFFSET)
        path = self._directory / f"{self._incarnation}-{len(self._buffers)}.weights"
        mapping = snapshot.allocate(path, end)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        views = [content[s.offset : s.offset + s.nbytes].view(s.dtype).view(s.shape) for s in self._slots]
        with self._lock:
            self._buffers.append(_Buffer(path, mapping, content, views))


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


def distinct_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights once, under the name that comes first."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    distinct: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0 or identity not in seen:
            distinct[name] = tensor
        seen.add(identity)
    return distinct


def _layout(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[_Slot]:
    slots: list[_Slot] = []
    offset = DATA_OFFSET
    for name, tensor in tensors.items():
        stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * stored.itemsize
        slots.append(_Slot(name, stored, list(tensor.shape), offset, nbytes))
        offset += snapshot.padded(nbytes)
    return slots


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
