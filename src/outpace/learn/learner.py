"""The learner as a part of the running system: `outpace.protocols.Learner` around `LearnerCore`.

All compute runs on one dedicated thread, strictly in the order of the calls. Publishing holds that thread only for
the copy into shared memory, saving only for the copy of the state: checksums and files are made elsewhere while the
next chunk trains.

    caller's loop ──chunk/step/publish/save──▶ compute thread ──copied snapshot──▶ sealing thread ──▶ Manifest
                                                            └──copied state─────▶ saving thread ───▶ files
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
from transformers import PreTrainedModel

from outpace import crash
from outpace.checkpoint import journal
from outpace.errors import NotSaved
from outpace.learn import state
from outpace.learn.bad_steps import BadSteps
from outpace.learn.closed import ClosedBatch
from outpace.learn.core import LearnerCore, NotFinite
from outpace.learn.policy_weights import published, published_adapter
from outpace.learn.scoring import sequence_logprobs
from outpace.learn.settings import CoreSettings, LearnerSettings
from outpace.learn.state_copy import Copies, StateCopy
from outpace.models.device import set_up_device
from outpace.models.layers import call_at_every_layer
from outpace.runtime.core_sharing import LEARNER_LINE, Board, CoreSharing
from outpace.stopwatch import Stopwatch
from outpace.types import ChunkReport, Floats, Ints, LearnerStats, Manifest, Place, StepReport, Version
from outpace.weights.collective import Sender
from outpace.weights.store import Draft
from outpace.weights.writers import snapshot_writer

__all__ = ["LearnerSettings", "TorchLearner"]

P = ParamSpec("P")
T = TypeVar("T")


class TorchLearner:
    """Implements `outpace.protocols.Learner`. The constructor loads the model and returns when it is ready."""

    def __init__(self, settings: LearnerSettings, model: PreTrainedModel | None = None) -> None:
        """`model` replaces the one that `settings` names."""
        self._settings = settings
        settings.snapshots.mkdir(exist_ok=True)
        self._writer = snapshot_writer(settings.config, settings.device, settings.snapshots, settings.incarnation)
        threads = settings.threads or torch.get_num_threads()
        self._sharing: CoreSharing | None = None
        if settings.share_cores is not None:
            board = Board(settings.share_cores)
            self._sharing = CoreSharing(board, "learner", LEARNER_LINE, threads, torch.set_num_threads)
        self._work = Stopwatch(threads if settings.device == "cpu" else None)
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._saving = ThreadPoolExecutor(1, "save")
        self._sender = Sender()
        self._copies = Copies()
        self._reserved = False
        self._costs: deque[tuple[str, float]] = deque()  # of saving, in seconds; not in a report yet
        self._places: list[Place] = []  # of the open batch
        self._bad_steps = BadSteps(settings.journal)
        self._compute = ThreadPoolExecutor(1, "learner")
        self._core = self._compute.submit(self._build, model).result()
        self._compute.submit(lambda: self._writer.lay_out(published(self._core))).result()
        self._sealing.submit(self._writer.make_ready, ())
        self._closed = None if settings.config.learner.stream else ClosedBatch(self._core, settings.config)

    async def chunk(self, version: Version, places: list[Place], replayed: bool = False) -> ChunkReport:
        return await self._on_compute_thread(self._chunk, version, places, replayed)

    async def step(self, version: Version) -> StepReport:
        return await self._on_compute_thread(self._step, version)

    async def publish(self, leased: list[Version]) -> Manifest:
        draft, merged_s = await self._on_compute_thread(self._copy, leased)
        manifest = await asyncio.get_running_loop().run_in_executor(self._sealing, self._seal, draft, merged_s)
        self._sealing.submit(self._writer.make_ready, leased)  # if it fails, so does the next copy, and says why
        return manifest

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        await self._sender.send(manifest, meeting)

    async def save(self, directory: str, version: Version) -> bool:
        """Raises `NotSaved` when the disk does not take it; the learner itself is none the worse."""
        copied = await self._on_compute_thread(self._copy_state, version)
        if copied is not None:
            await asyncio.get_running_loop().run_in_executor(self._saving, self._write_state, copied, Path(directory))
        return copied is not None

    async def load(self, directory: str) -> Version:
        return await self._on_compute_thread(self._load, directory)

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        return await self._on_compute_thread(sequence_logprobs, self._core, sequences, temperature)

    async def stats(self) -> LearnerStats:
        """Answers at once, also while the compute thread is busy."""
        return LearnerStats(
            version=self._core.version,
            busy_s=self._work.busy_s,
            core_s=self._work.core_s,
            tokens=self._core.tokens,
            threads=self._sharing.threads if self._sharing else self._settings.threads or torch.get_num_threads(),
            parameters=sum(p.numel() for p in self._core.parameters.values()),
        )

    async def close(self) -> None:
        """Let what was asked for finish, then end the threads and remove the snapshots."""
        for executor in (self._compute, self._sealing, self._saving):
            await asyncio.to_thread(executor.shutdown)
        self._writer.close()

    async def _on_compute_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def timed() -> T:
            try:
                with self._work.running(), self._sharing.working() if self._sharing else nullcontext():
                    return function(*args, **kwargs)
            except StopIteration as error:  # a future cannot hold one, and its caller would wait for ever
                raise RuntimeError("StopIteration") from error

        return await asyncio.get_running_loop().run_in_executor(self._compute, timed)

    def _build(self, model: PreTrainedModel | None) -> LearnerCore:
        settings = self._settings
        if settings.threads:  # torch's thread count belongs to the thread that sets it
            torch.set_num_threads(settings.threads)
        config = settings.config
        set_up_device(settings.device, settings.gpu_memory)
        torch.manual_seed(config.run.seed)
        if model is None:
            from outpace.models.loading import load_model

            model = load_model(
                config.model.path,
                dtype="float32",
                device=settings.device,
                trust_remote_code=config.model.trust_remote_code,
            )
        core = LearnerCore(model, CoreSettings.of(config))
        if self._sharing is not None:
            call_at_every_layer(model, self._sharing.adjust)
        crash.reached("learner.built")
        return core

    def _chunk(self, version: Version, places: list[Place], replayed: bool) -> ChunkReport:
        core = self._at(version)
        crash.reached("chunk.before")
        groups = [journal.read(self._settings.journal, place) for place in places]
        self._places += places
        if self._closed is not None:
            report = self._closed.add(groups, replayed)
        else:
            rows = [row for group in groups for row in group.rows]
            with self._sharing.comparing(sum(len(row.tokens) for row in rows)) if self._sharing else nullcontext():
                report = core.accumulate(rows, replayed=replayed)
        crash.reached("chunk.after")
        return report

    def _step(self, version: Version) -> StepReport:
        core = self._at(version)
        crash.reached("step.before")
        places, self._places = self._places, []
        try:
            report = core.step() if self._closed is None else self._closed.train()
        except NotFinite as error:
            self._bad_steps.keep(version + 1, places)
            raise NotFinite(f"{error}; {self._bad_steps.kept}" if self._bad_steps.kept else str(error)) from None
        metrics = report.metrics | self._cost_of_saving()
        if report.skipped and self._bad_steps.keep(report.version, places):
            metrics["faults/kept_groups"] = len(places)
        crash.reached("step.after")
        self._reserve()
        return msgspec.structs.replace(report, metrics=metrics)

    def _copy(self, leased: list[Version]) -> tuple[Draft, float]:
        """The snapshot, and how long it took before it that the weights were put together."""
        started = time.perf_counter()
        weights = published(self._core)
        merged_s = time.perf_counter() - started
        draft = self._writer.copy(self._core.version, weights, leased)
        crash.reached("publish.copied")
        return draft, merged_s

    def _seal(self, draft: Draft, merged_s: float) -> Manifest:
        sealed = self._writer.seal(draft)
        crash.reached("publish.sealed")
        adapter = published_adapter(self._core)
        return msgspec.structs.replace(sealed, adapter=adapter, seconds=merged_s + sealed.seconds)

    def _at(self, version: Version) -> LearnerCore:
        own = self._core.version
        assert version == own, f"asked to train from version {version}, but the learner is at {own}"
        return self._core

    # ------------------------------------------------------------------------------------------------------- state

    def _reserve(self) -> None:
        """With the first step the optimizer has all its state, so that the memory of a copy is known. It is made ready
        while training goes on."""
        if not self._reserved and self._settings.config.checkpoint.every:
            self._saving.submit(self._copies.reserve, *state.layout(self._core))
        self._reserved = True

    def _copy_state(self, version: Version) -> StateCopy | None:
        """None: the learner is past that version."""
        if self._core.version != version:
            return None
        started = time.perf_counter()
        copied = state.copy(self._core, self._copies)
        self._costs.append(("checkpoint/held_s", time.perf_counter() - started))
        crash.reached("save.copied")
        return copied

    def _write_state(self, copied: StateCopy, directory: Path) -> None:
        started = time.perf_counter()
        try:
            state.write(copied, directory)
        except OSError as error:
            raise NotSaved(f"{directory}: {error.strerror or error}") from error
        finally:
            self._copies.give_back(copied)
        self._costs.append(("checkpoint/write_s", time.perf_counter() - started))

    def _cost_of_saving(self) -> dict[str, float]:
        """Since it was last asked for. A file may be finished at any moment, by another thread."""
        costs: dict[str, float] = {}
        while self._costs:
            name, seconds = self._costs.popleft()
            costs[name] = costs.get(name, 0.0) + seconds
        return costs

    def _load(self, directory: str) -> Version:
        self._saving.submit(lambda: None).result()  # a reference that is being written must not change
        if self._closed is not None:
            self._closed.drop()
        self._places = []
        return state.restore(self._core, directory)
