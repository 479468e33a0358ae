"""Which snapshots a learner writes: into the memory of its machine, or into that of its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch

from outpace.config import Config
from outpace.resources import transport
from outpace.weights.device import DeviceSnapshotWriter
from outpace.weights.store import SnapshotWriter

Writer: TypeAlias = SnapshotWriter | DeviceSnapshotWriter


def snapshot_writer(config: Config, device: str, directory: Path, incarnation: str) -> Writer:
    """`device` is where the learner's weights are."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if torch.device(device).type == "cuda" and transport(config) == "ipc":
        return DeviceSnapshotWriter(device, incarnation, dtype)
    deltas = Path(config.weights.dir or directory) if config.weights.delta else None
    return SnapshotWriter(directory, incarnation, dtype, deltas)
