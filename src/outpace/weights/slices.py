"""The part of a tensor that this process holds: all of it, or its rows of a tensor sharded over several processes.

FSDP2 shards the first dimension, so the part is a contiguous range of the whole tensor's elements, in memory and in a
file. Each process can read and write its own range without the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class TensorSlice:
    """The elements of a tensor that are in this process, flat and contiguous, from element `start` of the whole."""

    local: Tensor
    shape: torch.Size  # of the whole tensor
    start: int
    is_sharded: bool

    @property
    def row_bounds(self) -> tuple[int, int]:
        """First row, and end of the rows."""
        row = max(1, math.prod(self.shape[1:]))
        return self.start // row, (self.start + self.local.numel()) // row


def slice_of(tensor: Tensor) -> TensorSlice:
    """Return this process's part of a tensor. Its elements are those of the tensor, not a copy, where the tensor is
    contiguous."""
    if not isinstance(tensor, DTensor):
        return TensorSlice(tensor.detach().reshape(-1), tensor.shape, 0, is_sharded=False)
    local = tensor.to_local().detach()
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())  # as torch.chunk: the last ranks may have fewer, or none
    start = min(rows * tensor.device_mesh.get_local_rank(), tensor.shape[0]) * math.prod(tensor.shape[1:])
    return TensorSlice(local.reshape(-1), tensor.shape, start, is_sharded=True)
