"""The learner as a part of the running system: `outpace.protocols.Learner` around `LearnerCore`.

All compute runs on one dedicated thread, strictly in the order of the calls. Publishing holds that thread only for
the copy into shared memory; the checksums are computed elsewhere while the next chunk trains.

    caller's loop ──chunk/step/publish/save──▶ compute thread ──copied snapshot──▶ sealing thread ──▶ Manifest
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from outpace.checkpoint import journal
from outpace.learn import state
from outpace.learn.closed import ClosedBatch
from outpace.learn.core import LearnerCore
from outpace.learn.settings import CoreSettings, LearnerSettings
from outpace.stopwatch import Stopwatch
from outpace.types import ChunkReport, LearnerStats, Manifest, Place, StepReport, Version
from outpace.weights.store import Draft, SnapshotWriter

__all__ = ["LearnerSettings", "TorchLearner"]

P = ParamSpec("P")
T = TypeVar("T")


class TorchLearner:
    """Implements `outpace.protocols.Learner`. The constructor loads the model and returns when it is ready."""

    def __init__(self, settings: LearnerSettings, model: PreTrainedModel | None = None) -> None:
        """`model` replaces the one that `settings` names."""
        self._settings = settings
        settings.snapshots.mkdir(parents=True, exist_ok=True)
        self._writer = SnapshotWriter(
            settings.snapshots, settings.incarnation, getattr(torch, settings.config.model.dtype)
        )
        threads = settings.threads or torch.get_num_threads()
        self._work = Stopwatch(threads if settings.device == "cpu" else None)
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._compute = ThreadPoolExecutor(1, "learner")
        self._core = self._compute.submit(self._build, model).result()
        self._closed = None if settings.config.learner.stream else ClosedBatch(self._core, settings.config)

    async def chunk(self, version: Version, places: list[Place], replayed: bool = False) -> ChunkReport:
        return await self._on_compute_thread(self._chunk, version, places, replayed)

    async def step(self, version: Version) -> StepReport:
        return await self._on_compute_thread(self._step, version)

    async def publish(self, leased: list[Version]) -> Manifest:
        draft = await self._on_compute_thread(self._copy, leased)
        return await asyncio.get_running_loop().run_in_executor(self._sealing, self._writer.seal, draft)

    async def save(self, directory: str, version: Version) -> bool:
        return await self._on_compute_thread(self._save, directory, version)

    async def load(self, directory: str) -> Version:
        return await self._on_compute_thread(self._load, directory)

    async def stats(self) -> LearnerStats:
        """Answers at once, also while the compute thread is busy."""
        return LearnerStats(
            version=self._core.version,
            busy_s=self._work.busy_s,
            core_s=self._work.core_s,
            tokens=self._core.tokens,
            threads=self._settings.threads or torch.get_num_threads(),
            parameters=sum(p.numel() for p in self._core.parameters.values()),
        )

    async def close(self) -> None:
        """Let what was asked for finish, then end the threads and remove the snapshots."""
        await asyncio.to_thread(self._compute.shutdown)
        await asyncio.to_thread(self._sealing.shutdown)
        self._writer.close()

    async def _on_compute_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def timed() -> T:
            try:
                with self._work.running():
                    return function(*args, **kwargs)
            except StopIteration as error:  # a future cannot hold one, and its caller would wait for ever
                raise RuntimeError("StopIteration") from error

        return await asyncio.get_running_loop().run_in_executor(self._compute, timed)

    def _build(self, model: PreTrainedModel | None) -> LearnerCore:
        settings = self._settings
        if settings.threads:  # torch's thread count belongs to the thread that sets it
            torch.set_num_threads(settings.threads)
        config = settings.config
        torch.manual_seed(config.run.seed)
        if model is None:
            from outpace.models.loading import load_model

            model = load_model(
                config.model.path,
                dtype="float32",
                device=settings.device,
                trust_remote_code=config.model.trust_remote_code,
            )
        return LearnerCore(model, CoreSettings.of(config))

    def _chunk(self, version: Version, places: list[Place], replayed: bool) -> ChunkReport:
        core = self._at(version)
        groups = [journal.read(self._settings.journal, place) for place in places]
        if self._closed is not None:
            return self._closed.add(groups, replayed)
        return core.accumulate([row for group in groups for row in group.rows], replayed=replayed)

    def _step(self, version: Version) -> StepReport:
        core = self._at(version)
        return core.step() if self._closed is None else self._closed.train()

    def _load(self, directory: str) -> Version:
        if self._closed is not None:
            self._closed.drop()
        return state.restore(self._core, directory)

    def _save(self, directory: str, version: Version) -> bool:
        if self._core.version != version:
            return False
        state.save(self._core, directory)
        return True

    def _copy(self, leased: list[Version]) -> Draft:
        return self._writer.copy(self._core.version, self._core.model.state_dict(), leased)

    def _at(self, version: Version) -> LearnerCore:
        own = self._core.version
        assert version == own, f"asked to train from version {version}, but the learner is at {own}"
        return self._core
