"""Receives weights over a process group of two: the learner and this process.

    meeting   host, port   where the learner listens for this transfer
              key          unique id of this transfer
              backend      "gloo" (through CPU memory) or "nccl" (from GPU to GPU)
              timeout_s    deadline for the whole transfer
              tensors      name, dtype, shape, offset, nbytes and crc32 of each, ordered by offset

The learner sends the snapshot's bytes from the first tensor to the end of the last, in pieces. The receiver replies
with the number of tensors whose checksum is wrong.

Invariants
- Every step has a deadline. Each transfer has its own process group, so a failed one cannot affect the next. torch's
  default group is not touched.
- No tensor is passed on before all have arrived with correct checksums.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]

SENDER, RECEIVER = 0, 1
PIECE_BYTES = 64 << 20

Meeting = dict[str, Any]


class TransferFailed(RuntimeError):
    """The transfer failed or was incomplete."""


def receive(meeting: Meeting) -> Iterator[tuple[str, Tensor]]:
    """Receive all tensors from the learner, then yield them by name."""
    first, last = extent(meeting["tensors"])
    channel = WeightChannel(meeting, RECEIVER)
    try:
        content = torch.empty(last - first, dtype=torch.uint8, device=channel.device)
        for piece in content.split(PIECE_BYTES):  # type: ignore[no-untyped-call]
            channel.broadcast(piece, SENDER)
        damaged = _damaged(content, meeting["tensors"], first)
        channel.broadcast(torch.tensor([len(damaged)], device=channel.device), RECEIVER)
    except RuntimeError as error:
        raise TransferFailed(f"receiving the weights failed: {error}") from error
    finally:
        channel.close()
    if damaged:
        raise TransferFailed(f"wrong checksums of received weights: {', '.join(damaged[:3])}")
    for tensor in meeting["tensors"]:
        start = tensor["offset"] - first
        flat = content[start : start + tensor["nbytes"]].view(getattr(torch, tensor["dtype"]))
        yield tensor["name"], flat.view(tensor["shape"])


class Fetch:
    """One transfer. Receives in a thread while the server samples, and keeps the weights until they are loaded."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.key: str = meeting["key"]
        self._meeting = meeting
        self._device = device
        self._weights: list[tuple[str, Tensor]] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outpace-fetch", daemon=True)
        self._thread.start()

    def weights(self) -> list[tuple[str, Tensor]]:
        """The received weights. Called only after the sender knows that they have arrived."""
        self._thread.join(self._meeting["timeout_s"])
        if self._error is not None:
            raise self._error
        if self._weights is None:
            raise TimeoutError("the weights have not arrived yet")
        return self._weights

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # the current device is per thread
            self._weights = list(receive(self._meeting))
        except Exception as error:  # raised by `weights`
            self._error = error


def extent(tensors: list[dict[str, Any]]) -> tuple[int, int]:
    """The offsets where the first tensor starts and the last one ends."""
    begins = [tensor["offset"] for tensor in tensors]
    ends = [tensor["offset"] + tensor["nbytes"] for tensor in tensors]
    return min(begins, default=0), max(ends, default=0)


class WeightChannel:
    """A process group of two for one transfer."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._deadline = time.monotonic() + meeting["timeout_s"]
        self._group: Any = None
        self.device = torch.device("cuda") if meeting["backend"] == "nccl" else torch.device("cpu")
        try:
            store = PrefixStore(meeting["key"], self._store(meeting, rank))
            make = _nccl_group if meeting["backend"] == "nccl" else _gloo_group
            self._group = make(store, rank, self._time_left(), meeting["host"])
        except (RuntimeError, OSError) as error:
            self.close()
            raise TransferFailed(f"no process group at {meeting['host']}:{meeting['port']}: {error}") from error

    def broadcast(self, data: Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = self._time_left()
        work = self._group.broadcast([data], options)
        if self.device.type == "cpu":
            work.wait()
            return
        while not work.is_completed():  # `wait` could block forever: NCCL has no timeout of its own
            if self._time_left() <= timedelta(milliseconds=1):
                raise TransferFailed("the peer does not respond")
            time.sleep(0.001)
        work.wait()

    def close(self) -> None:
        """Abort any transfer. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _store(self, meeting: Meeting, rank: int) -> TCPStore:
        host, port = meeting["host"], meeting["port"]
        if rank == RECEIVER:
            return TCPStore(host, port, 2, False, self._time_left())
        listener = socket.create_server((host, port))  # torch would listen on all addresses
        return TCPStore(host, port, 2, True, self._time_left(), False, master_listen_fd=listener.detach())

    def _time_left(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))


def _gloo_group(store: PrefixStore, rank: int, timeout: timedelta, host: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    own_address = rank == SENDER or host in ("127.0.0.1", "localhost", "::1")
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [
        ProcessGroupGloo.create_device(hostname=host) if own_address else ProcessGroupGloo.create_default_device()
    ]
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl_group(store: PrefixStore, rank: int, timeout: timedelta, host: str) -> Any:
    from torch.distributed import ProcessGroupNCCL

    # By default torch terminates the process when a peer is gone.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, 2, options)


def _damaged(content: Tensor, tensors: list[dict[str, Any]], first: int) -> list[str]:
    data: Any = content.cpu().numpy()
    memory = memoryview(data)
    return [
        tensor["name"]
        for tensor in tensors
        if zlib.crc32(memory[tensor["offset"] - first :][: tensor["nbytes"]]) != tensor["crc32"]
    ]
