"""Copies of a learner's state in host memory, so that training goes on while they are written.

Invariants
- A copy is never written to by anybody from the moment it is made until it is given back.
- The memory of a copy that was given back serves the next one: fresh memory costs more than the copy itself, a page
  fault for every 4 KiB. More than one copy is held only while several are being written.
- What stays as it is for the whole run is not copied at all.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Layout = list[tuple[str, str, torch.dtype, torch.Size]]
"""File, name, dtype and shape of every tensor."""

_ALIGNMENT = 64


class Room:
    """One piece of host memory that is cut into the tensors of a state."""

    def __init__(self, layout: Layout, pinned: bool) -> None:
        self.layout = layout
        sizes = [shape.numel() * dtype.itemsize for _, _, dtype, shape in layout]
        strides = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        # Filled, so that every page exists.
        content = torch.empty(sum(strides), dtype=torch.uint8, pin_memory=pinned).fill_(0)
        pieces = torch.split(content, strides)
        self._views = [
            piece[:size].view(dtype).view(shape)
            for piece, size, (_, _, dtype, shape) in zip(pieces, sizes, layout, strict=True)
        ]

    def take(self, files: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """The same files with the same content, in here."""
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
    """A state at one version. `small` are the files that are no tensors."""

    files: dict[str, Tensors]
    small: dict[str, bytes]
    room: Room


class Copies:
    """Makes copies on the thread that trains; any other thread may write them and give them back."""

    def __init__(self) -> None:
        self._free: Room | None = None
        self._lock = threading.Lock()

    def reserve(self, layout: Layout, pinned: bool) -> None:
        """Have the memory ready before the first copy needs it."""
        room = self._room(layout, pinned)
        with self._lock:
            self._free = room

    def make(self, changing: dict[str, Tensors], lasting: dict[str, Tensors], small: dict[str, bytes]) -> StateCopy:
        """Copies `changing`; `lasting` is never changed by anybody."""
        room = self._room(*plan(changing))
        return StateCopy(room.take(changing) | lasting, small, room)

    def give_back(self, copy: StateCopy) -> None:
        with self._lock:
            self._free = copy.room

    def _room(self, layout: Layout, pinned: bool) -> Room:
        with self._lock:
            free, self._free = self._free, None
        return free if free is not None and free.layout == layout else Room(layout, pinned)


def plan(files: Mapping[str, Tensors]) -> tuple[Layout, bool]:
    """How a copy of these files is laid out, and whether its memory should be pinned."""
    named = [(file, name, tensor) for file, tensors in files.items() for name, tensor in tensors.items()]
    layout = [(file, name, tensor.dtype, tensor.shape) for file, name, tensor in named]
    return layout, any(tensor.is_cuda for _, _, tensor in named)
