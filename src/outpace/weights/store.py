"""Snapshots of the policy in shared memory: one writer, any number of readers, no locks between them.

A snapshot is a file (normally on a memory file system) with a header that names incarnation and version, followed by
the tensors. The writer keeps a few such files mapped and reuses them.

Invariants
- Neither the latest complete snapshot, nor one that is being sealed, nor a leased one is ever overwritten. Files are
  added only when all are in use, so their number is bounded by the leases.
- A reader never gets mixed weights: the header is void while the writer copies, the reader checks it before and after
  its own copy, and every tensor has a checksum.
- The writer never unmaps a file: a tensor over an unmapped region reads garbage without any error.

Readers use plain reads, never a mapping: a file that vanishes or shrinks is then an error, not a crash.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.errors import CorruptData, OutpaceError
from outpace.types import Manifest, TensorSpec, Version

_HEADER = struct.Struct("<8s64sq")  # magic, incarnation, version
_MAGIC = b"outpaceW"
_VOID: Version = -1
_ALIGNMENT = 64
_DATA_OFFSET = mmap.PAGESIZE


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
    version: Version = _VOID
    sealed: bool = True

    def label(self, incarnation: str, version: Version) -> None:
        _HEADER.pack_into(self.mapping, 0, _MAGIC, incarnation.encode(), version)


class Draft:
    """A snapshot that is copied but has no checksums yet."""

    def __init__(self, buffer: _Buffer, version: Version, seconds: float) -> None:
        self._buffer = buffer
        self.version = version
        self.seconds = seconds


class SnapshotWriter:
    """`copy` on the thread that owns the weights, `seal` on any other. Safe to call from two threads at once."""

    def __init__(self, directory: str | Path, incarnation: str, dtype: torch.dtype | None = None) -> None:
        """Floating-point tensors are stored as `dtype` (None: as they are)."""
        if len(incarnation.encode()) > 64:
            raise ValueError("an incarnation's name is at most 64 bytes")
        self._directory = Path(directory)
        self._incarnation = incarnation
        self._dtype = dtype
        self._slots: list[_Slot] = []
        self._buffers: list[_Buffer] = []
        self._latest: Version = _VOID
        self._lock = threading.Lock()

    @property
    def buffers(self) -> int:
        return len(self._buffers)

    def publish(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Manifest:
        return self.seal(self.copy(version, tensors, leased))

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Draft:
        """Copy the tensors into a free buffer. Only this part needs the weights to hold still."""
        started = time.perf_counter()
        distinct = distinct_tensors(tensors)
        slots = _layout(distinct, self._dtype)
        if not self._slots:
            self._slots = slots
        assert slots == self._slots, "the tensors of a policy keep their names, shapes and dtypes"
        buffer = self._take(version, leased)
        with torch.no_grad():
            for view, tensor in zip(buffer.views, distinct.values(), strict=True):
                view.copy_(tensor)
        buffer.label(self._incarnation, version)
        return Draft(buffer, version, time.perf_counter() - started)

    def seal(self, draft: Draft) -> Manifest:
        """Compute the checksums; from then on the snapshot is complete."""
        content = draft._buffer.content
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
        with self._lock:
            draft._buffer.sealed = True
            self._latest = max(self._latest, draft.version)
        return Manifest(self._incarnation, draft.version, str(draft._buffer.path), specs, draft.seconds)

    def close(self) -> None:
        """Remove the files. Readers that hold one open finish their read."""
        for buffer in self._buffers:
            buffer.path.unlink(missing_ok=True)
        self._buffers = []

    def _take(self, version: Version, leased: Collection[Version]) -> _Buffer:
        """Choose a buffer for `version` and void its header, so that a late reader sees the reuse."""
        with self._lock:
            free = [b for b in self._buffers if b.sealed and b.version != self._latest and b.version not in leased]
            buffer = min(free, key=lambda b: b.version) if free else self._add_buffer()
            buffer.version, buffer.sealed = version, False
        buffer.label(self._incarnation, _VOID)
        return buffer

    def _add_buffer(self) -> _Buffer:
        end = max((slot.offset + slot.nbytes for slot in self._slots), default=_DATA_OFFSET)
        path = self._directory / f"{self._incarnation}-{len(self._buffers)}.weights"
        mapping = _allocate(path, end)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        views = [content[s.offset : s.offset + s.nbytes].view(s.dtype).view(s.shape) for s in self._slots]
        buffer = _Buffer(path, mapping, content, views)
        self._buffers.append(buffer)
        return buffer


def read_snapshot(manifest: Manifest, verify: bool = True) -> dict[str, Tensor]:
    """Copy the snapshot out, by tensor name; tied weights come once, under the name the model lists first.

    Raises `CorruptData` when the file holds another snapshot (before, or by the end of, the copy) or, with `verify`,
    when a checksum does not match.
    """
    try:
        descriptor = os.open(manifest.path, os.O_RDONLY)
    except OSError as error:
        raise CorruptData(f"weights of version {manifest.version}: {error}") from None
    try:
        _check_label(descriptor, manifest)
        tensors = {spec.name: _read_tensor(descriptor, spec, manifest.version) for spec in manifest.tensors}
        _check_label(descriptor, manifest)
    finally:
        os.close(descriptor)
    if verify:
        for spec in manifest.tensors:
            if _crc32(_bytes_of(tensors[spec.name])) != spec.crc32:
                raise CorruptData(f"weights of version {manifest.version}: checksum of {spec.name} does not match")
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
    offset = _DATA_OFFSET
    for name, tensor in tensors.items():
        stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * stored.itemsize
        slots.append(_Slot(name, stored, list(tensor.shape), offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return slots


def _allocate(path: Path, nbytes: int) -> mmap.mmap:
    """A mapped file whose every page exists: a full file system is an error now and not a SIGBUS later."""
    place = os.statvfs(path.parent)
    free = place.f_bavail * place.f_frsize
    message = f"weights need {nbytes / 1e6:.0f} MB more in {path.parent}, where {free / 1e6:.0f} MB are free"
    if free < nbytes:
        raise OutpaceError(message)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise OutpaceError(message) from None
        raise
    finally:
        os.close(descriptor)


def _check_label(descriptor: int, manifest: Manifest) -> None:
    label = os.pread(descriptor, _HEADER.size, 0)
    expected = _HEADER.pack(_MAGIC, manifest.incarnation.encode(), manifest.version)
    if label != expected:
        raise CorruptData(f"the buffer of version {manifest.version} holds another snapshot by now")


def _read_tensor(descriptor: int, spec: TensorSpec, version: Version) -> Tensor:
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    if tensor.nbytes != spec.nbytes:
        raise CorruptData(f"weights of version {version}: {spec.name} cannot have {spec.nbytes} bytes")
    target = _buffer_of(_bytes_of(tensor))
    done = 0
    while done < spec.nbytes:
        count = os.preadv(descriptor, [target[done:]], spec.offset + done)
        if count == 0:
            raise CorruptData(f"weights of version {version}: the file ends inside {spec.name}")
        done += count
    return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _crc32(data: Tensor) -> int:
    return zlib.crc32(_buffer_of(data))


def _buffer_of(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)
