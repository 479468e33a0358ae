"""The part of a tensor that this process holds: all of it, or its rows of a tensor sharded over several processes.

FSDP2 shards the first dimension, so the part is a contiguous range of the whole tensor's elements, in memory and in a
file. Each process can read and write its own range without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class TensorSlice:
    """The elements of a tensor that are in this process, from element `start` of the whole."""

    local: Tensor
    shape: torch.Size  # of the whole tensor
    start: int = 0
    is_sharded: bool = False


def slice_of(tensor: Tensor) -> TensorSlice:
    """Return this process's part of a tensor, without copying."""
    if not isinstance(tensor, DTensor):
        return TensorSlice(tensor.detach(), tensor.shape)
    first, _ = own_rows(tensor)
    return TensorSlice(local_part(tensor), tensor.shape, first * math.prod(tensor.shape[1:]), is_sharded=True)


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements that are in this process."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def like_sharded(tensor: DTensor, rows: Callable[[int, int], Tensor]) -> DTensor:
    """Return a tensor that is sharded like another one, in memory of the same device. `rows(first, end)` returns rows
    of the whole tensor."""
    found: DTensor = torch.empty_like(tensor)  # type: ignore[assignment]
    first, end = own_rows(tensor)
    if end > first:
        local_part(found).copy_(rows(first, end))
    return found


@torch.no_grad()
def copy_own_rows(target: Tensor, whole: Tensor) -> None:
    """Copy `whole` into `target`; if `target` is sharded, only this process's rows."""
    local_part(target).copy_(whole[slice(*own_rows(target))] if isinstance(target, DTensor) else whole)


def first_values(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the first `count` values of each whole tensor, as float32 on the CPU. If the tensors are sharded, all
    processes must call this."""
    found = torch.zeros(len(tensors), count)
    for row, tensor in zip(found, tensors, strict=True):
        part = slice_of(tensor)
        own = part.local.flatten()[: max(0, count - part.start)]
        row[part.start : part.start + len(own)] = own
    if sharded := [tensor for tensor in tensors if isinstance(tensor, DTensor)]:
        assert len(sharded) == len(tensors), "the values of other tensors would be added up"
        # Every value is on one process. Summed as integers, which preserves negative zeros.
        dist.all_reduce(found.view(torch.int32), group=sharded[0].device_mesh.get_group())
    return [row[: tensor.numel()] for row, tensor in zip(found, tensors, strict=True)]


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """Return start and end of this process's rows. Rows are divided as by torch.chunk, so the last processes may have
    fewer rows, or none."""
    assert tensor.placements == (Shard(0),), f"only rows can be sharded, not {tensor.placements}"
    rows = tensor.shape[0]
    each = -(-rows // tensor.device_mesh.size())
    first = min(each * tensor.device_mesh.get_local_rank(), rows)
    return first, min(first + each, rows)
