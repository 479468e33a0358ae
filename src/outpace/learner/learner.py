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
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.checkpoint import journal
from outpace.checkpoint.commit import write_durably
from outpace.config import Config
from outpace.errors import NotSaved
from outpace.hardware.cores import LEARNER_ROW, CoreSharing, ThreadCounts
from outpace.learner import state
from outpace.learner.batch_learner import BatchLearner
from outpace.learner.core import LearnerCore, NotFinite, sequence_logprobs
from outpace.learner.state import StateCopies, StateCopy, write_tensors
from outpace.models.loading import call_at_every_layer, set_up_device
from outpace.monitoring.efficiency import Stopwatch
from outpace.runtime import diagnostics
from outpace.types import (
    ChunkReport,
    Floats,
    GroupRecord,
    Ints,
    JournalLocation,
    LearnerStats,
    LoraAdapter,
    Manifest,
    Row,
    StepReport,
    Version,
)
from outpace.weights.process_group import ProcessGroupSender
from outpace.weights.shared_memory import SnapshotDraft, build_snapshot_writer


@dataclass(frozen=True, kw_only=True)
class TorchLearnerSettings:
    """Settings of `TorchLearner`. `config` is resolved, `journal` is the directory to read groups from, `snapshots` a
    directory in memory for published weights."""

    config: Config
    journal: Path
    snapshots: Path
    incarnation: str
    device: str = "cpu"
    gpu_memory: float = 1.0  # fraction of the GPU memory that the learner may use
    threads: int | None = None  # None: torch's default
    share_cores: Path | None = None  # file of the run's core-sharing board; None: fixed thread count


def published_tensors(core: LearnerCore) -> dict[str, Tensor]:
    """Return the tensors of the current policy to publish, valid until the next update or the next call."""
    if core.adapters is None:
        return core.model.state_dict()
    if _publishes_adapter(core):
        return core.adapters.tensors()
    return core.adapters.merged(core.dtype)


def published_adapter(core: LearnerCore) -> LoraAdapter | None:
    """Return the adapter that the published tensors belong to, None if they are a whole model."""
    return core.config.lora.adapter if _publishes_adapter(core) else None


def _publishes_adapter(core: LearnerCore) -> bool:
    """Servers get the adapter alone; they already have the model."""
    return core.config.engine.kind != "embedded"


log = logging.getLogger(__name__)

BAD_STEPS_FOLDER = "bad_steps"
MAX_SAVED_BAD_STEPS = 8

_ARRAYS = ("tokens", "mask", "logprobs", "versions", "advantages", "turn_rewards")
_FLOAT_ARRAYS = ("logprobs", "advantages", "turn_rewards")


class BadStepRecorder:
    """Writes the groups of bad steps to `bad_steps/` in the run directory, for at most `limit` steps."""

    def __init__(self, journal_directory: Path, limit: int = MAX_SAVED_BAD_STEPS) -> None:
        self._journal = journal_directory
        self._folder = journal_directory.parent / BAD_STEPS_FOLDER
        self._remaining = limit
        self._steps = 0

    @property
    def location(self) -> str:
        """Describe where groups were written; empty if none were."""
        return f"the groups of these steps are in {self._folder}" if self._steps else ""

    def save(self, step: int, places: Sequence[JournalLocation]) -> bool:
        """Write the groups of `step`. Return whether that was done."""
        if self._remaining == 0:
            return False
        self._remaining -= 1
        target = self._folder / f"step-{step:06d}"
        try:
            records = [journal.read_record(self._journal, place) for place in places]
            shutil.rmtree(target, ignore_errors=True)  # left by an earlier start of this run
            target.mkdir(parents=True)
            _write_groups(target, records)
        except Exception as error:  # what broke the step may also break writing its groups
            log.warning("step %d had a non-finite loss or gradient; its groups could not be written: %r", step, error)
            return False
        log.warning("step %d had a non-finite loss or gradient; its groups are in %s", step, target)
        self._steps += 1
        return True


def _write_groups(target: Path, records: Sequence[GroupRecord]) -> None:
    tensors = {
        f"{record.group}/{number}/{name}": torch.tensor(getattr(row, name))
        for record in records
        for number, row in enumerate(record.rows)
        for name in _ARRAYS
    }
    write_tensors(target / "rows.safetensors", tensors)
    text = json.dumps([_describe_group(record) for record in records], indent=1)
    write_durably(target / "groups.json", text.encode() + b"\n")


def _describe_group(record: GroupRecord) -> dict[str, Any]:
    return {
        "group": record.group,
        "task_id": record.task_id,
        "epoch": record.epoch,
        "admitted": record.admitted,
        "rewards": record.rewards,
        "parts": record.parts,
        "rows": [_describe_row(row) for row in record.rows],
    }


def _describe_row(row: Row) -> dict[str, Any]:
    values = {name: np.asarray(getattr(row, name)) for name in _FLOAT_ARRAYS}
    finite = {name: np.abs(array[np.isfinite(array)]) for name, array in values.items()}
    return {
        "episode": row.episode,
        "role": row.role,
        "tokens": len(row.tokens),
        "trained": int(row.mask.sum()),
        "largest": {name: float(array.max()) for name, array in finite.items() if array.size},
        "not_finite": {name: array.size - finite[name].size for name, array in values.items()},
    }


__all__ = ["TorchLearner", "TorchLearnerSettings"]

P = ParamSpec("P")
T = TypeVar("T")


class TorchLearner:
    """Implements `outpace.protocols.Learner`. The constructor loads the model and blocks until it is ready."""

    def __init__(self, settings: TorchLearnerSettings, model: PreTrainedModel | None = None) -> None:
        """`model` replaces the model named in `settings`."""
        self._settings = settings
        settings.snapshots.mkdir(exist_ok=True)
        self._writer = build_snapshot_writer(settings.config, settings.device, settings.snapshots, settings.incarnation)
        threads = settings.threads or torch.get_num_threads()
        self._sharing: CoreSharing | None = None
        if settings.share_cores is not None:
            board = ThreadCounts(settings.share_cores)
            self._sharing = CoreSharing(board, "learner", LEARNER_ROW, threads, torch.set_num_threads)
        self._stopwatch = Stopwatch(threads if settings.device == "cpu" else None)
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._saving = ThreadPoolExecutor(1, "save")
        self._sender = ProcessGroupSender()
        self._copies = StateCopies()
        self._copy_buffer_reserved = False
        self._saving_costs: deque[tuple[str, float]] = deque()  # seconds spent on saving, not yet reported
        self._places: list[JournalLocation] = []  # journal places of the current batch
        self._bad_steps = BadStepRecorder(settings.journal)
        self._compute = ThreadPoolExecutor(1, "learner")
        self._core = self._compute.submit(self._build, model).result()
        self._compute.submit(lambda: self._writer.lay_out(published_tensors(self._core))).result()
        self._sealing.submit(self._writer.preallocate, ())
        self._batch_learner = None if settings.config.learner.stream else BatchLearner(self._core, settings.config)

    async def chunk(self, version: Version, places: list[JournalLocation], replayed: bool = False) -> ChunkReport:
        return await self._on_compute_thread(self._chunk, version, places, replayed)

    async def step(self, version: Version) -> StepReport:
        return await self._on_compute_thread(self._step, version)

    async def publish(self, leased: list[Version]) -> Manifest:
        draft, merged_s = await self._on_compute_thread(self._copy, leased)
        manifest = await asyncio.get_running_loop().run_in_executor(self._sealing, self._seal, draft, merged_s)
        self._sealing.submit(self._writer.preallocate, leased)  # an error here is reported by the next copy
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
        core = LearnerCore(model, config)
        if self._sharing is not None:
            call_at_every_layer(model, self._sharing.adjust)
        diagnostics.crash_point("learner.built")
        return core

    def _chunk(self, version: Version, places: list[JournalLocation], replayed: bool) -> ChunkReport:
        core = self._core_at(version)
        diagnostics.crash_point("chunk.before")
        groups = [journal.read_record(self._settings.journal, place) for place in places]
        self._places += places
        if self._batch_learner is not None:
            report = self._batch_learner.add(groups, replayed)
        else:
            rows = [row for group in groups for row in group.rows]
            with self._sharing.comparing(sum(len(row.tokens) for row in rows)) if self._sharing else nullcontext():
                report = core.accumulate(rows, replayed=replayed)
        diagnostics.crash_point("chunk.after")
        return report

    def _step(self, version: Version) -> StepReport:
        core = self._core_at(version)
        diagnostics.crash_point("step.before")
        places, self._places = self._places, []
        try:
            report = core.step() if self._batch_learner is None else self._batch_learner.train()
        except NotFinite as error:
            self._bad_steps.save(version + 1, places)
            raise NotFinite(
                f"{error}; {self._bad_steps.location}" if self._bad_steps.location else str(error)
            ) from None
        metrics = report.metrics | self._saving_seconds()
        if report.skipped and self._bad_steps.save(report.version, places):
            metrics["faults/kept_groups"] = len(places)
        diagnostics.crash_point("step.after")
        self._reserve_copy_buffer()
        return msgspec.structs.replace(report, metrics=metrics)

    def _copy(self, leased: list[Version]) -> tuple[SnapshotDraft, float]:
        """Return the snapshot, and the seconds spent on collecting (and merging) the weights before the copy."""
        started = time.perf_counter()
        weights = published_tensors(self._core)
        merged_s = time.perf_counter() - started
        draft = self._writer.copy(self._core.version, weights, leased)
        diagnostics.crash_point("publish.copied")
        return draft, merged_s

    def _seal(self, draft: SnapshotDraft, merged_s: float) -> Manifest:
        sealed = self._writer.seal(draft)
        diagnostics.crash_point("publish.sealed")
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
            self._saving.submit(self._copies.reserve, *state.copy_layout(self._core))
        self._copy_buffer_reserved = True

    def _copy_state(self, version: Version) -> StateCopy | None:
        """Return a copy of the state, None if the learner is past `version`."""
        if self._core.version != version:
            return None
        started = time.perf_counter()
        copied = state.copy(self._core, self._copies)
        self._saving_costs.append(("checkpoint/held_s", time.perf_counter() - started))
        diagnostics.crash_point("save.copied")
        return copied

    def _write_state(self, copied: StateCopy, directory: Path) -> None:
        started = time.perf_counter()
        try:
            state.write(copied, directory)
        except OSError as error:
            raise NotSaved(f"{directory}: {error.strerror or error}") from error
        finally:
            self._copies.release(copied)
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
