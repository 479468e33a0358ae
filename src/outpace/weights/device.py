"""Snapshots of the policy in GPU memory, for an engine on the same GPU: nothing leaves the device.

    compute thread   copy: the weights into a free buffer, queued behind the step that made them
    sealing thread   seal: wait for that copy, add every tensor up ──▶ Manifest with a handle of plain bytes

The face is that of `SnapshotWriter`, and so are the rules (`outpace.weights.buffers`). Buffers are freed when the
learner ends and not before, because a reader may have them mapped.

A reader opens the handle with `outpace_vllm.ipc` and compares the sums: before it copies, so that it starts with what
was published, and afterwards, so that nothing has changed under its hands.
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
from outpace.weights.buffers import Buffer, Buffers
from outpace.weights.layout import Layout
from outpace_vllm.ipc import share_device_memory, word_sums

Share = Callable[[Tensor, bytes], bytes]
"""From memory and its owner to a handle that another process can open."""


@dataclass(kw_only=True)
class _Buffer(Buffer):
    handle: bytes


@dataclass
class DeviceDraft:
    """A snapshot whose copy is under way on the device."""

    buffer: _Buffer
    version: Version
    held: _Held


class DeviceSnapshotWriter:
    """`copy` on the thread that owns the weights, `seal` on any other. Safe to call from two threads at once."""

    def __init__(
        self,
        device: str | torch.device,
        incarnation: str,
        dtype: torch.dtype | None = None,
        share: Share = share_device_memory,
    ) -> None:
        """Floating-point tensors are stored as `dtype` (None: as they are)."""
        self._device = torch.device(device)
        self._incarnation = incarnation
        self._share = share
        self._owner = os.urandom(16)
        self._layout = Layout(dtype)
        self._buffers = Buffers(self._new_buffer)

    @property
    def buffers(self) -> int:
        return len(self._buffers.all)

    def publish(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Manifest:
        return self.seal(self.copy(version, tensors, leased))

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._layout.lay_out(tensors)

    def make_ready(self, leased: Collection[Version]) -> None:
        """To get memory, the driver may wait for all that is queued: see `Buffers.make_ready`."""
        self._buffers.make_ready(leased)

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> DeviceDraft:
        """Queue the copy of the tensors into a free buffer: steps that are queued later do not reach it."""
        held = _Held(self._device)
        distinct = self.lay_out(tensors)
        buffer = self._buffers.take(version, leased)
        with torch.no_grad():
            torch._foreach_copy_(buffer.views, [tensor.detach() for tensor in distinct.values()])
        held.end()
        return DeviceDraft(buffer, version, held)

    def seal(self, draft: DeviceDraft) -> Manifest:
        """Wait for the copy and add it up; from then on the snapshot is complete."""
        seconds = draft.held.seconds()
        content = draft.buffer.content
        sums = self._sums(content)
        self._buffers.seal(draft.buffer)
        memory = DeviceMemory(device_id(self._device), draft.buffer.handle, content.nbytes, sums)
        return Manifest(self._incarnation, draft.version, "", self._layout.specs, seconds, device=memory)

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.all.clear()

    def _sums(self, content: Tensor) -> list[int]:
        with _beside_training(self._device):
            return word_sums(content, [(spec.offset, spec.nbytes) for spec in self._layout.specs])

    def _new_buffer(self, number: int) -> _Buffer:
        """The bytes between tensors are zero and stay so: sums run over whole words."""
        with _beside_training(self._device):
            content = torch.zeros(max(self._layout.end, 1), dtype=torch.uint8, device=self._device)
        handle = self._share(content, self._owner)
        return _Buffer(content=content, views=self._layout.views(content), handle=handle)


@contextmanager
def _beside_training(device: torch.device) -> Iterator[None]:
    """What is queued here runs beside the training that goes on, not behind it, and is done at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class _Held:
    """How long a copy holds up the learner: its thread for the queueing, or its device for the copying."""

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
        """Waits until the copy is done."""
        if not self._events:
            return self._queueing
        self._events[1].synchronize()
        copying: float = self._events[0].elapsed_time(self._events[1]) / 1000
        return max(self._queueing, copying)


def device_id(device: torch.device) -> str:
    """The same in every process, whatever number the device has there."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
