"""What the learner is asked to do, and what is kept of it: chunks, steps, their records, checkpoints.

    TrainChunk ─▶ ChunkTrained     CloseBatch ─▶ BatchTrained     Account ─▶ a line     Checkpoint ─▶ a directory

Invariants
- Calls to the learner go out in the order of the actions, and the learner runs them in that order.
- A step is on record before the checkpoint that relies on it; a segment of the journal goes after the checkpoint that
  does not need it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from outpace import crash
from outpace.errors import NotSaved, PartFailed
from outpace.pipeline import events as ev
from outpace.pipeline.caretaker import Caretaker
from outpace.pipeline.core import Core
from outpace.pipeline.journal_use import Mark
from outpace.pipeline.making import Making
from outpace.pipeline.recorder import Recorder, Settled
from outpace.pipeline.staff import Parts, Tell
from outpace.protocols import Engine
from outpace.types import ChunkReport, EngineStats, Kept, StepReport, Version

Memory = dict[str, object]
"""The controller's part of a checkpoint, as JSON has it."""

Saver = Callable[[Version, Callable[[], Awaitable[Memory | None]]], Coroutine[Any, Any, bool]]
"""Makes a checkpoint: the learner writes its part, then the controller's is asked for, then it is committed. False: one
of them has none to give."""


STATS_S = 2.0
"""How long an engine may take to say what it has done; one that hangs must not keep a step from its record."""


@dataclass(frozen=True)
class Trained:
    """A step that was taken and is not on record yet."""

    report: StepReport
    chunks: list[ChunkReport]
    groups: list[Kept]
    replayed: list[Kept]


class Training:
    def __init__(
        self,
        core: Core,
        parts: Parts,
        care: Caretaker,
        recorder: Recorder,
        making: Making,
        save: Saver,
        tell: Tell,
    ) -> None:
        self._core = core
        self._parts = parts
        self._care = care
        self._recorder = recorder
        self._making = making
        self._save = save
        self._tell = tell
        self._chunks: list[ChunkReport] = []  # of the open batch
        self._trained: dict[Version, Trained] = {}
        self._recording = asyncio.Lock()
        self._evaluated = asyncio.Event()
        self._batch_begun: Version = -1
        self.unsaved: NotSaved | None = None
        """Why the newest checkpoint could not be written."""
        self.leaving = False

    def evaluated(self) -> None:
        """An evaluation is done, and the core knows it."""
        self._evaluated.set()

    def leave(self) -> None:
        """The core has finished: no evaluation will be heard of any more."""
        self.leaving = True
        self._evaluated.set()

    async def chunk(self, action: ev.TrainChunk) -> None:
        crash.reached("controller.chunk")
        if action.version > self._batch_begun:
            self._batch_begun = action.version
            self._recorder.batch_started(action.version)
        reports = self._making.finished(action.groups, action.replayed)
        places = [report.place for report in reports if report.place]
        with self._recorder.span("learner", f"chunk of batch {action.version}"):
            report = await self._parts.learner.chunk(action.version, places, action.replayed)
        self._chunks.append(report)
        self._tell(ev.ChunkTrained(action.version))

    async def step(self, action: ev.CloseBatch) -> None:
        crash.reached("controller.close_batch")
        with self._recorder.span("learner", f"step {action.version + 1}"):
            report = await self._parts.learner.step(action.version)
        crash.reached("controller.batch_trained")
        # Before the core hears of it, and retires some of them.
        groups = self._making.trained(action.groups, self._core.pools)
        replayed = self._making.pooled(action.replayed)
        self._trained[report.version] = Trained(report, self._chunks, groups, replayed)
        self._chunks = []
        ess, kl = report.metrics.get("offpolicy/ess", 1.0), report.metrics.get("offpolicy/kl", 0.0)
        self._tell(ev.BatchTrained(report.version, ess, kl))

    async def record(self, account: ev.Account, settled: list[Settled]) -> None:
        """One line for a step, before that of the next one; or for what was settled between two of them."""
        async with self._recording:
            trained = self._trained.pop(account.version, None) if account.trained else None
            if trained is None:
                self._recorder.settled(account.version, settled, account.settled)
                return
            engines = await self._engine_stats()
            learner = await self._parts.learner.stats()
            self._recorder.step_done(
                trained.report,
                trained.chunks,
                [(kept.order, kept.report) for kept in trained.groups],
                [(kept.order, kept.report) for kept in trained.replayed],
                engines,
                learner,
                self._core,
                settled,
                account.settled,
            )
            # Within the lock, so that no checkpoint of this step lets the journal go before it was read.
            await self._making.record_rollouts(account.version, trained.groups)
        crash.reached("controller.step_recorded")

    async def _engine_stats(self) -> dict[str, EngineStats]:
        """Of those that are there to be asked: others may come, leave or die meanwhile."""
        engines = dict(self._parts.engines)
        told = await asyncio.gather(*(_stats(engine) for engine in engines.values()))
        return {name: stats for name, stats in zip(engines, told, strict=True) if stats is not None}

    # ------------------------------------------------------------------------------------------------ checkpoints

    async def checkpoint(self, action: ev.Checkpoint, mark: Mark) -> None:
        crash.reached("controller.checkpoint_ordered")
        rng = asyncio.ensure_future(self._rng())  # now, but the learner must not wait for it
        try:
            with self._recorder.span("checkpoint", f"version {action.version}"):
                committed = await self._save(action.version, lambda: self._memory(action, rng))
        except NotSaved as error:
            self.unsaved, committed = error, False
            self._recorder.console.status(f"no checkpoint of step {action.version}: {error}")
        finally:
            rng.cancel()
        if not committed:
            self._recorder.fault("checkpoint_skipped")
            return
        self.unsaved = None
        crash.reached("controller.committed")
        self._recorder.checkpointed(action.version)
        self._making.journal.committed(mark)
        await self._making.release()

    async def _rng(self) -> dict[str, str]:
        return {name: (await self._care.ask(name, worker.rng)).decode() for name, worker in self._parts.workers.items()}

    async def _memory(self, action: ev.Checkpoint, rng: Awaitable[dict[str, str]]) -> Memory | None:
        """The controller's part, None if there must be no checkpoint after all. When this returns, everything that the
        checkpoint relies on is on record."""
        crash.reached("controller.learner_saved")
        # In lockstep a resumed run evaluates what an uninterrupted one does: none that was due may get lost.
        while self._core.settings.deterministic and self._core.evaluates(action.version - 1):
            if self.leaving:
                return None
            self._evaluated.clear()
            await self._evaluated.wait()
        async with self._recording:  # which comes after all steps before this
            pass
        return {"core": action.state, "rng": await rng}


async def _stats(engine: Engine) -> EngineStats | None:
    try:
        async with asyncio.timeout(STATS_S):
            return await engine.stats()
    except (TimeoutError, PartFailed):
        return None
