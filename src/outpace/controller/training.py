"""Learner calls and their results: chunks, steps, step records, and checkpoints.

    TrainChunk ─▶ ChunkTrained     CloseBatch ─▶ BatchTrained     WriteRecord ─▶ a line     Checkpoint ─▶ a directory

Invariants
- Learner calls are sent in the order of the actions, and the learner runs them in that order.
- A step is recorded before the checkpoint that relies on it. A journal segment is deleted only after a checkpoint that
  no longer needs it is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from outpace.controller import events as ev
from outpace.controller.engine_registry import Components, PostEvent
from outpace.controller.groups import CheckpointMark, GroupTracker
from outpace.controller.recorder import FinalizedVisit, Recorder, TrainedStep
from outpace.controller.scheduler import Scheduler
from outpace.controller.supervisor import ComponentSupervisor
from outpace.errors import ComponentFailed, NotSaved
from outpace.protocols import Engine
from outpace.runtime import diagnostics
from outpace.types import ChunkReport, EngineStats, Version

ControllerState = dict[str, object]
"""The controller's state in a checkpoint, as JSON values."""

SaveCheckpoint = Callable[[Version, Callable[[], Awaitable[ControllerState | None]]], Coroutine[Any, Any, bool]]
"""Writes a checkpoint: the learner's state, then the controller's, then the commit. False if either has nothing to
save."""


STATS_S = 2.0
"""Timeout for an engine's statistics. An engine that hangs must not delay the record of a step."""


class Training:
    """Carries out the scheduler's actions for the learner, and writes step records and checkpoints."""

    def __init__(
        self,
        scheduler: Scheduler,
        components: Components,
        supervisor: ComponentSupervisor,
        recorder: Recorder,
        groups: GroupTracker,
        save: SaveCheckpoint,
        post: PostEvent,
    ) -> None:
        self._scheduler = scheduler
        self._components = components
        self._supervisor = supervisor
        self._recorder = recorder
        self._groups = groups
        self._save = save
        self._post = post
        self._chunks: list[ChunkReport] = []  # of the open batch
        self._trained: dict[Version, TrainedStep] = {}
        self._recording = asyncio.Lock()
        self._evaluated = asyncio.Event()
        self._batch_started: Version = -1
        self.checkpoint_error: NotSaved | None = None
        """The error that kept the newest checkpoint from being written."""
        self._finishing = False

    def evaluated(self) -> None:
        """Wake a checkpoint that waits for evaluations: one is done and the scheduler has handled it."""
        self._evaluated.set()

    def leave(self) -> None:
        """Stop waiting for evaluations: the scheduler has finished."""
        self._finishing = True
        self._evaluated.set()

    async def chunk(self, action: ev.TrainChunk) -> None:
        diagnostics.crash_point("controller.chunk")
        if action.version > self._batch_started:
            self._batch_started = action.version
            self._recorder.callbacks.post("on_batch_start", action.version)
        reports = self._groups.finished(action.groups, action.replayed)
        places = [report.place for report in reports if report.place]
        with self._recorder.span("learner", f"chunk of batch {action.version}"):
            report = await self._components.learner.chunk(action.version, places, action.replayed)
        self._chunks.append(report)
        self._post(ev.ChunkTrained(action.version))

    async def step(self, action: ev.CloseBatch) -> None:
        diagnostics.crash_point("controller.close_batch")
        with self._recorder.span("learner", f"step {action.version + 1}"):
            report = await self._components.learner.step(action.version)
        diagnostics.crash_point("controller.batch_trained")
        # Before the scheduler handles BatchTrained, which may retire some of them.
        groups = self._groups.trained(action.groups, self._scheduler.replay.replay_enabled)
        replayed = self._groups.pooled(action.replayed)
        self._trained[report.version] = TrainedStep(report, self._chunks, groups, replayed)
        self._chunks = []
        ess, kl = report.metrics.get("offpolicy/ess", 1.0), report.metrics.get("offpolicy/kl", 0.0)
        self._post(ev.BatchTrained(report.version, ess, kl))

    async def record(self, account: ev.WriteRecord, finalized: list[FinalizedVisit]) -> None:
        """Write the line of a step, or of the visits finalized between two steps. Lines are written in order."""
        async with self._recording:
            trained = self._trained.pop(account.version, None) if account.trained else None
            if trained is None:
                self._recorder.finalized(account.version, finalized, account.finalized)
                return
            engines = await self._engine_stats()
            learner = await self._components.learner.stats()
            self._recorder.step_done(trained, engines, learner, self._scheduler, finalized, account.finalized)
            # Inside the lock: a checkpoint of this step must not release the journal before it is read.
            await self._groups.record_rollouts(account.version, trained.groups)
        await self.confirm("step", account.version)
        diagnostics.crash_point("controller.step_recorded")

    async def confirm(self, kind: ev.Confirmable, version: Version) -> None:
        """With blocking callbacks, wait until they have handled all events so far, then confirm."""
        if self._scheduler.settings.confirm:
            await self._recorder.callbacks.handled()
            self._post(ev.Confirmed(kind, version))

    async def _engine_stats(self) -> dict[str, EngineStats]:
        """Return the statistics of the engines that reply. Engines may join, leave or die meanwhile."""
        engines = dict(self._components.engines)
        found = await asyncio.gather(*(_stats(engine) for engine in engines.values()))
        return {name: stats for name, stats in zip(engines, found, strict=True) if stats is not None}

    # ------------------------------------------------------------------------------------------------ checkpoints

    async def checkpoint(self, action: ev.Checkpoint, mark: CheckpointMark) -> None:
        await self._checkpoint(action, mark)
        await self.confirm("checkpoint", action.version)

    async def _checkpoint(self, action: ev.Checkpoint, mark: CheckpointMark) -> None:
        diagnostics.crash_point("controller.checkpoint_ordered")
        rng = asyncio.ensure_future(self._rng())  # start now; the learner must not wait for it
        try:
            with self._recorder.span("checkpoint", f"version {action.version}"):
                committed = await self._save(action.version, lambda: self._controller_state(action, rng))
        except NotSaved as error:
            self.checkpoint_error, committed = error, False
            self._recorder.console.status(f"could not write the checkpoint of step {action.version}: {error}")
        finally:
            rng.cancel()
        if not committed:
            self._recorder.fault("checkpoint_skipped")
            return
        self.checkpoint_error = None
        diagnostics.crash_point("controller.committed")
        self._recorder.checkpointed(action.version)
        self._groups.journal.committed(mark)
        await self._groups.release()

    async def _rng(self) -> dict[str, str]:
        workers = self._components.workers.items()
        return {name: (await self._supervisor.call(name, worker.rng)).decode() for name, worker in workers}

    async def _controller_state(self, action: ev.Checkpoint, rng: Awaitable[dict[str, str]]) -> ControllerState | None:
        """Return the controller's state, or None if the run ended before the checkpoint could be made. On return,
        everything the checkpoint relies on is recorded."""
        diagnostics.crash_point("controller.learner_saved")
        # In deterministic mode a resumed run must evaluate the same versions, so wait for every evaluation that is due.
        while self._scheduler.settings.deterministic and self._scheduler.has_pending_evaluation(action.version - 1):
            if self._finishing:
                return None
            self._evaluated.clear()
            await self._evaluated.wait()
        async with self._recording:  # then all earlier steps are recorded
            pass
        return {"core": action.state, "rng": await rng}


async def _stats(engine: Engine) -> EngineStats | None:
    try:
        async with asyncio.timeout(STATS_S):
            return await engine.stats()
    except (TimeoutError, ComponentFailed):
        return None
