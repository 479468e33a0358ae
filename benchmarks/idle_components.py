"""Idle components for `benchmarks/controller.py`: they answer every call immediately, in a process of their own.

    python benchmarks/idle_components.py learner=FD engine-0=FD worker-0=FD …

Each is served with the same RPC as real components, over the socket with that file descriptor, until it is closed.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from outpace.protocols import Engine, Learner, Worker
from outpace.runtime import diagnostics, wire
from outpace.runtime.rpc import Channel, serve_calls
from outpace.types import (
    Aggregate,
    ChunkReport,
    EngineStats,
    FleetMember,
    GroupOrder,
    GroupReport,
    Ints,
    JournalLocation,
    LearnerStats,
    LoadReport,
    Manifest,
    StepReport,
    Version,
)

SEGMENT_GROUPS = 256
TOKENS = 500  # per episode


class IdleWorker:
    """Returns a report of realistic size for every group immediately."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, order: GroupOrder) -> GroupReport:
        return GroupReport(
            order.group,
            f"task-{order.task}",
            "finished",
            place=JournalLocation(
                f"{self._name}-{order.group // SEGMENT_GROUPS:05d}.journal", order.group * 4096, 4096
            ),
            rewards=[float(number % 2) for number in range(order.size)],
            reward_parts={"correct": 0.5, "format": 0.9},
            episodes=order.size,
            tokens_sampled=TOKENS * order.size,
            oldest=order.min_version,
            newest=order.min_version,
            seconds=1.0,
            measured={"episode/turns": Aggregate("mean", 1.0, 1.0), "episode/length": Aggregate("mean", 1.0, TOKENS)},
        )

    async def cancel(self, group: int) -> None: ...

    async def release(self, segments: list[str]) -> None: ...

    async def record_rollouts(self, step: Version, places: list[JournalLocation]) -> None: ...

    async def rng(self) -> bytes:
        return b"{}"

    async def set_rng(self, state: bytes) -> None: ...

    async def fleet(self, members: list[FleetMember]) -> None: ...

    async def first_prompts(self, count: int) -> list[Ints]:
        return []


class IdleEngine:
    def __init__(self) -> None:
        self._version: Version = 0

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        self._version = manifest.version
        return LoadReport(manifest.version, 0.0, 0.0, 0)

    async def release_pinned(self) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats(self._version, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 8, 1)


class IdleLearner:
    def __init__(self) -> None:
        self._version: Version = 0

    async def chunk(self, version: Version, places: list[JournalLocation], replayed: bool = False) -> ChunkReport:
        return ChunkReport(tokens=TOKENS * len(places), rows=len(places), loss_sum=0.0, lag_counts={0: len(places)})

    async def step(self, version: Version) -> StepReport:
        self._version += 1
        return StepReport(self._version, 0.0, 1, 0.0, 1e-3)

    async def publish(self, leased: list[Version]) -> Manifest:
        return Manifest("bench", self._version, "/nowhere", [])

    async def save(self, directory: str, version: Version) -> bool:
        return True

    async def load(self, directory: str) -> Version:
        return 0

    async def stats(self) -> LearnerStats:
        return LearnerStats(self._version, 0.0, 0.0, 0, 1, 1)


def idle_component(name: str) -> tuple[object, type]:
    """Return the component with that name and its protocol."""
    if name.startswith("worker"):
        return IdleWorker(name), Worker
    return (IdleEngine(), Engine) if name.startswith("engine") else (IdleLearner(), Learner)


async def open_channel(descriptor: int) -> Channel:
    end = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=wire.MAX_FRAME)
    return Channel(reader, writer)


async def _serve_all(descriptors: dict[str, int]) -> None:
    async def serve_one(name: str, descriptor: int) -> None:
        target, protocol = idle_component(name)
        await serve_calls(target, protocol, await open_channel(descriptor))

    await asyncio.gather(*(serve_one(name, descriptor) for name, descriptor in descriptors.items()))


if __name__ == "__main__":
    diagnostics.tune_gc()
    asyncio.run(_serve_all({name: int(number) for name, _, number in (word.partition("=") for word in sys.argv[1:])}))
