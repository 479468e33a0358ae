"""Weight transfer over a process group of two ranks, learner and engine: the sender and the rendezvous.

    send_snapshot ──▶ thread: the snapshot file, in pieces ──▶ process group ──▶ outpace_vllm.collective.receive

Invariants
- The learner never blocks on an engine: each transfer has its own thread and process group, every step has a timeout,
  and a transfer that exceeds even that is abandoned.
- `send_snapshot` returns only after the engine has received everything and verified every checksum.
- Importing this module does not import torch: the controller builds the rendezvous.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any, Literal

import msgspec

from outpace.errors import UpdateFailed, one_line
from outpace.runtime.async_tools import run_in_thread
from outpace.types import Manifest, TensorSpec
from outpace.weights.snapshot import open_snapshot

GRACE_S = 5.0
"""Extra time beyond the timeout of a transfer, for it to fail by itself."""


async def send_snapshot(manifest: Manifest, meeting: dict[str, Any]) -> None:
    """Send a snapshot to the engine at this rendezvous, on a separate thread.

    Raises `UpdateFailed` when the engine does not connect, disconnects, times out or finds a bad checksum, and
    `CorruptData` when the snapshot is gone."""
    error: BaseException | None
    try:
        async with asyncio.timeout(meeting["timeout_s"] + GRACE_S):
            _, error = await run_in_thread(lambda: _send(manifest, meeting))
    except TimeoutError:
        error = RuntimeError("the transfer timed out and was abandoned")
    if isinstance(error, RuntimeError):
        raise UpdateFailed(f"weights of version {manifest.version}: {one_line(error)}") from error
    if error is not None:
        raise error


def _send(manifest: Manifest, meeting: dict[str, Any]) -> None:
    import torch

    from outpace_vllm.collective import PIECE_BYTES, RECEIVER, SENDER, TransferFailed, WeightChannel, extent

    first, last = extent(meeting["tensors"])
    everything = TensorSpec("the last tensor", "uint8", [last - first], first, last - first, crc32=0)
    memory = torch.empty(min(PIECE_BYTES, last - first), dtype=torch.uint8)
    content: Any = memory.numpy()
    with open_snapshot(manifest) as snapshot:
        channel = WeightChannel(meeting, SENDER)
        try:
            for start in range(0, last - first, PIECE_BYTES):
                size = min(PIECE_BYTES, last - first - start)
                snapshot.read_into(everything, memoryview(content)[:size], start)
                channel.broadcast(memory[:size].to(channel.device), SENDER)
            damaged = torch.zeros(1, dtype=torch.int64, device=channel.device)
            channel.broadcast(damaged, RECEIVER)  # from the engine: the number of damaged tensors
        finally:
            channel.close()
    if damaged.item():
        raise TransferFailed(f"{int(damaged.item())} tensors arrived with a wrong checksum")


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
