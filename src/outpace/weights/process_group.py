"""Weight transfer over a process group of two ranks, learner and engine: the sender and the rendezvous.

    send ──▶ transfer thread: the snapshot file, piece by piece ──▶ process group ──▶ outpace_vllm.collective.receive

Invariants
- The learner never blocks on an engine: each transfer has its own thread and process group, every step has a timeout,
  and a transfer that exceeds even that is abandoned.
- `send` returns only after the engine has received everything and verified every checksum.
- Importing this module does not import torch: the controller builds the rendezvous.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from outpace.errors import UpdateFailed, one_line
from outpace.runtime.async_tools import run_in_thread
from outpace.types import Manifest, TensorSpec
from outpace.weights.snapshot import open_snapshot

if TYPE_CHECKING:
    from torch import Tensor

    from outpace_vllm.collective import WeightChannel


GRACE_S = 5.0
"""Extra time beyond the timeout of a transfer, for it to fail by itself."""


class ProcessGroupSender:
    """Sends snapshots to engines, several at once if needed."""

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        """Send a snapshot to the engine at this rendezvous.

        Raises `UpdateFailed` when the engine does not connect, disconnects, times out or finds a bad checksum, and
        `CorruptData` when the snapshot is gone."""
        try:
            async with asyncio.timeout(meeting["timeout_s"] + GRACE_S):
                _, error = await run_in_thread(lambda: _send(manifest, meeting))
        except TimeoutError:
            from outpace_vllm.collective import TransferFailed

            error = TransferFailed("the transfer timed out and was abandoned")
        if isinstance(error, RuntimeError):
            raise UpdateFailed(f"weights of version {manifest.version}: {one_line(error)}") from error
        if error is not None:
            raise error


def _send(manifest: Manifest, meeting: dict[str, Any]) -> None:
    import torch

    from outpace_vllm.collective import PIECE_BYTES, SENDER, WeightChannel, extent

    first, last = extent(meeting["tensors"])
    everything = TensorSpec("the last tensor", "uint8", [last - first], first, last - first, crc32=0)
    memory = torch.empty(min(PIECE_BYTES, last - first), dtype=torch.uint8)
    with open_snapshot(manifest) as snapshot:
        channel = WeightChannel(meeting, SENDER)
        try:
            for start in range(0, last - first, PIECE_BYTES):
                piece = memory[: min(PIECE_BYTES, last - first - start)]
                snapshot.read_into(everything, _buffer_of(piece), start)
                channel.broadcast(piece.to(channel.device), SENDER)
            _check_received(channel)
        finally:
            channel.close()


def _check_received(channel: WeightChannel) -> None:
    """Receive the number of damaged tensors from the engine; raise unless it is zero."""
    import torch

    from outpace_vllm.collective import RECEIVER, TransferFailed

    damaged = torch.zeros(1, dtype=torch.int64, device=channel.device)
    channel.broadcast(damaged, RECEIVER)
    if damaged.item():
        raise TransferFailed(f"{int(damaged.item())} tensors arrived with a wrong checksum")


def _buffer_of(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def rendezvous_for(
    manifest: Manifest, timeout_s: float, backend: Literal["gloo", "nccl"], host: str = "127.0.0.1"
) -> dict[str, Any]:
    """Return the rendezvous of one transfer, at a free port of `host` (this machine), as plain data for both sides.

    See `outpace_vllm.collective` for the fields."""
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    return {
        "host": host,
        "port": port,
        "key": secrets.token_hex(8),
        "backend": backend,
        "timeout_s": timeout_s,
        "tensors": msgspec.to_builtins(sorted(manifest.tensors, key=lambda spec: spec.offset)),
    }
