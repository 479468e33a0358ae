"""TorchLearner: the learner as a component, implementing `outpace.protocols.Learner` around `LearnerCore`.

All compute runs on one dedicated thread, strictly in call order. Publishing blocks that thread only for the copy into
shared memory, saving only for the copy of the state. Checksums and files are made on other threads while the next chunk
trains.

    caller's loop ──chunk/step/publish/save──▶ compute thread ──copied snapshot──▶ sealing thread ──▶ Manifest
                                                            └──copied state─────▶ saving thread ───▶ files

Published tensors (the only place that decides this):

    full fine-tuning                                 the model
    LoRA, engines load adapters (`adapter_only`)     the adapter, with the tensor names of a PEFT file
    LoRA, other engines                              the model with the adapter merged, with its own tensor names

Groups of a step with a non-finite loss or gradient are written to the run directory for inspection:

    bad_steps/step-000012/groups.json        tasks, rewards, and the largest and non-finite values of each row
    bad_steps/step-000012/rows.safetensors   every row as the learner received it: GROUP/ROW/tokens, …/logprobs, …

Only the first few bad steps per start are written, so that a diverged run does not fill the disk. A failure to write
them never fails the run.
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
    """Implements `outpace.protocols.Learner`. The constructor loads the model and blocks until it is ready."""

    def __init__(self, settings: LearnerSettings, model: PreTrainedModel | None = None) -> None:
        """`model` replaces the model named in `settings`."""
        self._settings = settings
        settings.snapshots.mkdir(exist_ok=True)
        self._writer = snapshot_writer(settings.config, settings.device, settings.snapshots, settings.incarnation)
        threads = settings.threads or torch.get_num_threads()
        self._sharing: CoreSharing | None = None
        if settings.share_cores is not None:
            board = Board(settings.share_cores)
            self._sharing = CoreSharing(board, "learner", LEARNER_LINE, threads, torch.set_num_threads)
        self._stopwatch = Stopwatch(threads if settings.device == "cpu" else None)
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._saving = ThreadPoolExecutor(1, "save")
        self._sender = Sender()
        self._copies = Copies()
        self._copy_buffer_reserved = False
        self._saving_costs: deque[tuple[str, float]] = deque()  # seconds spent on saving, not yet reported
        self._places: list[Place] = []  # journal places of the current batch
        self._bad_steps = BadSteps(settings.journal)
        self._compute = ThreadPoolExecutor(1, "learner")
        self._core = self._compute.submit(self._build, model).result()
        self._compute.submit(lambda: self._writer.lay_out(published(self._core))).result()
        self._sealing.submit(self._writer.make_ready, ())
        self._batch_learner = None if settings.config.learner.stream else ClosedBatch(self._core, settings.config)

    async def chunk(self, version: Version, places: list[Place], replayed: bool = False) -> ChunkReport:
        return await self._on_compute_thread(self._chunk, version, places, replayed)

    async def step(self, version: Version) -> StepReport:
        return await self._on_compute_thread(self._step, version)

    async def publish(self, leased: list[Version]) -> Manifest:
        draft, merged_s = await self._on_compute_thread(self._copy, leased)
        manifest = await asyncio.get_running_loop().run_in_executor(self._sealing, self._seal, draft, merged_s)
        self._sealing.submit(self._writer.make_ready, leased)  # an error here is reported by the next copy
        return manifest

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        await self._sender.send(manifest, meeting)

    async def save(self, directory: str, version: Version) -> bool:
        """Save the state; False if the learner is past `version`. Raises `NotSaved` if the files cannot be written. The
        learner keeps working in that case."""
        copied = await self._on_compute_thread(self._copy_state, version)
        if copied is not None:
            await asyncio.get_running_loop().run_in_executor(self._saving, self._write_state, copied, Path(directory))
        return copied is not None

    async def load(self, directory: str) -> Version:
        return await self._on_compute_thread(self._load, directory)

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        return await self._on_compute_thread(sequence_logprobs, self._core, sequences, temperature)

    async def stats(self) -> LearnerStats:
        """Return immediately, even while the compute thread is busy."""
        return LearnerStats(
            version=self._core.version,
            busy_s=self._stopwatch.busy_s,
            core_s=self._stopwatch.core_s,
            tokens=self._core.tokens,
            threads=self._sharing.threads if self._sharing else self._settings.threads or torch.get_num_threads(),
            parameters=sum(p.numel() for p in self._core.parameters.values()),
        )

    async def close(self) -> None:
        """Finish pending calls, stop the threads and remove the snapshots."""
        for executor in (self._compute, self._sealing, self._saving):
            await asyncio.to_thread(executor.shutdown)
        self._writer.close()

    async def _on_compute_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def timed() -> T:
            try:
                with self._stopwatch.running(), self._sharing.working() if self._sharing else nullcontext():
                    return function(*args, **kwargs)
            except StopIteration as error:  # a future cannot carry it; the caller would wait forever
                raise RuntimeError("StopIteration") from error

        return await asyncio.get_running_loop().run_in_executor(self._compute, timed)

    def _build(self, model: PreTrainedModel | None) -> LearnerCore:
        settings = self._settings
        if settings.threads:  # torch's thread count is per calling thread
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
        core = self._core_at(version)
        crash.reached("chunk.before")
        groups = [journal.read(self._settings.journal, place) for place in places]
        self._places += places
        if self._batch_learner is not None:
            report = self._batch_learner.add(groups, replayed)
        else:
            rows = [row for group in groups for row in group.rows]
            with self._sharing.comparing(sum(len(row.tokens) for row in rows)) if self._sharing else nullcontext():
                report = core.accumulate(rows, replayed=replayed)
        crash.reached("chunk.after")
        return report

    def _step(self, version: Version) -> StepReport:
        core = self._core_at(version)
        crash.reached("step.before")
        places, self._places = self._places, []
        try:
            report = core.step() if self._batch_learner is None else self._batch_learner.train()
        except NotFinite as error:
            self._bad_steps.keep(version + 1, places)
            raise NotFinite(f"{error}; {self._bad_steps.kept}" if self._bad_steps.kept else str(error)) from None
        metrics = report.metrics | self._saving_seconds()
        if report.skipped and self._bad_steps.keep(report.version, places):
            metrics["faults/kept_groups"] = len(places)
        crash.reached("step.after")
        self._reserve_copy_buffer()
        return msgspec.structs.replace(report, metrics=metrics)

    def _copy(self, leased: list[Version]) -> tuple[Draft, float]:
        """Return the snapshot, and the seconds spent on collecting (and merging) the weights before the copy."""
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

    def _core_at(self, version: Version) -> LearnerCore:
        own = self._core.version
        assert version == own, f"cannot train from version {version}: the learner is at version {own}"
        return self._core

    # ------------------------------------------------------------------------------------------------------- state

    def _reserve_copy_buffer(self) -> None:
        """Allocate the buffer for state copies in the background. Its size is known after the first step, when the
        optimizer has all its state."""
        if not self._copy_buffer_reserved and self._settings.config.checkpoint.every:
            self._saving.submit(self._copies.reserve, *state.layout(self._core))
        self._copy_buffer_reserved = True

    def _copy_state(self, version: Version) -> StateCopy | None:
        """Return a copy of the state, None if the learner is past `version`."""
        if self._core.version != version:
            return None
        started = time.perf_counter()
        copied = state.copy(self._core, self._copies)
        self._saving_costs.append(("checkpoint/held_s", time.perf_counter() - started))
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
        self._saving_costs.append(("checkpoint/write_s", time.perf_counter() - started))

    def _saving_seconds(self) -> dict[str, float]:
        """Return and reset the seconds spent on saving. The saving thread may append at any time."""
        costs: dict[str, float] = {}
        while self._saving_costs:
            name, seconds = self._saving_costs.popleft()
            costs[name] = costs.get(name, 0.0) + seconds
        return costs

    def _load(self, directory: str) -> Version:
        self._saving.submit(lambda: None).result()  # wait: a reference being written must not change
        if self._batch_learner is not None:
            self._batch_learner.drop()
        self._places = []
        return state.restore(self._core, directory)
