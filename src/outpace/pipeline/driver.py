"""The controller's loop over real parts: one queue of events in, actions carried out as supervised tasks.

                         ┌───────────────────────── events ─────────────────────────┐
                         ▼                                                           │
    queue ─▶ core.handle(event) ─▶ actions ─▶ one task each ─▶ worker.run ───────────┤ GroupClosed
                                                            ─▶ learner.chunk, .step ─┤ ChunkTrained, BatchTrained
                                                            ─▶ learner.publish ──────┤ Published
                                                            ─▶ engine.load ──────────┤ EngineLoaded
                                                            ─▶ evaluate ─────────────┤ EvaluationDone
                                                            ─▶ learner.save, commit ─┘
    by whom: `Making` (groups), `Training` (the learner, records, checkpoints), `Serving` (weights, evaluations);
    beside it: the caretaker replaces engines and workers that died (EngineLost, EngineJoined), the roster tells workers
    who samples, the enrolment lets engines come and go, the watchdog looks whether anything still moves

The loop waits for nothing but the queue. What fills it: the tasks above, the caretaker, a signal. If nothing arrives
for `stall_s`, the run ends as stalled, naming who waits on whom.

Invariants
- No tensor and no user code here: the controller holds metadata only.
- A task's exception ends the run with the failing part's own traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from outpace import crash
from outpace.errors import PartFailed, PartLost, Stalled
from outpace.pipeline import events as ev
from outpace.pipeline.budget import LimitReached
from outpace.pipeline.caretaker import CareSettings, Caretaker
from outpace.pipeline.core import Core
from outpace.pipeline.enrolment import Enrolment, Recruit
from outpace.pipeline.evaluation import Evaluator
from outpace.pipeline.making import Making, MakingSettings
from outpace.pipeline.recorder import Recorder
from outpace.pipeline.roster import Roster
from outpace.pipeline.serving import Serving
from outpace.pipeline.staff import Parts
from outpace.pipeline.survivors import NOTHING, Survivors
from outpace.pipeline.training import Saver, Training
from outpace.pipeline.watchdog import Awake, Watchdog
from outpace.types import Version

DEATH_NOTICE_S = 2.0
"""How long to wait for a part's own account of its death before settling for "connection closed"."""

WATCH_S = 1.0
"""How often the watchdog looks, at most."""


@dataclass(frozen=True)
class DriverSettings:
    stall_s: float
    making: MakingSettings
    care: CareSettings
    leaving_s: float = 60.0  # how long an engine that leaves may take to finish what it has


class Driver:
    def __init__(
        self,
        core: Core,
        parts: Parts,
        recorder: Recorder,
        evaluator: Evaluator,
        save: Saver,
        settings: DriverSettings,
        survivors: Survivors = NOTHING,
        recruit: Recruit | None = None,
    ) -> None:
        """`survivors` are what the core was told of: where they lie in the journal. `recruit` brings further engines to
        life; None: there will be none."""
        self._core = core
        self._parts = parts
        self._recorder = recorder
        self._queue: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        tell = self._queue.put_nowait
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting: set[asyncio.Task[None]] = set()  # those that the end waits for
        self._watchdog = Watchdog(settings.stall_s)
        self._roster = Roster({name: parts.sockets.get(name, "") for name in parts.engines}, parts.workers)
        self._care = Caretaker(
            parts.runtime, parts.roles, parts.engines, settings.care, tell, self._notice, self._roster.tell_again
        )
        self._making = Making(parts, self._care, recorder, settings.making, survivors, tell)
        self._training = Training(core, parts, self._care, recorder, self._making, save, tell)
        self._serving = Serving(
            parts,
            self._care,
            self._roster,
            recorder,
            evaluator,
            self._making.made,
            self._watchdog.moved,
            tell,
            core.settings.eval_pinned,
        )
        self._enrolment = (
            Enrolment(
                recorder.log.dir,
                parts,
                self._care,
                self._roster,
                recruit,
                tell,
                recorder.console.status,
                settings.leaving_s,
            )
            if recruit
            else None
        )
        self._finish: str | None = None
        self._limit_reached: LimitReached | None = None

    async def run(self, served: dict[str, Version]) -> str:
        """Drive the core from start to finish; returns why it finished."""
        for lookout in (self._care.watch(), self._care.probe(), self._watch(), self._roster.tell()):
            self._spawn(lookout)
        if self._enrolment is not None:
            self._spawn(self._enrolment.watch())
        try:
            self._handle(ev.Started(served))
            crash.reached("controller.started")
            while self._finish is None:
                self._handle(await self._next())
            await self._settle()
        finally:
            await self._cancel_everything()
        if self._limit_reached is not None:
            raise self._limit_reached
        return self._finish

    def stop(self) -> None:
        """Ask the run to stop after the step under way."""
        self._queue.put_nowait(ev.StopRequested())

    # ------------------------------------------------------------------------------------------------ the loop

    def _handle(self, event: ev.Event) -> None:
        self._roster.hear(event, self._core.version)
        for action in self._core.handle(event):
            self._carry_out(action)
        if isinstance(event, ev.EvaluationDone):
            self._training.evaluated()

    async def _next(self) -> ev.Event:
        item = await self._queue.get()
        self._watchdog.moved()
        if isinstance(item, LimitReached) and self._core.version > 0:
            self._limit_reached = item
            return ev.StopRequested()  # so that a checkpoint is made; the error is raised after it
        if isinstance(item, BaseException):
            raise await self._best_account(item)
        return item

    async def _watch(self) -> None:
        """For as long as the run lasts: look whether anything moves."""
        interval_s = min(WATCH_S, self._watchdog.patience_s / 20)
        awake = Awake(asyncio.get_running_loop().time, interval_s)
        while True:
            await asyncio.sleep(interval_s)
            verdict = self._watchdog.tick(awake.lap())
            if verdict == "fine":
                continue
            reason = f"nothing has moved for {self._watchdog.still_s:.1f} s: {self._core.waiting_reason()}"
            self._recorder.console.status(reason)
            path = await asyncio.to_thread(self._recorder.log.stall, reason, await self._parts.runtime.dump())
            if verdict == "end":
                raise Stalled(f"{reason}; what everybody was doing is in {path}")

    async def _best_account(self, error: BaseException) -> BaseException:
        """A part that dies closes its connections first; its own account of its death comes a moment later."""
        if not isinstance(error, PartLost):
            return error
        try:
            async with asyncio.timeout(DEATH_NOTICE_S):
                while not isinstance(item := await self._queue.get(), PartFailed) or isinstance(item, PartLost):
                    pass
                return item
        except TimeoutError:
            return error

    def _notice(self, role: str, text: str) -> None:
        self._recorder.fault(f"{role}_lost")
        self._recorder.console.status(text)

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Admit():
                self._spawn(self._making.run(action))
            case ev.Cancel():
                self._spawn(self._making.cancel(action.group))
            case ev.TrainChunk():
                self._spawn(self._training.chunk(action))
            case ev.CloseBatch():
                self._lasting.add(self._spawn(self._training.step(action)))
            case ev.Settle():
                self._making.book(action)
            case ev.Account():
                self._lasting.add(self._spawn(self._training.record(action, self._making.booked())))
            case ev.Retire():
                self._making.retire(action.groups)
            case ev.Publish():
                self._spawn(self._serving.publish(action))
            case ev.LoadWeights():
                self._spawn(self._serving.load(action))
            case ev.Evaluate():
                self._spawn(self._serving.evaluate(action))
            case ev.Checkpoint():
                self._lasting.add(self._spawn(self._training.checkpoint(action, self._making.journal.cut())))
            case ev.LagChanged():
                self._recorder.lag_changed(action.by)
            case ev.EpochStarted():
                self._recorder.epoch_started(action.epoch)
            case ev.EpochEnded():
                self._recorder.epoch_ended(action.epoch)
            case ev.PolicyUpdated():
                self._recorder.policy_updated(action.version)
            case ev.Finish():
                self._finish = action.reason
                self._training.leave()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._supervise)
        return task

    def _supervise(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._lasting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.put_nowait(error)

    async def _settle(self) -> None:
        """Steps are recorded and checkpoints committed; whatever else is under way serves nobody any more."""
        crash.reached("controller.finishing")
        while self._lasting:  # and the watchdog still watches
            done, _ = await asyncio.wait(self._lasting, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                self._watchdog.moved()
            await self._raise_failures()
        if self._training.unsaved is not None:  # and nothing will make up for it
            raise self._training.unsaved
        await self._cancel_everything()
        await self._raise_failures()

    async def _raise_failures(self) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, BaseException) and not (self._limit_reached and isinstance(item, LimitReached)):
                raise await self._best_account(item)

    async def _cancel_everything(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
