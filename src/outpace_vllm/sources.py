"""Sources of the tensors of an update. Each source is verified before and after use.

    memory   a mapped snapshot file: its header must name the expected snapshot throughout
    ipc      GPU memory of another process on this machine: its word sums must match throughout

Offsets in `tensors` count from the beginning of the file or of the GPU memory.
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
    """Tensors of a mapped snapshot file. The mapping is not closed explicitly: its tensors keep it alive."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _check_label(descriptor, path, label)
        size = os.fstat(descriptor).st_size
        if any(spec["offset"] + spec["nbytes"] > size for spec in tensors):
            raise ValueError(f"{path}: the file ends before its last tensor")
        mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)  # torch requires writable memory
        yield _named(torch.frombuffer(mapping, dtype=torch.uint8), tensors)
        _check_label(descriptor, path, label)
    finally:
        os.close(descriptor)


@contextmanager
def from_device(
    device: str, handle: str, nbytes: int, sums: list[int], tensors: list[Spec], own: torch.device
) -> Iterator[Named]:
    """Tensors in GPU memory of another process on the same GPU."""
    index = own.index if own.index is not None else torch.cuda.current_device()
    found = str(torch.cuda.get_device_properties(index).uuid)
    if found != device:
        raise ValueError(f"the weights are on GPU {device}, but this worker is on GPU {found}")
    content = open_device_memory(base64.b64decode(handle, validate=True), index, nbytes)
    _check_sums(content, tensors, sums)
    yield _named(content, tensors)
    _check_sums(content, tensors, sums)


def _check_label(descriptor: int, path: str, label: dict[str, Any]) -> None:
    expected = _LABEL.pack(_MAGIC, label["incarnation"].encode(), label["version"])
    if os.pread(descriptor, _LABEL.size, 0) != expected:
        raise ValueError(f"{path}: does not contain version {label['version']}, or was overwritten")


def _check_sums(content: Tensor, tensors: list[Spec], sums: list[int]) -> None:
    found = word_sums(content, [(spec["offset"], spec["nbytes"]) for spec in tensors])
    for spec, sum_found, expected in zip(tensors, found, sums, strict=True):
        if sum_found != expected:
            raise ValueError(f"{spec['name']}: wrong checksum {sum_found}, expected {expected}")


def _named(content: Tensor, tensors: list[Spec]) -> Named:
    return [(spec["name"], _tensor(content, spec)) for spec in tensors]


def _tensor(content: Tensor, spec: Spec) -> Tensor:
    dtype = getattr(torch, spec["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{spec['name']}: unknown dtype {spec['dtype']!r}")
    return content[spec["offset"] : spec["offset"] + spec["nbytes"]].view(dtype).view(spec["shape"])
