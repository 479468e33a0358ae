"""The learner's side of weights that go to an engine over a process group of two.

    send ──▶ a thread of its own: the snapshot's file, piece by piece ──▶ group ──▶ outpace_vllm.collective.receive

Invariants
- The learner never waits on an engine: a transfer has a thread and a group of its own, every step in it has a deadline,
  and one that overstays even that is left behind.
- `send` returns only when the other side has everything and has found every checksum right.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from outpace.errors import UpdateFailed, one_line
from outpace.runtime.threads import in_thread
from outpace.types import Manifest, TensorSpec
from outpace.weights.snapshot import opened
from outpace_vllm.collective import PIECE_BYTES, RECEIVER, SENDER, Channel, TransferFailed, extent

GRACE_S = 5.0
"""What a transfer gets beyond its deadline, to give up by itself."""


class Sender:
    """Sends snapshots to engines, to several at once if need be."""

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        """Raises `UpdateFailed` when the other side does not come, goes away, falls silent or finds a bad checksum,
        and `CorruptData` when the snapshot is gone."""
        try:
            async with asyncio.timeout(meeting["timeout_s"] + GRACE_S):
                _, error = await in_thread(lambda: _send(manifest, meeting))
        except TimeoutError:
            error = TransferFailed("the transfer hangs, and is left to itself")
        if isinstance(error, RuntimeError):
            raise UpdateFailed(f"weights of version {manifest.version}: {one_line(error)}") from error
        if error is not None:
            raise error


def _send(manifest: Manifest, meeting: dict[str, Any]) -> None:
    first, last = extent(meeting["tensors"])
    everything = TensorSpec("the last tensor", "uint8", [last - first], first, last - first, crc32=0)
    memory = torch.empty(min(PIECE_BYTES, last - first), dtype=torch.uint8)
    with opened(manifest) as snapshot:
        channel = Channel(meeting, SENDER)
        try:
            for start in range(0, last - first, PIECE_BYTES):
                piece = memory[: min(PIECE_BYTES, last - first - start)]
                snapshot.read_into(everything, _buffer_of(piece), start)
                channel.broadcast(piece.to(channel.device), SENDER)
            _hear_verdict(channel)
        finally:
            channel.close()


def _hear_verdict(channel: Channel) -> None:
    damaged = torch.zeros(1, dtype=torch.int64, device=channel.device)
    channel.broadcast(damaged, RECEIVER)
    if damaged.item():
        raise TransferFailed(f"{int(damaged.item())} tensors came with wrong checksums")


def _buffer_of(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)
