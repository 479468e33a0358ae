"""MERGED"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.config import Config
from outpace.placement import transport_of
from outpace.types import Manifest, Version
from outpace.weights.store import SnapshotWriter


class Writer(Protocol):
    """A snapshot writer: `copy` on the thread that owns the weights, `seal` on any other."""

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the layout; return the tensors to store."""
        ...

    def make_ready(self, leased: Collection[Version]) -> None:
        """Allocate the buffer of the next `copy` ahead of time, off the training thread."""
        ...

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Any:
        """Copy the tensors; return a draft for `seal`. Buffers of `leased` versions are not touched."""
        ...

    def seal(self, draft: Any) -> Manifest: ...

    def close(self) -> None: ...


def snapshot_writer(config: Config, device: str, directory: Path, incarnation: str) -> Writer:
    """Return a writer into GPU memory (CUDA IPC) or shared memory, for weights on `device`.

    Adapters and deltas are read from files, so they always use shared memory."""
    from outpace.weights.device import DeviceSnapshotWriter  # which imports the buffers of this module

    dtype: torch.dtype = getattr(torch, config.model.dtype)
    in_files = config.lora.rank > 0 or config.weights.delta
    if torch.device(device).type == "cuda" and transport_of(config) == "ipc" and not in_files:
        return DeviceSnapshotWriter(device, incarnation, dtype)
    deltas = Path(config.weights.dir or directory) if config.weights.delta else None
    return SnapshotWriter(directory, incarnation, dtype, deltas)
