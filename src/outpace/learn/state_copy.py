"""MERGED"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Layout = list[tuple[str, str, torch.dtype, torch.Size]]
"""File, name, dtype and shape of every tensor."""

_COPY_ALIGNMENT = 64


class Room:
    """One block of host memory, divided into the tensors of a state."""

    def __init__(self, layout: Layout, pinned: bool) -> None:
        self.layout = layout
        sizes = [shape.numel() * dtype.itemsize for _, _, dtype, shape in layout]
        strides = [-(-size // _COPY_ALIGNMENT) * _COPY_ALIGNMENT for size in sizes]
        # Filling it makes the kernel allocate every page now.
        content = torch.empty(sum(strides), dtype=torch.uint8, pin_memory=pinned).fill_(0)
        blocks = torch.split(content, strides)
        self._views = [
            block[:size].view(dtype).view(shape)
            for block, size, (_, _, dtype, shape) in zip(blocks, sizes, layout, strict=True)
        ]

    def copy_from(self, files: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Copy the tensors of all files into this buffer and return the copies."""
        sources = [tensor.detach() for tensors in files.values() for tensor in tensors.values()]
        torch._foreach_copy_(self._views, sources, non_blocking=True)
        for device in {tensor.device for tensor in sources if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        copied: dict[str, Tensors] = {file: {} for file in files}
        for (file, name, _, _), view in zip(self.layout, self._views, strict=True):
            copied[file][name] = view
        return copied


@dataclass(frozen=True)
class StateCopy:
    """A copy of the state at one version. `small_files` holds the files without tensors."""

    files: dict[str, Tensors]
    small: dict[str, bytes]
    buffer: Room


class Copies:
    """Makes copies on the training thread and reuses their memory. Other threads may write and release them."""

    def __init__(self) -> None:
        self._free: Room | None = None
        self._lock = threading.Lock()

    def reserve(self, layout: Layout, pinned: bool) -> None:
        """Allocate the memory of the first copy in advance."""
        buffer = self._take_buffer(layout, pinned)
        with self._lock:
            self._free = buffer

    def make(self, changing: dict[str, Tensors], constant: dict[str, Tensors], small: dict[str, bytes]) -> StateCopy:
        """Copy `changing`; include `constant`, which never changes, without copying."""
        buffer = self._take_buffer(*plan(changing))
        return StateCopy(buffer.copy_from(changing) | constant, small, buffer)

    def give_back(self, copy: StateCopy) -> None:
        with self._lock:
            self._free = copy.buffer

    def _take_buffer(self, layout: Layout, pinned: bool) -> Room:
        with self._lock:
            free, self._free = self._free, None
        return free if free is not None and free.layout == layout else Room(layout, pinned)


def plan(files: Mapping[str, Tensors]) -> tuple[Layout, bool]:
    """Return the memory layout of a copy of these files, and whether its memory should be pinned."""
    named = [(file, name, tensor) for file, tensors in files.items() for name, tensor in tensors.items()]
    layout = [(file, name, tensor.dtype, tensor.shape) for file, name, tensor in named]
    return layout, any(tensor.is_cuda for _, _, tensor in named)
