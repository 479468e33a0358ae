"""The controller's loop over real parts: one queue of events in, actions carried out as supervised tasks.

                         ┌───────────────────────── events ─────────────────────────┐
                         ▼                                                           │
    queue ─▶ core.handle(event) ─▶ actions ─▶ one task each ─▶ worker.run ───────────┤ GroupClosed
                                                            ─▶ learner.chunk, .step ─┤ ChunkTrained, BatchTrained
                                                            ─▶ learner.publish ──────┤ Published
                                                            ─▶ engine.load ──────────┤ EngineLoaded
                                                            ─▶ evaluate ─────────────┤ EvaluationDone
                                                            ─▶ learner.save, commit ─┘
    beside it: the caretaker replaces engines and workers that died (EngineLost, EngineJoined), the watchdog looks
    whether anything still moves

The loop waits for nothing but the queue. What fills it: the tasks above, the caretaker, a signal. If nothing arrives
for `stall_s`, the run ends as stalled, naming who waits on whom.

Invariants
- No tensor and no user code here: the controller holds metadata only.
- Calls to the learner go out in the order of the actions, and the learner runs them in that order.
- A task's exception ends the run with the failing part's own traceback.
- A step is on record before the checkpoint that relies on it; a segment of the journal goes after the checkpoint that
  does not need it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import msgspec

from outpace import crash
from outpace.errors import CorruptData, NotSaved, PartFailed, PartLost, Stalled
from outpace.observe.runlog import BatchSettled
from outpace.pipeline import events as ev
from outpace.pipeline.budget import Budget, Limits
from outpace.pipeline.caretaker import CareSettings, Caretaker
from outpace.pipeline.core import Core
from outpace.pipeline.evaluation import Evaluation, Evaluator
from outpace.pipeline.journal_use import JournalUse, Mark
from outpace.pipeline.recorder import Recorder
from outpace.pipeline.supervisor import Role
from outpace.pipeline.survivors import NOTHING, Survivors, group_closed
from outpace.pipeline.watchdog import Awake, Watchdog
from outpace.protocols import Engine, Learner, Worker
from outpace.runtime.spec import Runtime
from outpace.runtime.waits import waiting
from outpace.types import EngineStats, GroupOrder, GroupReport, Kept, LoadReport, Manifest, StepReport, Version

DEATH_NOTICE_S = 2.0
"""How long to wait for a part's own account of its death before settling for "connection closed"."""

WATCH_S = 1.0
"""How often the watchdog looks, at most."""

LEARNER = "learner"

Memory = dict[str, object]
"""The controller's part of a checkpoint, as JSON has it."""

Saver = Callable[[Version, Callable[[], Awaitable[Memory | None]]], Coroutine[Any, Any, bool]]
"""Makes a checkpoint: the learner writes its part, then the controller's is asked for, then it is committed. False: one
of them has none to give."""


@dataclass(frozen=True)
class Parts:
    learner: Learner
    engines: dict[str, Engine]
    workers: dict[str, Worker]
    runtime: Runtime

    @property
    def roles(self) -> dict[str, Role]:
        return {LEARNER: "learner", **dict.fromkeys(self.engines, "engine"), **dict.fromkeys(self.workers, "worker")}


@dataclass(frozen=True)
class DriverSettings:
    group_size: int
    stall_s: float
    show_rollouts: int  # groups per step
    limits: Limits
    care: CareSettings


@dataclass(frozen=True)
class Trained:
    """A step that was taken and is not on record yet."""

    report: StepReport
    groups: list[Kept]
    replayed: list[Kept]


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
    ) -> None:
        """`survivors` are what the core was told of: where they lie in the journal."""
        self._core = core
        self._parts = parts
        self._recorder = recorder
        self._evaluator = evaluator
        self._save = save
        self._settings = settings
        self._queue: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting: set[asyncio.Task[None]] = set()  # those that the end waits for
        self._worker_names = list(parts.workers)
        self._orders: dict[int, GroupOrder] = {}
        self._reports: dict[int, GroupReport] = {}
        self._pooled: dict[int, Kept] = {}  # trained, and kept until the core retires them
        self._manifests: dict[Version, Manifest] = {}
        self._journal = JournalUse()
        self._budget = Budget(settings.limits)
        self._care = Caretaker(
            parts.runtime, parts.roles, parts.engines, settings.care, self._queue.put_nowait, self._notice
        )
        self._watchdog = Watchdog(settings.stall_s)
        self._settled: list[BatchSettled] = []  # visits, and not on record yet
        self._reasons: dict[int, tuple[str, str]] = {}  # of groups that will not be trained: task id and why
        self._trained: dict[Version, Trained] = {}
        self._recording = asyncio.Lock()
        self._evaluated = asyncio.Event()
        self._given_up: set[int] = set()  # groups that were cancelled and have not come back yet
        self._unsaved: NotSaved | None = None  # why the newest checkpoint could not be written
        self._batch_begun: Version = -1
        self._finish: str | None = None
        self._adopt(survivors)

    def _adopt(self, survivors: Survivors) -> None:
        for kept in survivors.finished:
            self._orders[kept.order.group] = kept.order
            self._reports[kept.order.group] = kept.report
        self._pooled = {kept.order.group: kept for kept in survivors.pooled}
        for kept in (*survivors.finished, *survivors.pooled):
            self._journal.restored(kept.report)

    async def run(self, served: dict[str, Version]) -> str:
        """Drive the core from start to finish; returns why it finished."""
        for lookout in (self._care.watch(), self._care.probe(), self._watch()):
            self._spawn(lookout)
        try:
            self._handle(ev.Started(served))
            crash.reached("controller.started")
            while self._finish is None:
                self._handle(await self._next())
            await self._settle()
        finally:
            await self._cancel_everything()
        return self._finish

    def stop(self) -> None:
        """Ask the run to stop after the step under way."""
        self._queue.put_nowait(ev.StopRequested())

    def fail(self, error: PartFailed) -> None:
        """End the run for a reason that no task of the driver's own knows."""
        self._queue.put_nowait(error)

    # ------------------------------------------------------------------------------------------------ the loop

    def _handle(self, event: ev.Event) -> None:
        for action in self._core.handle(event):
            self._carry_out(action)
        if self._finish is not None or isinstance(event, ev.EvaluationDone):
            self._evaluated.set()

    async def _next(self) -> ev.Event:
        item = await self._queue.get()
        self._watchdog.moved()
        if isinstance(item, BaseException):
            raise await self._best_account(item)
        return item

    async def _watch(self) -> None:
        """For as long as the run lasts: look whether anything moves."""
        interval_s = min(WATCH_S, self._settings.stall_s / 20)
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
                self._spawn(self._run_group(action))
            case ev.Cancel():
                self._spawn(self._cancel_group(action.group))
            case ev.TrainChunk():
                self._spawn(self._train_chunk(action))
            case ev.CloseBatch():
                self._lasting.add(self._spawn(self._close_batch(action)))
            case ev.Settle():
                self._book(action)
            case ev.Account():
                settled, self._settled = self._settled, []
                self._lasting.add(self._spawn(self._record(action, settled)))
            case ev.Retire():
                for group in action.groups:
                    self._journal.closed(self._pooled.pop(group).report)
            case ev.Publish():
                self._spawn(self._publish(action))
            case ev.LoadWeights():
                self._spawn(self._load_weights(action))
            case ev.Evaluate():
                self._spawn(self._evaluate(action))
            case ev.Checkpoint():
                self._lasting.add(self._spawn(self._checkpoint(action, self._journal.cut())))
            case ev.LagChanged():
                self._recorder.lag_changed(action.by)
            case ev.EpochStarted():
                self._recorder.epoch_started(action.epoch)
            case ev.EpochEnded():
                self._recorder.epoch_ended(action.epoch)
            case ev.Finish():
                self._finish = action.reason

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
        while self._lasting:
            await asyncio.wait(self._lasting, return_when=asyncio.FIRST_EXCEPTION)
            self._raise_failures()
        if self._unsaved is not None:  # and nothing will make up for it
            raise self._unsaved
        await self._cancel_everything()
        self._raise_failures()

    def _raise_failures(self) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, BaseException):
                raise item

    async def _cancel_everything(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ groups

    async def _run_group(self, admit: ev.Admit) -> None:
        crash.reached("controller.admit")
        shown = admit.group % self._core.settings.groups_per_step < self._settings.show_rollouts
        order = GroupOrder(
            admit.group,
            admit.task,
            admit.epoch,
            admit.min_version,
            self._settings.group_size,
            show=shown,
            position=admit.position,
            recorded=admit.recorded,
        )
        self._recorder.group_started(order)
        self._orders[admit.group] = order
        with waiting(f"group {admit.group}"):
            report = await self._made(order)
        crash.reached("controller.group_closed")
        self._close_group(report)
        self._queue.put_nowait(group_closed(report))

    async def _made(self, order: GroupOrder) -> GroupReport:
        """A worker's report on an order. If it dies over it, its successor may use what it has recorded."""
        name = self._worker_of(order.group)
        orders = chain([order], repeat(msgspec.structs.replace(order, recorded=True)))
        return await self._care.ask(name, lambda: self._parts.workers[name].run(next(orders)))

    def _close_group(self, report: GroupReport) -> None:
        if report.outcome == "finished":
            self._reports[report.group] = report
            self._journal.opened(report)
        if report.group in self._given_up:
            self._given_up.remove(report.group)
            self._give_up(report)
            return
        if report.outcome != "finished":
            self._orders.pop(report.group)
            self._reasons[report.group] = (report.task_id, report.reason)
        self._recorder.group_closed(report)
        if notice := self._budget.note(report):
            self._recorder.console.status(notice)

    async def _cancel_group(self, group: int) -> None:
        """The core has given this group up; one that came back before we asked is given up all the same."""
        if report := self._reports.get(group):
            self._give_up(report)
        elif group in self._orders:
            self._given_up.add(group)
            name = self._worker_of(group)
            await self._care.ask(name, lambda: self._parts.workers[name].cancel(group))

    def _give_up(self, report: GroupReport) -> None:
        self._orders.pop(report.group)
        if self._reports.pop(report.group, None):
            self._journal.closed(report)
        self._recorder.group_given_up(report)

    def _worker_of(self, group: int) -> str:
        return self._worker_names[group % len(self._worker_names)]

    def _book(self, settle: ev.Settle) -> None:
        if settle.outcome == "skipped":
            self._recorder.visit_skipped()
        known = self._reasons.pop(settle.group, None) if settle.group is not None else None
        task_id, reason = known or ("", "")
        self._settled.append(BatchSettled(settle.task, settle.epoch, settle.outcome, reason, task_id))

    # ------------------------------------------------------------------------------------------------ steps

    async def _train_chunk(self, action: ev.TrainChunk) -> None:
        crash.reached("controller.chunk")
        if action.version > self._batch_begun:
            self._batch_begun = action.version
            self._recorder.batch_started(action.version)
        reports = [self._pooled[group].report if action.replayed else self._reports[group] for group in action.groups]
        places = [report.place for report in reports if report.place]
        with self._recorder.span("learner", f"chunk of batch {action.version}"):
            report = await self._parts.learner.chunk(action.version, places, action.replayed)
        self._recorder.chunk_trained(report)
        self._queue.put_nowait(ev.ChunkTrained(action.version))

    async def _close_batch(self, action: ev.CloseBatch) -> None:
        crash.reached("controller.close_batch")
        with self._recorder.span("learner", f"step {action.version + 1}"):
            report = await self._parts.learner.step(action.version)
        crash.reached("controller.batch_trained")
        groups = [Kept(self._orders.pop(group), self._reports.pop(group)) for group in action.groups]
        self._trained[report.version] = Trained(report, groups, [self._pooled[group] for group in action.replayed])
        if self._core.pools:  # before the core hears of it and retires some of them
            self._pooled |= {kept.order.group: kept for kept in groups}
        else:
            self._close_journal(groups)
        ess, kl = report.metrics.get("offpolicy/ess", 1.0), report.metrics.get("offpolicy/kl", 0.0)
        self._queue.put_nowait(ev.BatchTrained(report.version, ess, kl))

    def _close_journal(self, groups: Sequence[Kept]) -> None:
        for kept in groups:
            self._journal.closed(kept.report)

    async def _record(self, account: ev.Account, settled: list[BatchSettled]) -> None:
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
                [(kept.order, kept.report) for kept in trained.groups],
                [(kept.order, kept.report) for kept in trained.replayed],
                engines,
                learner,
                self._core,
                settled,
                account.settled,
            )
        crash.reached("controller.step_recorded")

    async def _engine_stats(self) -> dict[str, EngineStats]:
        """Of those that are there to be asked."""
        stats: dict[str, EngineStats] = {}
        for name, engine in self._parts.engines.items():
            try:
                stats[name] = await engine.stats()
            except PartLost:
                continue
        return stats

    # ------------------------------------------------------------------------------------------------ checkpoints

    async def _checkpoint(self, action: ev.Checkpoint, mark: Mark) -> None:
        crash.reached("controller.checkpoint_ordered")
        try:
            with self._recorder.span("checkpoint", f"version {action.version}"):
                committed = await self._save(action.version, lambda: self._memory(action))
        except NotSaved as error:
            self._unsaved, committed = error, False
            self._recorder.console.status(f"no checkpoint of step {action.version}: {error}")
        if not committed:
            self._recorder.fault("checkpoint_skipped")
            return
        self._unsaved = None
        crash.reached("controller.committed")
        self._journal.committed(mark)
        if segments := self._journal.releasable():
            name = self._worker_names[0]
            await self._care.ask(name, lambda: self._parts.workers[name].release(segments))

    async def _memory(self, action: ev.Checkpoint) -> Memory | None:
        """The controller's part, None if there must be no checkpoint after all. When this returns, everything that the
        checkpoint relies on is on record."""
        crash.reached("controller.learner_saved")
        # In lockstep a resumed run evaluates what an uninterrupted one does: none that was due may get lost.
        while self._core.settings.deterministic and self._core.evaluates(action.version - 1):
            if self._finish is not None:
                return None
            self._evaluated.clear()
            await self._evaluated.wait()
        async with self._recording:  # which comes after all steps before this
            pass
        rng = {name: (await self._care.ask(name, worker.rng)).decode() for name, worker in self._parts.workers.items()}
        return {"core": action.state, "rng": rng}

    # ------------------------------------------------------------------------------------------------ weights

    async def _publish(self, action: ev.Publish) -> None:
        with self._recorder.span("learner", f"publish {action.version}"):
            manifest = await self._parts.learner.publish(list(action.leased))
        crash.reached("controller.published")
        assert manifest.version == action.version, f"published {manifest.version}, not {action.version}"
        for version in list(self._manifests):
            if version not in action.leased:
                del self._manifests[version]
        self._manifests[action.version] = manifest
        self._recorder.published(manifest)
        self._queue.put_nowait(ev.Published(action.version))

    async def _load_weights(self, action: ev.LoadWeights) -> None:
        with self._recorder.span(action.engine, f"load {action.version}"):
            try:
                report = await self._load(action.engine, self._manifests[action.version], pinned=False)
            except PartLost:
                return  # the core hears of it as EngineLost, and orders the next one when it is back
        crash.reached("controller.loaded")
        self._recorder.loaded(action.engine, report)
        self._queue.put_nowait(ev.EngineLoaded(action.engine, action.version))

    async def _load(self, engine: str, manifest: Manifest, pinned: bool) -> LoadReport:
        """A snapshot that does not match its checksums is read once more; the engine keeps its version meanwhile."""
        try:
            return await self._parts.engines[engine].load(manifest, pinned)
        except CorruptData:
            self._recorder.fault("corrupt_weights")
            return await self._parts.engines[engine].load(manifest, pinned)

    # ------------------------------------------------------------------------------------------------ evaluation

    async def _evaluate(self, action: ev.Evaluate) -> None:
        crash.reached("controller.evaluate")
        engine = next(iter(self._parts.engines))
        with self._recorder.span("evaluation", f"version {action.version}"):
            result = await self._measured(engine, self._manifests[action.version])
        self._recorder.evaluated(result)
        crash.reached("controller.evaluated")
        self._queue.put_nowait(ev.EvaluationDone(action.version))

    async def _measured(self, engine: str, manifest: Manifest) -> Evaluation:
        """An engine that is replaced meanwhile has lost the weights that were pinned: then all of it is done again."""
        while True:
            await self._care.ask(engine, lambda: self._load(engine, manifest, pinned=True))
            life = self._care.life(engine)
            result = await self._evaluator.run(manifest.version, self._made, progress=self._watchdog.moved)
            await self._care.ask(engine, self._parts.engines[engine].release_pinned)
            if self._care.life(engine) == life:
                return result
