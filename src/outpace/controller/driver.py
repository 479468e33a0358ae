"""Driver: the controller's event loop over real components. Takes events from one queue and runs long actions as tasks.

                         ┌───────────────────────── events ─────────────────────────┐
                         ▼                                                           │
    queue ─▶ scheduler.handle(event) ─▶ actions ─▶ one task each ─▶ worker.run ──────┤ GroupClosed
                                                            ─▶ learner.chunk, .step ─┤ ChunkTrained, BatchTrained
                                                            ─▶ learner.publish ──────┤ Published
                                                            ─▶ engine.load ──────────┤ EngineLoaded
                                                            ─▶ evaluate ─────────────┤ EvaluationDone
                                                            ─▶ learner.save, commit ─┘
    `GroupTracker` (groups), `Training` (learner, records, checkpoints) and `PolicyVersions` (weights, evaluations)
    carry out the actions. `ComponentSupervisor` restarts dead engines and workers (EngineLost, EngineJoined),
    `EngineRegistry` keeps the workers' view of the fleet current, `FleetMembership` adds and removes engines,
    `Watchdog` detects stalls, and `TaskFeed` takes tasks from a stream or a producer.

The loop waits only for the queue, which the tasks above, the supervisor and signals fill. If nothing arrives for
`stall_s`, the run ends as stalled, and the error says what each component waits for.

Invariants
- No tensors and no user code in this process: the controller holds metadata only.
- An exception in a task ends the run with the failing component's own traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from outpace.config import Config
from outpace.controller import events as ev
from outpace.controller.engine_registry import (
    PRODUCER,
    Components,
    EngineRegistry,
    FleetMembership,
    PostEvent,
    StartEngine,
)
from outpace.controller.evaluation import Evaluator
from outpace.controller.failure_budget import UserCodeFailed
from outpace.controller.groups import GroupTracker
from outpace.controller.policy_versions import PolicyVersions
from outpace.controller.recorder import Recorder
from outpace.controller.recovery import NO_RECOVERED_WORK, RecoveredWork
from outpace.controller.scheduler import Scheduler
from outpace.controller.supervisor import AwakeClock, ComponentSupervisor, Watchdog
from outpace.controller.task_feed import ProducerRounds, StreamRounds, TaskFeed
from outpace.controller.training import SaveCheckpoint, Training
from outpace.errors import ComponentFailed, ComponentLost, Stalled
from outpace.monitoring.rollout_files import RolloutWriter
from outpace.protocols import TaskStream
from outpace.runtime import diagnostics
from outpace.tasks.stream import FILE as STREAM_FILE
from outpace.tasks.stream import StreamedTasks
from outpace.types import Version

DEATH_NOTICE_S = 2.0
"""How long to wait for the cause of a component's death before reporting "connection closed"."""

WATCH_S = 1.0
"""Maximum interval between watchdog ticks."""


class Driver:
    """Runs the scheduler against real components until it finishes."""

    def __init__(
        self,
        scheduler: Scheduler,
        components: Components,
        recorder: Recorder,
        evaluator: Evaluator,
        save: SaveCheckpoint,
        config: Config,
        recovered: RecoveredWork = NO_RECOVERED_WORK,
        start_engine: StartEngine | None = None,
        stream: TaskStream | None = None,
    ) -> None:
        """`recovered` is the work recovered from the journal, as given to the scheduler. `start_engine` starts further
        engines; None: the fleet is fixed. `stream`, or the producer in `components`, supplies tasks during the
        run."""
        self._scheduler = scheduler
        self._components = components
        self._recorder = recorder
        self._queue: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        post = self._queue.put_nowait
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited_tasks: set[asyncio.Task[None]] = set()  # must complete before the run ends
        self._watchdog = Watchdog(config.run.stall_s)
        sockets = {name: components.sockets.get(name, "") for name in components.engines}
        self._registry = EngineRegistry(sockets, components.samplers)
        self._supervisor = ComponentSupervisor(
            components.runtime,
            components.names,
            components.engines,
            config.supervise,
            post,
            self._notice,
            self._registry.notify_workers,
            all_engines=config.run.deterministic,
        )
        self._groups = GroupTracker(
            components, self._supervisor, recorder, config, recovered, scheduler.version > 0, post
        )
        self._training = Training(scheduler, components, self._supervisor, recorder, self._groups, save, post)
        self._policy_versions = PolicyVersions(
            components,
            self._supervisor,
            self._registry,
            recorder,
            evaluator,
            self._groups.run_order,
            self._watchdog.record_progress,
            post,
            scheduler.settings.eval_pinned,
            RolloutWriter(recorder.log.dir, config.run.rollouts_mb * 10**6),
        )
        self._membership = (
            FleetMembership(
                recorder.log.dir,
                components,
                self._supervisor,
                self._registry,
                start_engine,
                post,
                recorder.console.status,
            )
            if start_engine
            else None
        )
        self._feed = self._task_feed(stream, config, post)
        self._finish: str | None = None
        self._ended_by: UserCodeFailed | None = None

    def _task_feed(self, stream: TaskStream | None, config: Config, post: PostEvent) -> TaskFeed | None:
        producer = self._components.producer
        if stream is None and producer is None:
            return None
        tasks = StreamedTasks(self._recorder.log.dir / "journal" / STREAM_FILE)
        if stream is not None:
            return TaskFeed(StreamRounds(stream, tasks, config.pacing.groups_per_step), tasks, self._scheduler, post)
        assert producer is not None

        async def produce(number: int, step: Version) -> None:
            self._recorder.produced(await self._supervisor.call(PRODUCER, lambda: producer.produce(number, step)))

        return TaskFeed(ProducerRounds(config.producer, tasks, produce), tasks, self._scheduler, post)

    async def run(self, served: dict[str, Version]) -> str:
        """Drive the scheduler from start to finish; return the reason it finished."""
        for task in (
            self._supervisor.watch(),
            self._supervisor.probe(),
            self._watch(),
            self._registry.keep_workers_updated(),
        ):
            self._spawn(task)
        if self._membership is not None:
            self._spawn(self._membership.watch())
        if self._feed is not None:
            self._spawn(self._feed.run())
        try:
            self._handle(ev.RunStarted(served))
            diagnostics.crash_point("controller.started")
            while self._finish is None:
                self._handle(await self._next())
            await self._complete()
        finally:
            await self._cancel_tasks()
        if self._ended_by is not None:
            raise self._ended_by
        return self._finish

    def stop(self) -> None:
        """Request a stop after the current step."""
        self._queue.put_nowait(ev.StopRequested())

    def request(self, request: Literal["save", "evaluate"]) -> None:
        """Request a checkpoint or an evaluation after the current step."""
        self._queue.put_nowait(ev.Requested("checkpoint" if request == "save" else "evaluation"))

    # ------------------------------------------------------------------------------------------------ the loop

    def _handle(self, event: ev.Event) -> None:
        self._registry.record(event, self._scheduler.version)
        for action in self._scheduler.handle(event):
            self._carry_out(action)
        if isinstance(event, ev.EvaluationDone):
            self._training.evaluated()
        if self._feed is not None:
            self._feed.wake()

    async def _next(self) -> ev.Event:
        item = await self._queue.get()
        self._watchdog.record_progress()
        if isinstance(item, UserCodeFailed) and self._scheduler.version > 0:
            self._ended_by = self._ended_by or item
            return ev.StopRequested()  # write a checkpoint first; the error is raised after it
        if isinstance(item, BaseException):
            raise await self._find_cause(item)
        return item

    async def _watch(self) -> None:
        """Tick the watchdog until the run ends."""
        interval_s = min(WATCH_S, self._watchdog.patience_s / 20)
        awake = AwakeClock(asyncio.get_running_loop().time, interval_s)
        while True:
            await asyncio.sleep(interval_s)
            verdict = self._watchdog.tick(awake.lap())
            if verdict == "fine":
                continue
            waits = [self._scheduler.waiting_reason(), "" if self._feed is None else self._feed.waiting_reason]
            reason = f"no progress for {self._watchdog.stalled_s:.1f} s: {'; '.join(filter(None, waits))}"
            self._recorder.console.status(reason)
            path = await asyncio.to_thread(self._recorder.log.stall, reason, await self._components.runtime.dump())
            if verdict == "end":
                raise Stalled(f"{reason}; stack traces of all components are in {path}")

    async def _find_cause(self, error: BaseException) -> BaseException:
        """Return the most specific error for a lost component: its connections close a moment before the cause of its
        death is reported."""
        if not isinstance(error, ComponentLost):
            return error
        try:
            async with asyncio.timeout(DEATH_NOTICE_S):
                while not isinstance(item := await self._queue.get(), ComponentFailed) or isinstance(
                    item, ComponentLost
                ):
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
                self._spawn(self._groups.run(action))
            case ev.Cancel():
                self._spawn(self._groups.cancel(action.group))
            case ev.TrainChunk():
                self._spawn(self._training.chunk(action))
            case ev.CloseBatch():
                self._awaited_tasks.add(self._spawn(self._training.step(action)))
            case ev.Finalize():
                self._groups.add_finalized(action)
            case ev.WriteRecord():
                self._awaited_tasks.add(self._spawn(self._training.record(action, self._groups.take_finalized())))
            case ev.Retire():
                self._groups.retire(action.groups)
            case ev.Publish():
                self._spawn(self._policy_versions.publish(action))
            case ev.LoadWeights():
                self._spawn(self._policy_versions.load(action))
            case ev.Evaluate():
                self._recorder.callbacks.post("on_evaluation_start", action.version)
                self._spawn(self._policy_versions.evaluate(action))
            case ev.Checkpoint():
                self._awaited_tasks.add(
                    self._spawn(self._training.checkpoint(action, self._groups.journal.start_checkpoint()))
                )
            case ev.LagChanged():
                self._recorder.lag_changed(action.by)
            case ev.EpochStarted():
                self._recorder.callbacks.post("on_epoch_start", action.epoch)
            case ev.EpochEnded():
                self._recorder.callbacks.post("on_epoch_end", action.epoch)
            case ev.PolicyUpdated():
                self._recorder.callbacks.post("on_policy_updated", action.version)
                self._spawn(self._training.confirm("policy", action.version))
            case ev.Finish():
                self._finish = action.reason
                self._training.leave()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._awaited_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.put_nowait(error)

    async def _complete(self) -> None:
        """Wait for step records and checkpoints, then cancel all other tasks."""
        diagnostics.crash_point("controller.finishing")
        while self._awaited_tasks:  # the watchdog is still running
            done, _ = await asyncio.wait(self._awaited_tasks, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                self._watchdog.record_progress()
            await self._raise_failures()
        if self._training.checkpoint_error is not None:  # no later checkpoint will replace it
            raise self._training.checkpoint_error
        await self._cancel_tasks()
        await self._raise_failures()

    async def _raise_failures(self) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, BaseException) and not (self._ended_by and isinstance(item, UserCodeFailed)):
                raise await self._find_cause(item)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
