"""The part of a tensor that this process holds: all of it, or its rows of a tensor sharded over several processes.

FSDP2 shards the first dimension, so the part is a contiguous range of the whole tensor's elements, in memory and in a
file. Each process can read and write its own range without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class TensorSlice:
    """The elements of a tensor that are in this process, from element `start` of the whole."""

    local: Tensor
    shape: torch.Size  # of the whole tensor
    start: int = 0
    is_sharded: bool = False


def slice_of(tensor: Tensor) -> TensorSlice:
    """Return this process's part of a tensor, which is not a copy."""
    if not isinstance(tensor, DTensor):
        return TensorSlice(tensor.detach(), tensor.shape)
    first, _ = _row_bounds(tensor)
    return TensorSlice(local_part(tensor), tensor.shape, first * math.prod(tensor.shape[1:]), is_sharded=True)


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements that are in this process."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def like_sharded(tensor: DTensor, rows: Callable[[int, int], Tensor]) -> DTensor:
    """Return a tensor that is sharded like another one. `rows(first, end)` returns rows of the whole tensor."""
    first, end = _row_bounds(tensor)
    local = rows(first, end) if end > first else torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
    return DTensor.from_local(
        local.to(tensor.device), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


def _row_bounds(tensor: DTensor) -> tuple[int, int]:
    """Return the first row of this process and the end of its rows: as torch.chunk divides them, so the last processes
    may have fewer rows, or none."""
    rows = tensor.shape[0]
    each = -(-rows // tensor.device_mesh.size())
    first = min(each * tensor.device_mesh.get_local_rank(), rows)
    return first, min(first + each, rows)
