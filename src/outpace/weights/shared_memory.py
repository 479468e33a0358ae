"""Snapshots of the policy in shared memory: one writer, any number of readers, no locks between processes.

    learner ── copy ──▶ free buffer ── seal: checksums, delta ──▶ Manifest ──▶ readers (`read_snapshot`)

The writer keeps a few snapshot files (normally on a memory file system) mapped and reuses them. All have the same
layout, fixed by the first snapshot.

Invariants
- A buffer that may still be read is never overwritten: not the latest complete snapshot, not one that is being sealed
  or used as the base of a delta, and not a leased one.
- A buffer is added only when all are in use, so the leases bound the number of buffers; none is ever removed.
  Allocating one may take many times as long as a copy, so `preallocate` does it ahead of time on another thread.
- The writer never unmaps a file: a tensor over an unmapped region reads garbage without an error.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from outpace.models.slices import local_part, slice_of
from outpace.types import Manifest, TensorSpec, Version, WeightDelta
from outpace.weights import delta, snapshot
from outpace.weights.snapshot import DATA_OFFSET, VOID, SnapshotFile, padded


@dataclass(kw_only=True)
class SnapshotBuffer:
    """Memory for one snapshot."""

    content: Tensor  # the whole buffer as uint8
    views: list[Tensor]  # one view per tensor
    version: Version = VOID
    sealed: bool = True


B = TypeVar("B", bound=SnapshotBuffer)


class BufferPool(Generic[B]):
    """Snapshot buffers, reused. Thread-safe."""

    def __init__(self, make: Callable[[int], B]) -> None:
        """`make(n)` allocates buffer number n."""
        self.latest: Version = VOID
        self.all: list[B] = []
        self._make = make
        self._held: list[Version] = []
        self._lock = threading.Lock()
        self._allocating = threading.Lock()  # held while allocating

    def preallocate(self, leased: Collection[Version]) -> None:
        """Allocate a buffer if none is free. The next `take` then does not allocate, given the same leases."""
        with self._allocating:
            if not self._any_free(leased):
                buffer = self._make(len(self.all))
                with self._lock:
                    self.all.append(buffer)

    def take(self, version: Version, leased: Collection[Version]) -> B:
        """Return a free buffer for `version`, marked as being written."""
        if not self._any_free(leased):
            self.preallocate(leased)
        with self._lock:
            buffer = min(self._free(leased), key=lambda each: each.version)
            buffer.version, buffer.sealed = version, False
        return buffer

    def seal(self, buffer: B) -> None:
        """Mark the buffer as complete."""
        with self._lock:
            buffer.sealed = True
            self.latest = max(self.latest, buffer.version)

    @contextmanager
    def hold_latest(self) -> Iterator[B | None]:
        """Yield the latest complete buffer, or None. It is not reused inside the context."""
        with self._lock:
            buffer = next((each for each in self.all if each.sealed and each.version == self.latest != VOID), None)
            if buffer is not None:
                self._held.append(buffer.version)
        try:
            yield buffer
        finally:
            if buffer is not None:
                with self._lock:
                    self._held.remove(buffer.version)

    def _any_free(self, leased: Collection[Version]) -> bool:
        with self._lock:
            return bool(self._free(leased))

    def _free(self, leased: Collection[Version]) -> list[B]:
        used = {self.latest, *self._held, *leased} - {VOID}
        return [each for each in self.all if each.sealed and each.version not in used]


class SnapshotLayout:
    """Offsets of the tensors in a snapshot buffer. Fixed by the first snapshot."""

    def __init__(self, dtype: torch.dtype | None, start: int = 0) -> None:
        """Store floating-point tensors as `dtype` (None: unchanged), from byte `start`."""
        self.specs: list[TensorSpec] = []  # without checksums
        self._dtype = dtype
        self._start = start

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the layout, or check it against the first one; return the tensors to store."""
        distinct = distinct_tensors(tensors)
        specs = self._specs_of(distinct)
        self.specs = self.specs or specs
        assert specs == self.specs, "tensor names, shapes and dtypes must not change between snapshots"
        return distinct

    @property
    def end(self) -> int:
        """Size of the buffer, including the padding of the last tensor."""
        return max((spec.offset + padded(spec.nbytes) for spec in self.specs), default=self._start)

    def views(self, content: Tensor) -> list[Tensor]:
        """Return a view of each tensor in a byte buffer."""
        return [_view(content, spec) for spec in self.specs]

    def _specs_of(self, tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
        specs: list[TensorSpec] = []
        offset = self._start
        for name, tensor in tensors.items():
            stored = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            nbytes = tensor.numel() * stored.itemsize
            dtype = str(stored).removeprefix("torch.")
            specs.append(TensorSpec(name, dtype, list(tensor.shape), offset, nbytes, crc32=0))
            offset += padded(nbytes)
        return specs


def distinct_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop duplicates of tied weights; the first name stays."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    distinct: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        local = local_part(tensor)
        identity = (local.data_ptr(), tuple(local.shape), local.stride())
        if local.numel() == 0 or identity not in seen:
            distinct[name] = tensor
        seen.add(identity)
    return distinct


def _view(content: Tensor, spec: TensorSpec) -> Tensor:
    flat = content[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype))
    return flat.view(spec.shape)


class CopyTimer:
    """Measures how long a copy blocks the learner: the longer of queueing (its thread) and copying (its device)."""

    def __init__(self, device: torch.device) -> None:
        self._started = time.perf_counter()
        self._queueing = 0.0
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record(stream)
            self._stream = stream

    def end(self) -> None:
        if self._events:
            self._events[1].record(self._stream)
        self._queueing = time.perf_counter() - self._started

    def seconds(self) -> float:
        """Wait for the copy; return the time."""
        if not self._events:
            return self._queueing
        self._events[1].synchronize()
        copying: float = self._events[0].elapsed_time(self._events[1]) / 1000
        return max(self._queueing, copying)


@dataclass(frozen=True)
class SnapshotDraft(Generic[B]):
    """A copied snapshot without checksums. On a GPU the copy may still be queued."""

    buffer: B
    timer: CopyTimer


class WeightWriter(ABC, Generic[B]):
    """Writes snapshots: `copy` on the thread that owns the weights, `seal` on any other. Thread-safe."""

    def __init__(self, device: torch.device, incarnation: str, layout: SnapshotLayout) -> None:
        self._device = device
        self._incarnation = incarnation
        self._layout = layout
        self._buffers = BufferPool(self._new_buffer)

    @property
    def buffers(self) -> int:
        return len(self._buffers.all)

    def publish(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Manifest:
        return self.seal(self.copy(version, tensors, leased))

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the layout; return the tensors to store."""
        return self._layout.lay_out(tensors)

    def preallocate(self, leased: Collection[Version]) -> None:
        """Allocate the buffer of the next `copy` ahead of time, off the training thread: see `BufferPool`."""
        self._buffers.preallocate(leased)

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> SnapshotDraft[B]:
        """Copy the tensors into a free buffer. Later changes of the weights do not affect it."""
        timer = CopyTimer(self._device)
        distinct = self.lay_out(tensors)
        buffer = self._take(version, leased)
        with torch.no_grad():
            self._fill(buffer, list(distinct.values()))
        timer.end()
        return SnapshotDraft(buffer, timer)

    def _take(self, version: Version, leased: Collection[Version]) -> B:
        """Return the buffer of the next snapshot."""
        return self._buffers.take(version, leased)

    @abstractmethod
    def seal(self, draft: SnapshotDraft[B]) -> Manifest:
        """Complete the snapshot: wait for the copy, compute the checksums."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.all.clear()

    @abstractmethod
    def _fill(self, buffer: B, tensors: list[Tensor]) -> None: ...

    @abstractmethod
    def _new_buffer(self, number: int) -> B: ...


log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class MappedBuffer(SnapshotBuffer):
    path: Path
    mapping: mmap.mmap
    delta: Path | None = None

    def label(self, incarnation: str, version: Version) -> None:
        label = snapshot.pack_header(incarnation, version)
        self.mapping[: len(label)] = label


class SnapshotWriter(WeightWriter[MappedBuffer]):
    """Writes snapshots into files."""

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
        super().__init__(torch.device("cpu"), incarnation, SnapshotLayout(dtype, start=DATA_OFFSET))
        self._directory = Path(directory)
        self._deltas = Path(deltas) if deltas is not None else None

    def _fill(self, buffer: MappedBuffer, tensors: list[Tensor]) -> None:
        """Copy the tensors. The header is void meanwhile, so that a late reader detects the reuse."""
        self._void(buffer)
        copy_slices(buffer.views, tensors)
        buffer.label(self._incarnation, buffer.version)

    def _void(self, buffer: MappedBuffer) -> None:
        buffer.label(self._incarnation, VOID)
        _remove_delta(buffer)

    def seal(self, draft: SnapshotDraft[MappedBuffer]) -> Manifest:
        """Compute checksums and delta."""
        buffer, content = draft.buffer, draft.buffer.content
        specs = [
            msgspec.structs.replace(spec, crc32=_crc32(content[spec.offset : spec.offset + spec.nbytes]))
            for spec in self._layout.specs
        ]
        changes = self._delta(self._deltas, buffer, specs) if self._deltas is not None else None
        version = buffer.version  # once sealed, the buffer may be reused
        self._buffers.seal(buffer)
        return Manifest(self._incarnation, version, str(buffer.path), specs, draft.timer.seconds(), changes)

    def close(self) -> None:
        """Remove the files. Readers with an open file can finish reading."""
        for buffer in self._buffers.all:
            buffer.path.unlink(missing_ok=True)
            _remove_delta(buffer)
        super().close()

    def _delta(self, directory: Path, buffer: MappedBuffer, specs: list[TensorSpec]) -> WeightDelta | None:
        """Write the delta from the latest complete snapshot.

        None if there is no earlier snapshot, if nearly everything changed, or if writing fails: deltas are optional."""
        version = buffer.version
        path = directory / f"{self._incarnation}-{version}.delta"
        with self._buffers.hold_latest() as base:
            if base is None or base.version >= version:
                return None
            header = delta.DeltaHeader(self._incarnation, base.version, version)
            try:
                changes = delta.write_delta(path, header, base.mapping, buffer.mapping, specs)
            except OSError as error:
                log.warning("publishing version %d without a delta: cannot write the delta: %s", version, error)
                return None
        buffer.delta = path if changes is not None else None
        return changes

    def _new_buffer(self, number: int) -> MappedBuffer:
        path = self._directory / f"{self._incarnation}-{number}.weights"
        mapping = snapshot.allocate(path, self._layout.end)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        return MappedBuffer(content=content, views=self._layout.views(content), path=path, mapping=mapping)


def read_snapshot(manifest: Manifest, verify: bool = True) -> dict[str, Tensor]:
    """Return a copy of the snapshot by tensor name. Tied weights appear once, under the first name.

    Raises `CorruptData` when the file holds another snapshot before or after the copy, or, with `verify`, when a
    checksum does not match.
    """
    with snapshot.open_snapshot(manifest) as file:
        tensors = {spec.name: _read_tensor(file, spec) for spec in manifest.tensors}
    if verify:
        for spec in manifest.tensors:
            file.compare(spec, _crc32(_bytes_of(tensors[spec.name])))
    return tensors


def copy_slices(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy this process's slices of the tensors into views of the whole tensors."""
    for view, tensor in zip(views, tensors, strict=True):
        part = slice_of(tensor)
        if part.is_sharded:
            view.view(-1)[part.start : part.start + part.local.numel()].copy_(part.local.reshape(-1))
        else:
            view.copy_(tensor)


def _remove_delta(buffer: MappedBuffer) -> None:
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
