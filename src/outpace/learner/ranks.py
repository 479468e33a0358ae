"""Ranks: the processes of a sharded learner, and what they exchange besides the model's own tensors.

All ranks make the same calls in the same order (`LearnerHost` gets every call of the controller on every rank), so each
of these functions is a collective: it returns when all ranks have called it. If a rank does not arrive within
the timeout, or its process has ended, all others raise `CollectiveFailed`.

Messages are bytes. They travel over gloo, on GPU machines too, so a rank can wait for the others without using its GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outpace.errors import CollectiveFailed
from outpace.runtime.torchrun import TorchrunProcess

V = TypeVar("V")
Array = NDArray[Any]


@dataclass(frozen=True)
class RankSettings:
    """One rank of a learner.

    - `rendezvous`: file through which ranks on one machine find each other. Under torchrun only its name is used
    - `logs`: directory for a record of the last collective calls, written if one fails; None: not written
    - `torchrun`: its store serves as rendezvous; None: not started by torchrun"""

    rank: int
    size: int
    rendezvous: Path
    timeout_s: float
    logs: Path | None = None
    torchrun: TorchrunProcess | None = None


class Ranks:
    """This process among the ranks of its learner. Not thread-safe."""

    def __init__(self, settings: RankSettings, device: str) -> None:
        """Wait for all ranks."""
        self.rank = settings.rank
        self.size = settings.size
        self.several_machines = settings.torchrun is not None and settings.torchrun.several_machines
        self._logs = settings.logs
        self._timeout_s = settings.timeout_s
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        with self.errors():
            if not dist.is_initialized():
                dist.init_process_group(
                    backend,
                    store=_store(settings),
                    rank=settings.rank,
                    world_size=settings.size,
                    timeout=timedelta(seconds=settings.timeout_s),
                )
            self.mesh: DeviceMesh = init_device_mesh(torch.device(device).type, (settings.size,))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does the work that must be done once."""
        return self.rank == 0

    def largest(self, value: int) -> int:
        """Return the largest value of all ranks."""
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in the order of the ranks."""
        length = self.largest(len(message))
        own = torch.zeros(8 + length, dtype=torch.uint8)
        own[:8] = torch.tensor([len(message)]).view(torch.uint8)
        own[8 : 8 + len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return [bytes(each[8 : 8 + int(each[:8].view(torch.int64))].numpy()) for each in found]

    def gather_values(self, value: object, kind: type[V]) -> list[V]:
        """Return a value of every rank, in the order of the ranks. `kind` is its type, as for msgpack."""
        return [msgspec.msgpack.decode(each, type=kind) for each in self.gather(msgspec.msgpack.encode(value))]

    def gather_arrays(self, own: Mapping[int, Mapping[str, Array]]) -> dict[int, dict[str, Array]]:
        """Return the arrays of all ranks, by index and name. No index is on two ranks."""
        encoded = {
            index: {name: (each.dtype.str, each.tobytes()) for name, each in arrays.items()}
            for index, arrays in own.items()
        }
        parts = self.gather_values(encoded, dict[int, dict[str, tuple[str, bytes]]])
        return {
            index: {name: np.frombuffer(data, dtype).copy() for name, (dtype, data) in arrays.items()}
            for part in parts
            for index, arrays in part.items()
        }

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        dist.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.largest(0)

    def close(self) -> None:
        """Leave the group. Other ranks may still be in it."""
        dist.destroy_process_group()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert torch's errors for a lost or late rank to `CollectiveFailed`."""
        try:
            yield
        except dist.DistError as error:
            raise self._failed(error) from error
        except RuntimeError as error:  # gloo has no exception class of its own
            if "gloo" not in str(error):
                raise
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CollectiveFailed:
        message = (
            "another learner process has failed, or did not respond within learner.collective_timeout_s = "
            f"{self._timeout_s:g}: {error}"
        )
        record = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # torch's flight recorder
        if record is None or self._logs is None:
            return CollectiveFailed(message)
        file = self._logs / f"collectives-{self.rank}.json"
        try:
            file.write_bytes(record(True, False))
        except OSError:  # the error itself is more important than its record
            return CollectiveFailed(message)
        return CollectiveFailed(f"{message}; the last collective calls of rank {self.rank} are in {file}")


def _store(settings: RankSettings) -> Store:
    """Return the store through which the ranks find each other: a file, or torchrun's store under a prefix
    unique to this start of the run."""
    if settings.torchrun is None:
        return FileStore(str(settings.rendezvous), settings.size)
    timeout = timedelta(seconds=settings.timeout_s)
    address = settings.torchrun.master, settings.torchrun.store_port
    return PrefixStore(settings.rendezvous.name, TCPStore(*address, is_master=False, timeout=timeout))
