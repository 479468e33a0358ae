"""Which snapshots a learner writes: into the memory of its machine, or into that of its GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.config import Config
from outpace.placement import transport_of
from outpace.types import Manifest, Version
from outpace.weights.device import DeviceSnapshotWriter
from outpace.weights.store import SnapshotWriter


class Writer(Protocol):
    """`copy` on the thread that owns the weights, `seal` on any other."""

    def lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decide where everything lies; returns what is stored."""
        ...

    def make_ready(self, leased: Collection[Version]) -> None:
        """See to it that the next `copy` finds a buffer. For a thread that has the time."""
        ...

    def copy(self, version: Version, tensors: Mapping[str, Tensor], leased: Collection[Version]) -> Any:
        """A draft, for `seal` of the same writer. Buffers of `leased` versions stay as they are."""
        ...

    def seal(self, draft: Any) -> Manifest: ...

    def close(self) -> None: ...


def snapshot_writer(config: Config, device: str, directory: Path, incarnation: str) -> Writer:
    """`device` is where the learner's weights are. Adapters and deltas are read from files, wherever that is."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    in_files = config.lora.rank > 0 or config.weights.delta
    if torch.device(device).type == "cuda" and transport_of(config) == "ipc" and not in_files:
        return DeviceSnapshotWriter(device, incarnation, dtype)
    deltas = Path(config.weights.dir or directory) if config.weights.delta else None
    return SnapshotWriter(directory, incarnation, dtype, deltas)
