"""Snapshots of the policy in GPU memory, shared over CUDA IPC with an engine on the same GPU.

    compute thread   copy: copy the weights into a free buffer, queued after the optimizer step
    sealing thread   seal: wait for the copy, sum every tensor ──▶ Manifest with an IPC handle (plain bytes)

Same interface and buffer rules as `SnapshotWriter` in `shared_memory`. Buffers are freed only when the learner ends,
because a reader may have them mapped.

A reader opens the handle with `outpace_vllm.ipc` and compares the sums twice: before its copy, to start from what was
published, and after it, to detect a change during the copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.types import DeviceMemory, Manifest, Version
from outpace.weights.shared_memory import BufferPool, SnapshotBuffer, SnapshotLayout
from outpace_vllm.ipc import share_device_memory, word_sums

Share = Callable[[Tensor, bytes], bytes]
"""Maps (memory, owner) to a handle that another process can open."""


@dataclass(kw_only=True)
class _DeviceBuffer(SnapshotBuffer):
    handle: bytes


@dataclass
class DeviceDraft:
    """A snapshot whose copy is queued on the device."""

    buffer: _DeviceBuffer
    version: Version
    timer: _CopyTimer


class DeviceSnapshotWriter:
    """Writes snapshots: `copy` on the thread that owns the weights, `seal` on any other. Thread-safe."""

    def __init__(
        self,
        device: str | torch.device,
        incarnation: str,
        dtype: torch.dtype | None = None,
        share: Share = share_device_memory,
    ) -> None:
        """Store floating-point tensors as `dtype` (None: unchanged)."""
        self._device = torch.device(device)
        self._incarnation = incarnation
        self._share = share
        self._owner = os.urandom(16)
        self._layout = SnapshotLayout(dtype)
        self._buffers = BufferPool(self._new_buffer)

    @property
    def buffers(self) -> int:
        return len(self._buffers.all)

    def publish(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Manifest:
        return self.seal(self.copy(version, tensors, leased))

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._layout.lay_out(tensors)

    def preallocate(self, leased: Collection[Version]) -> None:
        """Allocate the next buffer ahead of time: an allocation may wait for all queued GPU work."""
        self._buffers.preallocate(leased)

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> DeviceDraft:
        """Queue a copy of the tensors into a free buffer. Steps queued later do not affect it."""
        timer = _CopyTimer(self._device)
        distinct = self.lay_out(tensors)
        buffer = self._buffers.take(version, leased)
        with torch.no_grad():
            torch._foreach_copy_(buffer.views, [tensor.detach() for tensor in distinct.values()])
        timer.end()
        return DeviceDraft(buffer, version, timer)

    def seal(self, draft: DeviceDraft) -> Manifest:
        """Wait for the copy and compute the sums. The snapshot is complete afterwards."""
        seconds = draft.timer.seconds()
        content = draft.buffer.content
        sums = self._sums(content)
        self._buffers.seal(draft.buffer)
        memory = DeviceMemory(device_id(self._device), draft.buffer.handle, content.nbytes, sums)
        return Manifest(self._incarnation, draft.version, "", self._layout.specs, seconds, device=memory)

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.all.clear()

    def _sums(self, content: Tensor) -> list[int]:
        with _side_stream(self._device):
            return word_sums(content, [(spec.offset, spec.nbytes) for spec in self._layout.specs])

    def _new_buffer(self, number: int) -> _DeviceBuffer:
        """Allocate a zeroed buffer: sums run over whole words, so the padding between tensors must stay zero."""
        with _side_stream(self._device):
            content = torch.zeros(max(self._layout.end, 1), dtype=torch.uint8, device=self._device)
        handle = self._share(content, self._owner)
        return _DeviceBuffer(content=content, views=self._layout.views(content), handle=handle)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Run GPU work on a separate stream, concurrently with training; synchronize at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class _CopyTimer:
    """Measures how long a copy blocks the learner: its thread while queueing or its device while copying."""

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


def device_id(device: torch.device) -> str:
    """Return an id of the device that is the same in every process, whatever its index there."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
