"""Snapshots of the policy in GPU memory, shared over CUDA IPC with an engine on the same GPU.

    compute thread   copy: copy the weights into a free buffer, queued after the optimizer step
    sealing thread   seal: wait for the copy, sum every tensor ──▶ Manifest with an IPC handle (plain bytes)

Buffers are freed only when the learner ends, because a reader may have them mapped.

A reader opens the handle with `outpace_vllm.ipc` and compares the sums twice: before its copy, to start from what was
published, and after it, to detect a change during the copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.types import DeviceMemory, Manifest
from outpace.weights.shared_memory import SnapshotBuffer, SnapshotDraft, SnapshotLayout, WeightWriter
from outpace_vllm.ipc import share_device_memory, word_sums

Share = Callable[[Tensor, bytes], bytes]
"""Maps (memory, owner) to a handle that another process can open."""


@dataclass(kw_only=True)
class _DeviceBuffer(SnapshotBuffer):
    handle: bytes


class DeviceSnapshotWriter(WeightWriter[_DeviceBuffer]):
    """Writes snapshots into GPU memory."""

    def __init__(
        self,
        device: str | torch.device,
        incarnation: str,
        dtype: torch.dtype | None = None,
        share: Share = share_device_memory,
    ) -> None:
        """Store floating-point tensors as `dtype` (None: unchanged)."""
        super().__init__(torch.device(device), incarnation, SnapshotLayout(dtype))
        self._share = share
        self._owner = os.urandom(16)

    def _fill(self, buffer: _DeviceBuffer, tensors: list[Tensor]) -> None:
        torch._foreach_copy_(buffer.views, [tensor.detach() for tensor in tensors])

    def seal(self, draft: SnapshotDraft[_DeviceBuffer]) -> Manifest:
        """Wait for the copy and compute the sums."""
        seconds = draft.timer.seconds()
        buffer = draft.buffer
        with _side_stream(self._device):
            sums = word_sums(buffer.content, [(spec.offset, spec.nbytes) for spec in self._layout.specs])
        memory = DeviceMemory(device_id(self._device), buffer.handle, buffer.content.nbytes, sums)
        version = buffer.version  # once sealed, the buffer may be reused
        self._buffers.seal(buffer)
        return Manifest(self._incarnation, version, "", self._layout.specs, seconds, device=memory)

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


def device_id(device: torch.device) -> str:
    """Return an id of the device that is the same in every process, whatever its index there."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
