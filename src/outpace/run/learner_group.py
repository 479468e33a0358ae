"""LearnerGroup: the ranks of a sharded learner, as one learner.

    chunk, step, publish, save, load, logprobs  ─▶ every rank makes the same call, in the same order
    send, stats                                 ─▶ the first rank, which owns the snapshots

The group returns the first rank's result, because all ranks compute the same. Exceptions: it sums chunk losses, reports
the longest time, and counts a checkpoint as saved only if every rank saved it. If a call fails on one rank, the others
fail too or block in a collective. The group raises the most informative error and names its rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from outpace.errors import CollectiveFailed, ComponentFailed, ComponentLost, NotSaved
from outpace.protocols import Learner
from outpace.types import (
    ChunkReport,
    Floats,
    Ints,
    JournalLocation,
    LearnerStats,
    Manifest,
    StepReport,
    Version,
)

T = TypeVar("T")

GRACE_S = 10.0
"""How long to wait for the other ranks after one fails: a dead process may be noticed last."""


def rank_environment(logs: Path, several_machines: bool) -> dict[str, str]:
    """Return the environment variables of a learner process. If all are on this machine, other machines must not be
    able to reach their sockets."""
    return ({} if several_machines else {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}) | {
        "TORCH_FR_BUFFER_SIZE": "1000",  # collective calls to keep for error reports
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(logs / "collectives-nccl-"),  # torch appends the rank
    }


class LearnerGroup:
    """Implements `outpace.protocols.Learner`."""

    def __init__(self, ranks: Mapping[str, Learner], grace_s: float = GRACE_S) -> None:
        """`ranks` by component name, in the order of the ranks."""
        self._ranks = dict(ranks)
        self._first = next(iter(self._ranks.values()))
        self._grace_s = grace_s

    async def chunk(self, version: Version, places: list[JournalLocation], replayed: bool = False) -> ChunkReport:
        reports = await self._on_all(lambda rank: rank.chunk(version, places, replayed))
        return msgspec.structs.replace(
            reports[0],
            loss_sum=sum(report.loss_sum for report in reports),
            seconds=max(report.seconds for report in reports),
        )

    async def step(self, version: Version) -> StepReport:
        reports = await self._on_all(lambda rank: rank.step(version))
        return msgspec.structs.replace(reports[0], seconds=max(report.seconds for report in reports))

    async def publish(self, leased: list[Version]) -> Manifest:
        return (await self._on_all(lambda rank: rank.publish(leased)))[0]

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        await self._first.send(manifest, meeting)

    async def save(self, directory: str, version: Version) -> bool:
        return all(await self._on_all(lambda rank: rank.save(directory, version)))

    async def load(self, directory: str) -> Version:
        return (await self._on_all(lambda rank: rank.load(directory)))[0]

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        return (await self._on_all(lambda rank: rank.logprobs(sequences, temperature)))[0]

    async def stats(self) -> LearnerStats:
        return await self._first.stats()

    async def _on_all(self, call: Callable[[Learner], Coroutine[Any, Any, T]]) -> list[T]:
        calls = {name: asyncio.ensure_future(call(rank)) for name, rank in self._ranks.items()}
        try:
            await asyncio.wait(calls.values(), return_when=asyncio.FIRST_EXCEPTION)
            if _errors(calls):
                # Training continues without the checkpoint, but only after all ranks have stopped writing it.
                writing = any(isinstance(error, NotSaved) for error in _errors(calls).values())
                await asyncio.wait(calls.values(), timeout=None if writing else self._grace_s)
            if errors := _errors(calls):
                raise _explanation(errors, [name for name, each in calls.items() if not each.done()])
            return [each.result() for each in calls.values()]
        finally:
            for each in calls.values():
                each.cancel()


def _errors(calls: Mapping[str, asyncio.Future[T]]) -> dict[str, BaseException]:
    done = {name: each for name, each in calls.items() if each.done() and not each.cancelled()}
    return {name: error for name, each in done.items() if (error := each.exception()) is not None}


def _explanation(errors: Mapping[str, BaseException], unfinished: list[str]) -> BaseException:
    """Return the error to raise, in order of preference: a dead rank, a rank's own error, an unresponsive rank, a
    failed collective."""
    for error in errors.values():
        if isinstance(error, ComponentLost):
            late = f"; {', '.join(unfinished)} did not respond" if unfinished else ""
            return ComponentLost(error.component, error.message + late, error.remote_traceback)
    for error in errors.values():
        if not isinstance(error, CollectiveFailed):
            return error
    name, error = next(iter(errors.items()))
    if unfinished:
        return ComponentFailed(unfinished[0], f"did not respond to the other learner processes; on {name}: {error}")
    return ComponentFailed(name, str(error))
