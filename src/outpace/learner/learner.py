"""LearnerHost: the learner as a component, implementing `outpace.protocols.Learner` around a `LearnerBackend`.

It owns everything that backends have in common: reading groups, collecting batches, advantages, snapshots, checkpoints
and bad steps.

All compute runs on one dedicated thread, strictly in call order. Publishing blocks that thread only for the copy into
shared memory, saving only for the copy of the state. Checksums and files are made on other threads while the next chunk
trains.

    caller's loop ──chunk/step/publish/save──▶ compute thread ──copied snapshot──▶ sealing thread ──▶ Manifest
                                                            └──copied state─────▶ saving thread ───▶ files

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
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch

from outpace.checkpoint.commit import write_durably
from outpace.config import Config
from outpace.errors import NotSaved
from outpace.hardware.placement import transport_of
from outpace.learner.backend import LearnerBackend, LearnerSettings, NotFinite, WriteState
from outpace.learner.batch_learner import BatchLearner
from outpace.learner.ranks import Ranks
from outpace.learner.state import write_tensors
from outpace.monitoring.efficiency import Stopwatch
from outpace.runtime import diagnostics
from outpace.types import (
    ChunkReport,
    Floats,
    GroupRecord,
    Ints,
    JournalLocation,
    LearnerStats,
    Manifest,
    Row,
    StepReport,
    Version,
)
from outpace.weights.cuda_ipc import DeviceSnapshotWriter
from outpace.weights.process_group import send_snapshot
from outpace.weights.sharded_snapshots import ShardedSnapshotWriter, SharedFolderWriter
from outpace.weights.shared_memory import SnapshotDraft, SnapshotWriter, WeightWriter

log = logging.getLogger(__name__)

MAX_SAVED_BAD_STEPS = 8

_ARRAYS = ("tokens", "mask", "logprobs", "versions", "advantages", "turn_rewards")
_FLOAT_ARRAYS = ("logprobs", "advantages", "turn_rewards")


class BadStepRecorder:
    """Writes the groups of bad steps to `bad_steps/` in the run directory, for a few steps."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._read_group = settings.read_group
        self._folder = settings.bad_steps
        self._remaining = MAX_SAVED_BAD_STEPS
        self._steps = 0

    @property
    def location(self) -> str:
        """Describe where groups were written; empty if none were."""
        return f"the groups of these steps are in {self._folder}" if self._steps else ""

    def save(self, step: int, places: Sequence[JournalLocation]) -> bool:
        """Write the groups of `step`. Return whether they were written."""
        if self._remaining == 0 or self._folder is None:
            return False
        self._remaining -= 1
        target = self._folder / f"step-{step:06d}"
        try:
            records = [self._read_group(place) for place in places]
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


P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound=LearnerBackend)


def build_snapshot_writer(
    config: Config, device: str, directory: Path, incarnation: str, ranks: Ranks | None = None
) -> WeightWriter[Any]:
    """Return a writer into GPU memory (CUDA IPC), shared memory or, for ranks on several machines, files on disk.
    `device` holds the weights, sharded over `ranks` if given.

    Adapters and deltas are read from files, so they never use GPU memory."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    in_files = config.lora.rank > 0 or config.weights.delta
    if torch.device(device).type == "cuda" and transport_of(config) == "ipc" and not in_files and ranks is None:
        return DeviceSnapshotWriter(device, incarnation, dtype)
    deltas = Path(config.weights.dir or directory) if config.weights.delta else None
    if ranks is not None and ranks.several_machines:
        return SharedFolderWriter(directory, incarnation, dtype, ranks)
    if ranks is not None:
        return ShardedSnapshotWriter(directory, incarnation, dtype, deltas, ranks)
    return SnapshotWriter(directory, incarnation, dtype, deltas)


class LearnerHost(Generic[B]):
    """Implements `outpace.protocols.Learner`. The constructor builds the backend and blocks until it is ready."""

    def __init__(self, settings: LearnerSettings, make_backend: Callable[[LearnerSettings], B]) -> None:
        self._settings = settings
        self._ranks = settings.ranks
        if self._ranks is None or self._ranks.is_first:
            settings.snapshots.mkdir(parents=True, exist_ok=True)
        self._writer = build_snapshot_writer(
            settings.config, settings.device, settings.snapshots, settings.incarnation, settings.ranks
        )
        self._sharing = settings.sharing
        self._threads = settings.threads or torch.get_num_threads()
        self._stopwatch = Stopwatch(self._threads if settings.device == "cpu" else None)
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._saving = ThreadPoolExecutor(1, "save")
        self._saving_costs: deque[tuple[str, float]] = deque()  # seconds spent on saving, not yet reported
        self._places: list[JournalLocation] = []  # journal places of the current batch
        self._bad_steps = BadStepRecorder(settings)
        self._compute = ThreadPoolExecutor(1, "learner")
        self.backend = self._compute.submit(self._build, make_backend).result()
        self._warm = False
        self._sealing.submit(self._writer.preallocate, ())
        self._batch_learner = None if settings.config.learner.stream else BatchLearner(self.backend, settings.config)

    async def chunk(self, version: Version, places: list[JournalLocation], replayed: bool = False) -> ChunkReport:
        return await self._on_compute_thread(self._chunk, version, places, replayed)

    async def step(self, version: Version) -> StepReport:
        return await self._on_compute_thread(self._step, version)

    async def publish(self, leased: list[Version]) -> Manifest:
        draft, merged_s = await self._on_compute_thread(self._copy, leased)
        if not self._warm:
            self._compute.submit(self.backend.warm_up)  # ignores errors: the first chunk raises those that matter
            self._warm = True
        manifest = await asyncio.get_running_loop().run_in_executor(self._sealing, self._seal, draft, merged_s)
        self._sealing.submit(self._writer.preallocate, leased)  # an error here is reported by the next copy
        return manifest

    async def send(self, manifest: Manifest, meeting: dict[str, Any]) -> None:
        await send_snapshot(manifest, meeting)

    async def save(self, directory: str, version: Version) -> bool:
        """Save the state; False if the learner is past `version`. Raises `NotSaved` if the files cannot be written. The
        learner keeps working in that case."""
        write = await self._on_compute_thread(self._copy_state, version)
        if write is not None:
            await asyncio.get_running_loop().run_in_executor(self._saving, self._write_state, write, Path(directory))
        return write is not None

    async def load(self, directory: str) -> Version:
        return await self._on_compute_thread(self._load, directory)

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        return await self._on_compute_thread(self.backend.logprobs, sequences, temperature)

    async def stats(self) -> LearnerStats:
        """Return immediately, even while the compute thread is busy."""
        return LearnerStats(
            version=self.backend.version,
            busy_s=self._stopwatch.busy_s,
            core_s=self._stopwatch.core_s,
            tokens=self.backend.tokens,
            threads=self._sharing.threads if self._sharing else self._threads,
            parameters=self.backend.parameter_count,
        )

    async def close(self) -> None:
        """Finish pending calls, stop the threads and remove the snapshots."""
        for executor in (self._compute, self._sealing, self._saving):
            await asyncio.to_thread(executor.shutdown)
        self.backend.close()
        self._writer.close()
        if self._ranks is not None:
            self._ranks.close()

    async def _on_compute_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def timed() -> T:
            try:
                with (
                    self._stopwatch.running(),
                    self._sharing.working() if self._sharing else nullcontext(),
                    self._ranks.errors() if self._ranks else nullcontext(),
                ):
                    return function(*args, **kwargs)
            except StopIteration as error:  # a future cannot carry it; the caller would wait forever
                raise RuntimeError("StopIteration") from error

        return await asyncio.get_running_loop().run_in_executor(self._compute, timed)

    def _build(self, make_backend: Callable[[LearnerSettings], B]) -> B:
        backend = make_backend(self._settings)
        diagnostics.crash_point("learner.built")
        self._writer.lay_out(backend.weights())
        return backend

    def _chunk(self, version: Version, places: list[JournalLocation], replayed: bool) -> ChunkReport:
        self._check_version(version)
        diagnostics.crash_point("chunk.before")
        groups = [self._settings.read_group(place) for place in places]
        self._places += places
        if self._batch_learner is not None:
            report = self._batch_learner.add(groups, replayed)
        else:
            rows = [row for group in groups for row in group.rows]
            with self._sharing.comparing(sum(len(row.tokens) for row in rows)) if self._sharing else nullcontext():
                report = self.backend.accumulate(rows, replayed=replayed)
        diagnostics.crash_point("chunk.after")
        return report

    def _step(self, version: Version) -> StepReport:
        self._check_version(version)
        diagnostics.crash_point("step.before")
        places, self._places = self._places, []
        try:
            report = self._update() if self._batch_learner is None else self._batch_learner.train()
        except NotFinite as error:
            self._bad_steps.save(version + 1, places)
            raise NotFinite(
                f"{error}; {self._bad_steps.location}" if self._bad_steps.location else str(error)
            ) from None
        metrics = report.metrics | self._saving_seconds()
        if report.skipped and self._bad_steps.save(report.version, places):
            metrics["faults/kept_groups"] = len(places)
        diagnostics.crash_point("step.after")
        return msgspec.structs.replace(report, metrics=metrics)

    def _update(self) -> StepReport:
        self.backend.update()
        return self.backend.finish_step()

    def _copy(self, leased: list[Version]) -> tuple[SnapshotDraft[Any], float]:
        """Return the snapshot, and the seconds spent on collecting (and merging) the weights before the copy."""
        started = time.perf_counter()
        weights = self.backend.weights()
        merged_s = time.perf_counter() - started
        draft = self._writer.copy(self.backend.version, weights, leased)
        diagnostics.crash_point("publish.copied")
        return draft, merged_s

    def _seal(self, draft: SnapshotDraft[Any], merged_s: float) -> Manifest:
        sealed = self._writer.seal(draft)
        diagnostics.crash_point("publish.sealed")
        return msgspec.structs.replace(
            sealed, adapter=self.backend.published_adapter, seconds=merged_s + sealed.seconds
        )

    def _check_version(self, version: Version) -> None:
        own = self.backend.version
        assert version == own, f"cannot train from version {version}: the learner is at version {own}"

    # ------------------------------------------------------------------------------------------------------- state

    def _copy_state(self, version: Version) -> WriteState | None:
        """Copy the state and return a function that writes it; None if the learner is past `version`."""
        if self.backend.version != version:
            return None
        started = time.perf_counter()
        write = self.backend.copy_state()
        self._saving_costs.append(("checkpoint/held_s", time.perf_counter() - started))
        diagnostics.crash_point("save.copied")
        return write

    def _write_state(self, write: WriteState, directory: Path) -> None:
        started = time.perf_counter()
        try:
            write(directory)
        except OSError as error:
            raise NotSaved(f"{directory}: {error.strerror or error}") from error
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
        return self.backend.load_state(Path(directory))
