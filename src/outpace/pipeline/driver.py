"""The controller's loop over real parts: one queue of events in, actions carried out as supervised tasks.

                         ┌───────────────────────── events ─────────────────────────┐
                         ▼                                                           │
    queue ─▶ core.handle(event) ─▶ actions ─▶ one task each ─▶ worker.run ───────────┤ GroupClosed
                                                            ─▶ learner.chunk, .step ─┤ ChunkTrained, BatchTrained
                                                            ─▶ learner.publish ──────┤ Published
                                                            ─▶ engine.load ──────────┤ EngineLoaded
                                                            ─▶ evaluate ─────────────┤ EvaluationDone
                                                            ─▶ learner.save, commit ─┘

The loop waits for nothing but the queue. What fills it: the tasks above, a part that died (the runtime's watch), a
signal. If nothing arrives for `stall_s`, the run ends as stalled, naming who waits on whom.

Invariants
- No tensor and no user code here: the controller holds metadata only.
- Calls to the learner go out in the order of the actions, and the learner runs them in that order.
- A task's exception ends the run with the failing part's own traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from outpace.errors import CorruptData, PartFailed, Stalled
from outpace.pipeline import events as ev
from outpace.pipeline.budget import Budget, Limits
from outpace.pipeline.core import Core
from outpace.pipeline.evaluation import Evaluator
from outpace.pipeline.journal_use import JournalUse
from outpace.pipeline.recorder import Recorder
from outpace.protocols import Engine, Learner, Worker
from outpace.types import GroupOrder, GroupReport, LoadReport, Manifest, Version

DEATH_NOTICE_S = 2.0
"""How long to wait for a part's own account of its death before settling for "connection closed"."""

Saver = Callable[[Version, dict[str, object]], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parts:
    learner: Learner
    engines: dict[str, Engine]
    workers: list[Worker]
    failure: asyncio.Future[PartFailed]


@dataclass(frozen=True)
class DriverSettings:
    group_size: int
    stall_s: float
    show_rollouts: int  # groups per step
    limits: Limits


class Driver:
    def __init__(
        self, core: Core, parts: Parts, recorder: Recorder, evaluator: Evaluator, save: Saver, settings: DriverSettings
    ) -> None:
        self._core = core
        self._parts = parts
        self._recorder = recorder
        self._evaluator = evaluator
        self._save = save
        self._settings = settings
        self._queue: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting: set[asyncio.Task[None]] = set()  # those that the end waits for
        self._orders: dict[int, GroupOrder] = {}
        self._reports: dict[int, GroupReport] = {}
        self._pooled: dict[int, tuple[GroupOrder, GroupReport]] = {}  # trained, and kept until the core retires them
        self._manifests: dict[Version, Manifest] = {}
        self._journal = JournalUse(len(parts.workers))
        self._budget = Budget(settings.limits)
        self._recording = asyncio.Lock()
        self._given_up: set[int] = set()  # groups that were cancelled and have not come back yet
        self._batch_begun: Version = -1
        self._moved_at = 0.0
        self._finish: str | None = None

    async def run(self, served: dict[str, Version]) -> str:
        """Drive the core from start to finish; returns why it finished."""
        self._parts.failure.add_done_callback(self._part_died)
        self._moved()
        try:
            self._handle(ev.Started(served))
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

    async def _next(self) -> ev.Event:
        item = await self._next_item()
        self._moved()
        if isinstance(item, BaseException):
            raise await self._best_account(item)
        return item

    async def _next_item(self) -> ev.Event | BaseException:
        loop, patience = asyncio.get_running_loop(), self._settings.stall_s
        while loop.time() < self._moved_at + patience:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._moved_at + patience):
                    return await self._queue.get()
        raise Stalled(f"nothing has moved for {patience:g} s: {self._core.waiting_reason()}")

    def _moved(self) -> None:
        """Something got done, even if the core need not hear of it: the watch for a stall starts anew."""
        self._moved_at = asyncio.get_running_loop().time()

    async def _best_account(self, error: BaseException) -> BaseException:
        """A dead part closes its connections first; its own account of its death comes a moment later."""
        if isinstance(error, PartFailed) and not error.remote_traceback:
            await asyncio.wait([self._parts.failure], timeout=DEATH_NOTICE_S)
            if self._parts.failure.done():
                return self._parts.failure.result()
        return error

    def _part_died(self, failure: asyncio.Future[PartFailed]) -> None:
        if not failure.cancelled():
            self._queue.put_nowait(failure.result())

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
            case ev.Retire():
                retired = [self._pooled.pop(group)[1] for group in action.groups]
                self._lasting.add(self._spawn(self._release_journal(retired)))
            case ev.Publish():
                self._spawn(self._publish(action))
            case ev.LoadWeights():
                self._spawn(self._load_weights(action))
            case ev.Evaluate():
                self._spawn(self._evaluate(action))
            case ev.Checkpoint():
                self._lasting.add(self._spawn(self._save(action.version, action.state)))
            case ev.Skip():
                self._recorder.visit_skipped()
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
        if self._lasting:
            await asyncio.wait(self._lasting)
        await self._cancel_everything()
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, BaseException):
                raise await self._best_account(item)

    async def _cancel_everything(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ the actions

    async def _run_group(self, admit: ev.Admit) -> None:
        shown = admit.group % self._core.settings.groups_per_step < self._settings.show_rollouts
        order = GroupOrder(
            admit.group, admit.task, admit.epoch, admit.min_version, self._settings.group_size, show=shown
        )
        self._recorder.group_started(order)
        self._orders[admit.group] = order
        report = await self._worker(admit.group).run(order)
        self._close_group(report)
        self._queue.put_nowait(_closed(report))

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
        self._recorder.group_closed(report)
        if notice := self._budget.note(report):
            self._recorder.console.status(notice)

    async def _cancel_group(self, group: int) -> None:
        """The core has given this group up; one that came back before we asked is given up all the same."""
        if report := self._reports.get(group):
            self._give_up(report)
        elif group in self._orders:
            self._given_up.add(group)
            await self._worker(group).cancel(group)

    def _give_up(self, report: GroupReport) -> None:
        self._orders.pop(report.group)
        if self._reports.pop(report.group, None):
            self._journal.closed(report)
        self._recorder.group_given_up(report)

    def _worker(self, group: int) -> Worker:
        return self._parts.workers[group % len(self._parts.workers)]

    async def _train_chunk(self, action: ev.TrainChunk) -> None:
        if action.version > self._batch_begun:
            self._batch_begun = action.version
            self._recorder.batch_started(action.version)
        reports = [self._pooled[group][1] if action.replayed else self._reports[group] for group in action.groups]
        places = [report.place for report in reports if report.place]
        with self._recorder.span("learner", f"chunk of batch {action.version}"):
            report = await self._parts.learner.chunk(action.version, places, action.replayed)
        self._recorder.chunk_trained(report)
        self._queue.put_nowait(ev.ChunkTrained(action.version))

    async def _close_batch(self, action: ev.CloseBatch) -> None:
        with self._recorder.span("learner", f"step {action.version + 1}"):
            report = await self._parts.learner.step(action.version)
        groups = {group: (self._orders.pop(group), self._reports.pop(group)) for group in action.groups}
        replayed = [self._pooled[group] for group in action.replayed]
        if self._core.pools:  # before the core hears of it and retires some of them
            self._pooled |= groups
        ess, kl = report.metrics.get("offpolicy/ess", 1.0), report.metrics.get("offpolicy/kl", 0.0)
        self._queue.put_nowait(ev.BatchTrained(report.version, ess, kl))
        if not self._core.pools:
            await self._release_journal([report for _, report in groups.values()])
        async with self._recording:  # one step's line is written before the next one's
            engines = {name: await engine.stats() for name, engine in self._parts.engines.items()}
            learner = await self._parts.learner.stats()
            self._recorder.step_done(report, list(groups.values()), replayed, engines, learner, self._core)

    async def _release_journal(self, reports: list[GroupReport]) -> None:
        for report in reports:
            self._journal.closed(report)
        for worker, segments in self._journal.releasable():
            await self._parts.workers[worker].release(segments)

    async def _publish(self, action: ev.Publish) -> None:
        with self._recorder.span("learner", f"publish {action.version}"):
            manifest = await self._parts.learner.publish(list(action.leased))
        assert manifest.version == action.version, f"published {manifest.version}, not {action.version}"
        for version in list(self._manifests):
            if version not in action.leased:
                del self._manifests[version]
        self._manifests[action.version] = manifest
        self._recorder.published(manifest)
        self._queue.put_nowait(ev.Published(action.version))

    async def _load_weights(self, action: ev.LoadWeights) -> None:
        with self._recorder.span(action.engine, f"load {action.version}"):
            report = await self._load(action.engine, self._manifests[action.version], pinned=False)
        self._recorder.loaded(action.engine, report)
        self._queue.put_nowait(ev.EngineLoaded(action.engine, action.version))

    async def _load(self, engine: str, manifest: Manifest, pinned: bool) -> LoadReport:
        """A snapshot that does not match its checksums is read once more; the engine keeps its version meanwhile."""
        try:
            return await self._parts.engines[engine].load(manifest, pinned)
        except CorruptData:
            self._recorder.fault("corrupt_weights")
            return await self._parts.engines[engine].load(manifest, pinned)

    async def _evaluate(self, action: ev.Evaluate) -> None:
        engine = next(iter(self._parts.engines))
        with self._recorder.span("evaluation", f"version {action.version}"):
            await self._load(engine, self._manifests[action.version], pinned=True)
            result = await self._evaluator.run(action.version, self._parts.workers, progress=self._moved)
            await self._parts.engines[engine].release_pinned()
        self._recorder.evaluated(result)
        self._queue.put_nowait(ev.EvaluationDone(action.version))


def _closed(report: GroupReport) -> ev.GroupClosed:
    """What the core needs to know of a closed group. One that failed says nothing about its task."""
    judged = report.rewards if report.outcome != "failed" else []
    reward = fmean(judged) if judged else None
    spread = pstdev(judged) if judged else 0.0
    return ev.GroupClosed(report.group, report.outcome, report.oldest, reward, spread)
