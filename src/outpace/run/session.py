"""Run session: one start of a run. Starts the components, drives training, and stops and cleans up everything.

    claim the run directory ─▶ start the components in parallel ─▶ (resume) ─▶ drive ─▶ stop ─▶ summary

Invariants
- Files of an earlier run are not touched until the components are up and the checkpoint has loaded. The only exception
  is journal data that this start cannot use; it can be generated again. Bad input costs nothing else.
- However the run ends, child processes are stopped, the runtime directory is removed and `summary.json` gives the
  reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from outpace.checkpoint import commit
from outpace.checkpoint.commit import CHECKPOINTS
from outpace.config import Config
from outpace.config.load import dump_resolved, dump_settings
from outpace.controller.driver import Driver
from outpace.controller.engine_registry import Components, StartEngine
from outpace.controller.evaluation import Evaluator
from outpace.controller.logprob_check import check_engine_logprobs
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recorder import Recorder
from outpace.controller.scheduler import Scheduler
from outpace.errors import EXIT_SECOND_SIGNAL, BadInput, ComponentFailed, CorruptData, Interrupted, OutpaceError, plural
from outpace.hardware.cores import compute_units
from outpace.hardware.memory import memory_warnings
from outpace.hardware.placement import placement_of
from outpace.models.loading import resolve_model
from outpace.monitoring.callbacks import CallbackRunner, Request
from outpace.monitoring.console import EngineLogWatcher, ProgressConsole
from outpace.monitoring.run_directory import RunLog
from outpace.monitoring.summary import STOPPED, Summary
from outpace.run.plan import RunPlan
from outpace.run.reporting import RunReporter, check_trackers
from outpace.run.resume import (
    CheckpointWriter,
    ResumePoint,
    check_tasks,
    load_resume_point,
    same_group_config,
    save_task_fingerprint,
)
from outpace.run.start import Launcher, launch
from outpace.runtime.torchrun import resume_command
from outpace.tasks.order import TaskOrder
from outpace.types import Version

T = TypeVar("T")

CALLBACKS_S = 600.0
"""Time limit for callbacks to finish after the run has ended."""

ABORT_CALLBACKS_S = 5.0
"""The same after a second signal."""


class RunSession:
    """Runs one plan. Create it on the event loop that `run` will use."""

    def __init__(self, plan: RunPlan, log: RunLog) -> None:
        self._plan = plan
        self._config = plan.config
        self._log = log
        self._driver: Driver | None = None
        self._console: ProgressConsole | None = None
        self._stop_requested = self._interrupted = False
        self._starting: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self.summary: Summary | None = None
        """Set when the run has ended, however it ended."""

    def stop(self, interrupted: bool = False) -> None:
        """Stop after the current step, with a checkpoint. While components are still starting, stop immediately.

        `run` then returns the summary, or raises `Interrupted` if any call passed `interrupted=True`."""
        self._stop_requested = True
        self._interrupted |= interrupted
        if self._starting is not None:
            self._starting.cancel()
            return
        if self._console is not None:
            self._console.status("stopping: writing a checkpoint after the current learner call")
        if self._driver is not None:
            self._driver.stop()

    def _on_request(self, request: Request) -> None:
        """Handle a request from a callback. Runs on the callback's thread."""
        timed = self._config.run.deterministic and not any(callback.blocking for callback in self._plan.callbacks)
        if timed and request != "stop":
            raise BadInput(f"{request}: in a deterministic run, only a callback with blocking = True may call it")
        self._loop.call_soon_threadsafe(self._requested, request)

    def _requested(self, request: Request) -> None:
        if request == "stop":
            self.stop()
        elif self._driver is not None:
            self._driver.request(request)

    async def run(self) -> Summary:
        callbacks = CallbackRunner(
            self._plan.callbacks,
            on_failure=lambda _: self._loop.call_soon_threadsafe(self.stop),
            on_request=self._on_request,
            errors=self._config.run.callback_errors,
        )
        console = ProgressConsole(self._config.run.steps, quiet=self._plan.quiet, title=self._title())
        recorder = Recorder(self._log, console, callbacks, compute_units(self._config), self._config.run.seed)
        console.start()
        self._console = console
        self._reporter = RunReporter(self._config, self._log.dir, console.warning)
        aborted = False
        try:
            return await self._run(console, recorder, callbacks)
        except asyncio.CancelledError:
            aborted = True
            raise
        finally:  # the summary for the trackers is final now
            await self._finish_reporter(aborted)

    async def _run(self, console: ProgressConsole, recorder: Recorder, callbacks: CallbackRunner) -> Summary:
        try:
            reason = await self._drive(recorder)
            callbacks.check()
        except BaseException as error:
            stopped = isinstance(error, Interrupted) and not self._interrupted
            code, reason = (0, STOPPED) if stopped else (_exit_code(error), _reason(error))
            self.summary = recorder.build_summary(code, reason)
            if isinstance(error, ComponentFailed) and (hint := await asyncio.to_thread(self._resume_hint)):
                console.status(hint)
            console.close()
            aborted = isinstance(error, asyncio.CancelledError)
            await self._finish_run(recorder, self.summary, ABORT_CALLBACKS_S if aborted else CALLBACKS_S)
            if stopped:
                return self.summary
            raise
        code = Interrupted.exit_code if reason == STOPPED and self._interrupted else 0
        self.summary = ended = recorder.build_summary(code, reason)
        try:
            await self._finish_run(recorder, ended, CALLBACKS_S)
            callbacks.check()
        except BaseException as error:
            console.close()
            self.summary = msgspec.structs.replace(ended, exit=_exit_code(error), reason=_reason(error))
            await asyncio.to_thread(self._write_summary, recorder, self.summary)
            raise
        views = recorder.last_evaluation.views if recorder.last_evaluation else []
        console.finish(ended, self._log.dir, views)
        if code:
            hint = await asyncio.to_thread(self._resume_hint, ended.steps)
            raise Interrupted(f"stopped after step {ended.steps}; {hint}")
        return ended

    def _resume_hint(self, steps: int | None = None) -> str:
        """Return how to resume the run, "" if it has no checkpoint. `steps`: number of steps trained, if known."""
        how = "train(resume=True)" if self._plan.objects else resume_command(self._log.dir)
        kept = max(commit.list_steps(self._log.dir / CHECKPOINTS), default=0)
        again = "" if kept == steps else f", from step {kept}"
        if again and self._config.run.deterministic:
            again += " (a deterministic run repeats the later steps exactly)"
        return f"resume with: {how}{again}" if kept or steps is not None else ""

    async def _finish_run(self, recorder: Recorder, ended: Summary, callbacks_s: float) -> None:
        """Write the summary, call `on_run_end` and wait up to `callbacks_s` for the callbacks."""
        await asyncio.to_thread(self._write_summary, recorder, ended)
        recorder.callbacks.post("on_run_end", ended)
        with contextlib.suppress(ComponentFailed):  # a failed callback has ended the run, or is checked next
            await recorder.callbacks.close(callbacks_s)

    async def _finish_reporter(self, aborted: bool) -> None:
        try:
            await self._reporter.finish(self._config.report.finish_s, aborted)
        except asyncio.CancelledError:  # a second signal ends only the reporter: the run has already ended
            if self._console is not None:
                self._console.warning("trackers: not everything was sent")

    def _write_summary(self, recorder: Recorder, ended: Summary) -> None:
        if not self._log.began:
            return
        try:
            self._log.summary(ended)
            recorder.timeline.write(self._log.dir / "timeline.json")
        except OSError as error:  # a full disk must not mask why the run ended
            recorder.console.status(f"cannot write to {self._log.dir}: {error.strerror}")

    def _title(self) -> str:
        tasks = self._config.tasks
        return f"outpace · {self._config.model.path} · {tasks.name or tasks.path or tasks.producer or 'tasks'}"

    async def _drive(self, recorder: Recorder) -> str:
        count, streamed = self._plan.tasks.count, self._plan.streamed
        settings = scheduler_settings(self._config, count, bool(self._plan.eval_counts), streamed)
        settings = replace(settings, confirm=recorder.callbacks.blocking)
        order = TaskOrder(count, self._config.run.seed, self._config.tasks.shuffle and not streamed)
        await self._unless_stopped(check_trackers(self._config, self._log.dir))
        resume_point = await asyncio.to_thread(self._resume_point, settings, order)
        for line in await asyncio.to_thread(self._memory_warnings):
            recorder.console.status(line)
        recorder.console.status(self._start_message(resume_point))
        for warning in filter(None, (self._plan.eval_warning, self._plan.producer_warning)):
            recorder.console.status(warning)
        async with launch(self._plan, self._log.dir, recorder.span) as launcher:
            components = await self._unless_stopped(self._start_components(launcher, recorder.console.status))
            await self._restore(components, resume_point)
            await self._check_logprobs(components, resume_point.version, recorder.console.status)
            scheduler = Scheduler(settings, order, resume_point.state, resume_point.recovered, resume_point.evaluated)
            await asyncio.to_thread(self._open_log, recorder, resume_point)
            await self._reporter.start()
            self._driver = self._make_driver(
                scheduler, components, recorder, resume_point, launcher.engine_starter(components)
            )
            if self._stop_requested:
                self._driver.stop()
            await recorder.training_begins(components.engines, components.learner)
            recorder.callbacks.post("on_run_start", self._info(resume_point.version))
            return await self._driver.run({name: (await e.stats()).version for name, e in components.engines.items()})

    def _memory_warnings(self) -> list[str]:
        return memory_warnings(self._config, placement_of(self._config), resolve_model(self._config.model.path))

    def _info(self, version: Version) -> dict[str, Any]:
        return {
            "dir": str(self._log.dir),
            "steps": self._config.run.steps,
            "version": version,
            "config": self._config,
        }

    def _start_message(self, resume_point: ResumePoint) -> str:
        if not self._plan.resumes:
            tasks = f"{self._plan.tasks.count:,}"
            if self._plan.streamed:
                tasks = "from a stream" if self._plan.stream is not None else "from a producer"
            return f"tasks: {tasks}, held out: {self._plan.heldout:,}; starting engines, learner and workers"
        finished, unfinished = len(resume_point.recovered.finished), len(resume_point.recovered.recorded or {})
        message = f"resuming from step {resume_point.version}"
        if not resume_point.usable:
            return f"{message}; tasks or settings that shape groups have changed, so journaled groups are not used"
        return f"{message}; recovered {plural(finished, 'finished group')} and turns of {unfinished} unfinished ones"

    # ------------------------------------------------------------------------------------------------ components

    async def _unless_stopped(self, start: Coroutine[Any, Any, T]) -> T:
        """Await one stage of the start. It can take minutes, so `stop` cancels it."""
        stopped = Interrupted("stopped while components were starting; nothing was trained")
        if self._stop_requested:
            start.close()
            raise stopped
        starting = asyncio.create_task(start)
        self._starting = starting
        try:
            return await starting
        except asyncio.CancelledError:
            if self._stop_requested:
                raise stopped from None
            raise
        finally:
            self._starting = None

    async def _start_components(self, launcher: Launcher, report: Callable[[str], None]) -> Components:
        logs = EngineLogWatcher(self._log.dir / "logs", launcher.specs.sockets, report)
        following = asyncio.create_task(logs.follow())
        try:
            components = await launcher.start()
        finally:
            following.cancel()
        await logs.finish()
        return components

    async def _restore(self, components: Components, resume_point: ResumePoint) -> None:
        for name, worker in components.workers.items():
            if name in resume_point.rng:
                await worker.set_rng(resume_point.rng[name].encode())
        if resume_point.checkpoint is None:
            return
        try:
            version = await components.learner.load(str(resume_point.checkpoint))
        except CorruptData as error:  # its checksums matched, so it was written under another config
            raise BadInput(f"--resume: {resume_point.checkpoint} does not fit this config: {error}") from None
        assert version == resume_point.version, (
            f"learner restored version {version}, scheduler is at {resume_point.version}"
        )

    async def _check_logprobs(self, components: Components, version: Version, report: Callable[[str], None]) -> None:
        """Compare engine and learner logprobs. Skips embedded engines, which check their decoder when they load it."""
        if self._config.engine.kind == "embedded":
            return
        report("comparing engine and learner logprobs")
        worker = next(iter(components.workers.values()))
        await check_engine_logprobs(components.engines, components.learner, worker, self._config, version, report)

    # ------------------------------------------------------------------------------------------------ controller

    def _resume_point(self, settings: SchedulerSettings, order: TaskOrder) -> ResumePoint:
        if not self._plan.resumes:
            return ResumePoint()
        run = self._log.dir
        same_tasks = check_tasks(run, self._plan.tasks, self._config.tasks.changed == "accept")
        usable = same_tasks and same_group_config(run, self._config)
        return load_resume_point(run, self._plan.checkpoint, settings, order, self._plan.tokenizer, usable)

    def _open_log(self, recorder: Recorder, resume_point: ResumePoint) -> None:
        """Write this start's files and roll back to the checkpoint. Nothing may be rejected after this."""
        self._log.start(dump_settings(self._config, self._plan.objects), dump_resolved(self._config))
        save_task_fingerprint(self._log.dir, self._plan.tasks)
        if self._plan.saved is not None:
            self._plan.saved.write(self._log.dir)
        if not self._plan.resumes:
            return
        commit.remove_newer(self._log.dir / CHECKPOINTS, resume_point.version)
        kept = self._log.roll_back(resume_point.version, resume_point.accounted)
        recorder.resume(kept, [each.report for each in resume_point.recovered.finished])

    def _make_driver(
        self,
        scheduler: Scheduler,
        components: Components,
        recorder: Recorder,
        resume_point: ResumePoint,
        join: StartEngine | None,
    ) -> Driver:
        evaluator = Evaluator(self._plan.eval_counts, self._config.eval)
        save = CheckpointWriter(self._log, components.learner, self._config.checkpoint, self._plan.tokenizer).save
        return Driver(
            scheduler,
            components,
            recorder,
            evaluator,
            save,
            self._config,
            resume_point.recovered,
            join,
            self._plan.stream,
        )


def scheduler_settings(config: Config, tasks: int, evaluates: bool, streamed: bool = False) -> SchedulerSettings:
    return SchedulerSettings.of(
        config,
        group_size=config.rollout.group_size,
        max_running=_resolved(config.pacing.max_running),
        tasks=tasks,
        streamed=streamed,
        epochs=config.run.epochs,
        eval_every=config.eval.every,
        eval_enabled=evaluates,
        eval_start=config.eval.start,
        eval_end=config.eval.end,
        eval_pinned=config.engine.kind == "embedded" or config.lora.rank > 0,
        governor=config.governor if config.governor.enabled else None,
        difficulty=config.difficulty if config.difficulty.is_on else None,
        replay=config.replay if config.replay.fraction > 0 else None,
        reroll=config.reroll if config.reroll.max_times > 0 else None,
    )


def _resolved(value: T | None) -> T:
    assert value is not None, "the config must be resolved"
    return value


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "aborted by a second signal"
    return f"{type(error).__name__}: {error}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, OutpaceError):
        return error.exit_code
    return EXIT_SECOND_SIGNAL if isinstance(error, asyncio.CancelledError) else ComponentFailed.exit_code
