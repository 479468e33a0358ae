"""Where the tensors of an update come from. Each source gives them by name, and is checked before and after use.

    memory   a snapshot file, mapped: its header must name the wanted snapshot from beginning to end
    ipc      GPU memory of another process of this machine: the sums of its words must be the wanted ones throughout

Offsets in `tensors` count from the beginning of the file, or of the GPU memory.
"""

from __future__ import annotations

import base64
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outpace_vllm.ipc import open_device_memory, word_sums

Named = list[tuple[str, Tensor]]
Spec = dict[str, Any]
"""name, dtype, shape, offset, nbytes"""

_LABEL = struct.Struct("<8s64sq")  # magic, incarnation, version
_MAGIC = b"outpaceW"


@contextmanager
def from_memory(path: str, label: dict[str, Any], tensors: list[Spec]) -> Iterator[Named]:
    """The mapping is never closed by hand: whoever still has a tensor of it keeps it alive."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _check_label(descriptor, path, label)
        size = os.fstat(descriptor).st_size
        if any(spec["offset"] + spec["nbytes"] > size for spec in tensors):
            raise ValueError(f"{path} ends before its last tensor")
        mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)  # torch wants memory that it could write to
        yield _named(torch.frombuffer(mapping, dtype=torch.uint8), tensors)
        _check_label(descriptor, path, label)
    finally:
        os.close(descriptor)


@contextmanager
def from_device(
    device: str, handle: str, nbytes: int, sums: list[int], tensors: list[Spec], own: torch.device
) -> Iterator[Named]:
    index = own.index if own.index is not None else torch.cuda.current_device()
    found = str(torch.cuda.get_device_properties(index).uuid)
    if found != device:
        raise ValueError(f"the weights are on GPU {device}, this worker is on {found}")
    content = open_device_memory(base64.b64decode(handle, validate=True), index, nbytes)
    _check_sums(content, tensors, sums)
    yield _named(content, tensors)
    _check_sums(content, tensors, sums)


def _check_label(descriptor: int, path: str, label: dict[str, Any]) -> None:
    wanted = _LABEL.pack(_MAGIC, label["incarnation"].encode(), label["version"])
    if os.pread(descriptor, _LABEL.size, 0) != wanted:
        raise ValueError(f"{path} does not hold version {label['version']}, or not any more")


def _check_sums(content: Tensor, tensors: list[Spec], sums: list[int]) -> None:
    found = word_sums(content, [(spec["offset"], spec["nbytes"]) for spec in tensors])
    for spec, sum_found, wanted in zip(tensors, found, sums, strict=True):
        if sum_found != wanted:
            raise ValueError(f"{spec['name']} is not what was published: its sum is {sum_found}, not {wanted}")


def _named(content: Tensor, tensors: list[Spec]) -> Named:
    return [(spec["name"], _tensor(content, spec)) for spec in tensors]


def _tensor(content: Tensor, spec: Spec) -> Tensor:
    dtype = getattr(torch, spec["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{spec['name']} has the unknown dtype {spec['dtype']!r}")
    return content[spec["offset"] : spec["offset"] + spec["nbytes"]].view(dtype).view(spec["shape"])
