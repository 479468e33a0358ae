"""MERGED"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.types import TensorSpec
from outpace.weights.snapshot import padded


class Layout:
    """Offsets of the tensors in a snapshot buffer. Fixed by the first snapshot."""

    def __init__(self, dtype: torch.dtype | None, start: int = 0) -> None:
        """Store floating-point tensors as `dtype` (None: unchanged), from byte `start`."""
        self.specs: list[TensorSpec] = []  # without checksums
        self._dtype = dtype
        self._start = start

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the layout, or check it against the first one; return the tensors to store."""
        distinct = distinct_tensors(tensors)
        specs = self._specs_of(distinct)
        self.specs = self.specs or specs
        assert specs == self.specs, "tensor names, shapes and dtypes must not change between snapshots"
        return distinct

    @property
    def end(self) -> int:
        """Size of the buffer, including the padding of the last tensor."""
        return max((spec.offset + padded(spec.nbytes) for spec in self.specs), default=self._start)

    def views(self, content: Tensor) -> list[Tensor]:
        """Return a view of each tensor in a byte buffer."""
        return [_view(content, spec) for spec in self.specs]

    def _specs_of(self, tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
        specs: list[TensorSpec] = []
        offset = self._start
        for name, tensor in tensors.items():
            stored = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            nbytes = tensor.numel() * stored.itemsize
            dtype = str(stored).removeprefix("torch.")
            specs.append(TensorSpec(name, dtype, list(tensor.shape), offset, nbytes, crc32=0))
            offset += padded(nbytes)
        return specs


def distinct_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop duplicates of tied weights; the first name stays."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    distinct: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0 or identity not in seen:
            distinct[name] = tensor
        seen.add(identity)
    return distinct


def _view(content: Tensor, spec: TensorSpec) -> Tensor:
    flat = content[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype))
    return flat.view(spec.shape)
