"""One start of a run: brings the parts to life, drives them, and leaves nothing behind but the run directory.

    claim the run directory ─▶ start engine, learner and workers side by side ─▶ (resume) ─▶ drive ─▶ stop ─▶ summary

Invariants
- Nothing of an earlier run is touched before the parts are up and the checkpoint fits, but for what this start cannot
  use of its journal, which can be made again: bad input costs nothing else.
- However the run ends, children are stopped, scratch memory is removed and `summary.json` says how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from outpace.checkpoint import commit
from outpace.checkpoint.retention import CHECKPOINTS
from outpace.config import Config
from outpace.config.algorithm import DifficultyConfig, GovernorConfig, ReplayConfig
from outpace.config.loading import dump_toml
from outpace.errors import EXIT_LEFT_AT_ONCE, BadInput, CorruptData, Interrupted, OutpaceError, PartFailed
from outpace.memory import memory_warnings
from outpace.models.loading import resolve_model
from outpace.observe import startup
from outpace.observe.callbacks import Callback, CallbackRunner
from outpace.observe.console import ProgressConsole
from outpace.observe.runlog import RunLog
from outpace.observe.summary import STOPPED, Summary
from outpace.parts import PartSpecs, start_engines
from outpace.pipeline.agreement import check_engines
from outpace.pipeline.budget import Limits
from outpace.pipeline.caretaker import CareSettings
from outpace.pipeline.core import Core
from outpace.pipeline.difficulty import DifficultySettings
from outpace.pipeline.driver import Driver, DriverSettings
from outpace.pipeline.enrolment import Recruit
from outpace.pipeline.evaluation import Evaluator
from outpace.pipeline.governor import GovernorSettings
from outpace.pipeline.making import MakingSettings
from outpace.pipeline.pacing import CoreSettings
from outpace.pipeline.recorder import Recorder
from outpace.pipeline.replay import ReplaySettings
from outpace.pipeline.staff import Parts
from outpace.pipeline.supervisor import SuperviseSettings
from outpace.placement import placement_of
from outpace.protocols import Engine, Learner, Worker
from outpace.resources import countable_cores
from outpace.resuming import Past, check_tasks, note_tasks, past_of, same_making
from outpace.runtime.inline import InlineRuntime
from outpace.runtime.local import LocalRuntime
from outpace.runtime.scratch import Scratch
from outpace.runtime.spec import Runtime
from outpace.runtime.together import together
from outpace.saved_objects import SavedObjects
from outpace.saving import Checkpoints
from outpace.tasks.fingerprint import Fingerprint
from outpace.tasks.order import Order
from outpace.types import Version
from outpace.wording import plural

T = TypeVar("T")

CALLBACKS_S = 600.0
LEAVE_AT_ONCE_S = 5.0
"""How long callbacks may take to finish when the run has ended, and after a second signal."""


@dataclass(frozen=True)
class Plan:
    """A checked, resolved run, ready to start."""

    config: Config
    tasks: Fingerprint  # what one epoch is made of
    tokenizer: str  # its digest
    heldout: int
    code: bytes = b""  # user objects for the workers
    learner_code: bytes = b""  # and for the learner
    objects: tuple[str, ...] = ()  # what they are
    saved: SavedObjects | None = None  # how `outpace eval` finds them again
    callbacks: list[Callback] = field(default_factory=list)
    resumes: bool = False  # a run that was started before
    checkpoint: Path | None = None  # its newest; None: it has none yet
    quiet: bool = False

    @property
    def eval_count(self) -> int:
        return min(self.config.eval.count, self.heldout)

    @property
    def eval_warning(self) -> str:
        """Said at the start where fewer tasks are held out than an evaluation is to take; empty otherwise."""
        if not 0 < self.heldout < self.config.eval.count:
            return ""
        return (
            f"eval.count is {self.config.eval.count:,}, but only {plural(self.heldout, 'task')} "
            f"{'is' if self.heldout == 1 else 'are'} held out: every evaluation takes {self.heldout:,}"
        )


class Session:
    def __init__(self, plan: Plan, log: RunLog) -> None:
        self._plan = plan
        self._config = plan.config
        self._log = log
        self._driver: Driver | None = None
        self._console: ProgressConsole | None = None
        self._stop_wanted = self._interrupted = False
        self._starting: asyncio.Task[Parts] | None = None
        self._loop = asyncio.get_running_loop()
        self.summary: Summary | None = None
        """Set when the run has ended, in whatever way."""

    def stop(self, interrupted: bool = False) -> None:
        """Checkpoint and leave, as soon as the step under way is done; where none was begun, leave now. `run` returns
        the summary, or raises `Interrupted` if any of the calls said so."""
        self._stop_wanted = True
        self._interrupted |= interrupted
        if self._starting is not None:
            self._starting.cancel()
            return
        if self._console is not None:
            self._console.status("stopping, with a checkpoint, when the call that the learner is in has ended")
        if self._driver is not None:
            self._driver.stop()

    async def run(self) -> Summary:
        callbacks = CallbackRunner(
            self._plan.callbacks,
            on_failure=lambda _: self._loop.call_soon_threadsafe(self.stop),
            on_stop=lambda: self._loop.call_soon_threadsafe(self.stop),
            errors=self._config.run.callback_errors,
        )
        console = ProgressConsole(self._config.run.steps, quiet=self._plan.quiet, title=self._title())
        recorder = Recorder(self._log, console, callbacks, countable_cores(self._config), self._config.run.seed)
        console.start()
        self._console = console
        try:
            reason = await self._drive(recorder)
            callbacks.check()
        except BaseException as error:
            stopped = isinstance(error, Interrupted) and not self._interrupted
            code, reason = (0, STOPPED) if stopped else (_exit_code(error), _reason(error))
            self.summary = recorder.build_summary(code, reason)
            console.close()
            at_once = isinstance(error, asyncio.CancelledError)
            await self._leave(recorder, self.summary, LEAVE_AT_ONCE_S if at_once else CALLBACKS_S)
            if stopped:
                return self.summary
            raise
        code = Interrupted.exit_code if reason == STOPPED and self._interrupted else 0
        self.summary = ended = recorder.build_summary(code, reason)
        try:
            await self._leave(recorder, ended, CALLBACKS_S)
            callbacks.check()
        except BaseException as error:
            console.close()
            self.summary = msgspec.structs.replace(ended, exit=_exit_code(error), reason=_reason(error))
            await asyncio.to_thread(self._write_summary, recorder, self.summary)
            raise
        views = recorder.last_evaluation.views if recorder.last_evaluation else []
        console.finish(ended, self._log.dir, views)
        if code:
            raise Interrupted(await asyncio.to_thread(self._farewell, ended.steps))
        return ended

    def _farewell(self, steps: int) -> str:
        how = "train(resume=True)" if self._plan.objects else f"outpace train --resume {self._log.dir}"
        kept = max(commit.steps(self._log.dir / CHECKPOINTS), default=0)
        again = "" if kept == steps else f", from step {kept}"
        if again and self._config.run.deterministic:
            again += ", since a deterministic run repeats the rest exactly"
        return f"stopped after step {steps}; go on with: {how}{again}"

    async def _leave(self, recorder: Recorder, ended: Summary, callbacks_s: float) -> None:
        """Whatever the end was: say so in the run directory and to the callbacks, which may take `callbacks_s`."""
        await asyncio.to_thread(self._write_summary, recorder, ended)
        recorder.callbacks.post("on_run_end", ended)
        with contextlib.suppress(PartFailed):  # a callback's failure has ended the run already, or is checked next
            await recorder.callbacks.close(callbacks_s)

    def _write_summary(self, recorder: Recorder, ended: Summary) -> None:
        if not self._log.began:
            return
        try:
            self._log.summary(ended)
            recorder.timeline.write(self._log.dir / "timeline.json")
        except OSError as error:  # a full disk must not hide why the run ended
            recorder.console.status(f"cannot write to {self._log.dir}: {error.strerror}")

    def _title(self) -> str:
        return f"outpace · {self._config.model.path} · {self._config.tasks.name or self._config.tasks.path or 'tasks'}"

    async def _drive(self, recorder: Recorder) -> str:
        settings = core_settings(self._config, self._plan.tasks.count, self._plan.eval_count > 0)
        order = Order(self._plan.tasks.count, self._config.run.seed, self._config.tasks.shuffle)
        past = await asyncio.to_thread(self._past, settings, order)
        warnings = await asyncio.to_thread(self._memory_warnings)
        scratch = await asyncio.to_thread(Scratch)
        runtime = self._runtime(scratch)
        try:
            for line in warnings:
                recorder.console.status(line)
            recorder.console.status(self._opening(past))
            if warning := self._plan.eval_warning:
                recorder.console.status(warning)
            specs = PartSpecs(self._config, self._log.dir, scratch.path, self._plan.code, self._plan.learner_code)
            parts = await self._started(runtime, specs, recorder.console.status)
            await self._restore(parts, past)
            await self._agree(parts, past.version, recorder.console.status)
            core = Core(settings, order, past.state, past.survivors, past.evaluated)
            await asyncio.to_thread(self._open_log, recorder, past)
            self._driver = self._make_driver(core, parts, recorder, past, self._recruit(parts, specs))
            if self._stop_wanted:
                self._driver.stop()
            await recorder.training_begins(parts.engines, parts.learner)
            recorder.callbacks.post("on_run_start", self._info(past.version))
            return await self._driver.run({name: (await e.stats()).version for name, e in parts.engines.items()})
        finally:
            await runtime.stop()
            await asyncio.to_thread(scratch.remove)

    def _memory_warnings(self) -> list[str]:
        return memory_warnings(self._config, placement_of(self._config), resolve_model(self._config.model.path))

    def _info(self, version: Version) -> dict[str, Any]:
        return {
            "dir": str(self._log.dir),
            "steps": self._config.run.steps,
            "version": version,
            "config": self._config,
        }

    def _opening(self, past: Past) -> str:
        if not self._plan.resumes:
            return (
                f"tasks: {self._plan.tasks.count:,}, held out: {self._plan.heldout:,}; "
                "starting engine, learner and workers"
            )
        kept, under_way = len(past.survivors.finished), len(past.survivors.recorded or {})
        opening = f"resuming from step {past.version}"
        if not past.usable:
            return f"{opening}; groups are made in another way than before, so those of the journal are not used"
        return f"{opening}; the journal has {plural(kept, 'finished group')} and answers of {under_way} unfinished ones"

    # ------------------------------------------------------------------------------------------------ the parts

    def _runtime(self, scratch: Scratch) -> Runtime:
        if self._config.run.runtime == "inline":
            return InlineRuntime()
        return LocalRuntime(self._log.dir / "logs", append=self._plan.resumes, guardian=scratch.guardian)

    async def _started(self, runtime: Runtime, specs: PartSpecs, say: Callable[[str], None]) -> Parts:
        """Servers may take minutes: whoever does not want to wait for them is not kept."""
        stopped = Interrupted("stopped while the parts were starting; nothing was trained")
        if self._stop_wanted:
            raise stopped
        self._starting = asyncio.create_task(self._start_parts(runtime, specs, say))
        try:
            return await self._starting
        except asyncio.CancelledError:
            if self._stop_wanted:
                raise stopped from None
            raise
        finally:
            self._starting = None

    async def _start_parts(self, runtime: Runtime, specs: PartSpecs, say: Callable[[str], None]) -> Parts:
        engines = specs.engines()
        logs = startup.EngineLogs(self._log.dir / "logs", specs.sockets, say)
        telling = asyncio.create_task(logs.follow())
        try:
            learner, others, workers = await together(
                runtime.start(Learner, *specs.learner()),
                start_engines(runtime, engines),
                together(*(runtime.start(Worker, *worker) for worker in specs.workers())),
            )
        finally:
            telling.cancel()
        await logs.finish()
        return Parts(
            learner=learner,
            engines=dict(zip(specs.sockets, others, strict=False)),
            workers={f"worker-{index}": worker for index, worker in enumerate(workers)},
            runtime=runtime,
            sockets=dict(specs.sockets),
            urls=dict(zip(specs.sockets, self._config.engine.urls, strict=False)),
        )

    def _recruit(self, parts: Parts, specs: PartSpecs) -> Recruit | None:
        """Engines may join what is not in lockstep and has processes of its own."""
        if self._config.run.deterministic or self._config.run.runtime == "inline":
            return None
        runtime, starting = parts.runtime, set[str]()

        async def recruit(url: str) -> tuple[str, str, Engine]:
            if url and self._config.engine.kind == "embedded":
                raise BadInput("the engines of this run are embedded; a server can join one of vllm or sglang")
            spec, environment = specs.joining_engine(url, starting | parts.engines.keys())
            starting.add(spec.name)
            try:
                return spec.name, specs.sockets[spec.name], await runtime.start(Engine, spec, environment)
            finally:
                starting.discard(spec.name)

        return recruit

    async def _restore(self, parts: Parts, past: Past) -> None:
        for name, worker in parts.workers.items():
            if name in past.rng:
                await worker.set_rng(past.rng[name].encode())
        if past.checkpoint is None:
            return
        try:
            version = await parts.learner.load(str(past.checkpoint))
        except CorruptData as error:  # its checksums were right: it is another config's
            raise BadInput(f"--resume: {past.checkpoint} does not fit this config: {error}") from None
        assert version == past.version, f"the learner is at version {version}, the controller at {past.version}"

    async def _agree(self, parts: Parts, version: Version, say: Callable[[str], None]) -> None:
        """The embedded engine has held its decoder against the model itself; what a server does is to be seen."""
        if self._config.engine.kind == "embedded":
            return
        say("engines and learner are held against each other")
        await check_engines(
            parts.engines, parts.learner, next(iter(parts.workers.values())), self._config, version, say
        )

    # ------------------------------------------------------------------------------------------------ the controller

    def _past(self, settings: CoreSettings, order: Order) -> Past:
        if not self._plan.resumes:
            return Past()
        run = self._log.dir
        same_tasks = check_tasks(run, self._plan.tasks, self._config.tasks.changed == "accept")
        usable = same_tasks and same_making(run, dump_toml(self._config, self._plan.objects))
        return past_of(run, self._plan.checkpoint, settings, order, self._plan.tokenizer, usable)

    def _open_log(self, recorder: Recorder, past: Past) -> None:
        """Nothing can be refused any more: from here on the directory is this run's."""
        self._log.start(dump_toml(self._config, self._plan.objects))
        note_tasks(self._log.dir, self._plan.tasks)
        if self._plan.saved is not None:
            self._plan.saved.write(self._log.dir)
        if not self._plan.resumes:
            return
        commit.go_back(self._log.dir / CHECKPOINTS, past.version)
        kept = self._log.roll_back(past.version, past.accounted)
        recorder.resume(kept, [each.report for each in past.survivors.finished])

    def _make_driver(self, core: Core, parts: Parts, recorder: Recorder, past: Past, recruit: Recruit | None) -> Driver:
        supervise = self._config.supervise
        making = MakingSettings(
            group_size=self._config.rollout.group_size,
            show_rollouts=self._config.run.show_rollouts,
            limits=Limits(
                failed=self._config.pacing.max_failed,
                filtered=self._config.pacing.max_filtered,
                notice_every=4 * self._config.pacing.groups_per_step,
                resumed=past.version > 0,
            ),
        )
        settings = DriverSettings(
            stall_s=self._config.run.stall_s,
            making=making,
            care=CareSettings(
                SuperviseSettings(supervise.restarts, supervise.window_s),
                supervise.probe_s,
                supervise.silent_s,
                all_engines=self._config.run.deterministic,
            ),
        )
        evaluator = Evaluator(self._plan.eval_count, self._config.eval.max_running)
        save = Checkpoints(self._log, parts.learner, self._config.checkpoint, self._plan.tokenizer).save
        return Driver(core, parts, recorder, evaluator, save, settings, past.survivors, recruit)


def core_settings(config: Config, tasks: int, evaluates: bool) -> CoreSettings:
    return CoreSettings(
        groups_per_step=config.pacing.groups_per_step,
        group_size=config.rollout.group_size,
        max_lag=config.pacing.max_lag,
        depth=config.pacing.depth,
        chunk_groups=config.pacing.chunk_groups,
        max_running=_resolved(config.pacing.max_running),
        on_stale=config.pacing.on_stale,
        warmup_steps=config.pacing.warmup_steps,
        publish_every=config.weights.every,
        update=config.weights.update,
        deterministic=config.run.deterministic,
        steps=config.run.steps,
        epochs=config.run.epochs,
        tasks=tasks,
        eval_every=config.eval.every,
        eval_enabled=evaluates,
        eval_pinned=config.engine.kind == "embedded" or config.lora.rank > 0,
        checkpoint_every=config.checkpoint.every,
        governor=_governor(config.governor),
        difficulty=_difficulty(config.difficulty),
        replay=_replay(config.replay),
    )


def _governor(config: GovernorConfig) -> GovernorSettings | None:
    if not config.enabled:
        return None
    return GovernorSettings(
        ess_min=_resolved(config.ess_min),
        kl_max=_resolved(config.kl_max),
        patience=_resolved(config.patience),
        min_lag=_resolved(config.min_lag),
    )


def _difficulty(config: DifficultyConfig) -> DifficultySettings | None:
    if config.easy_above is None and config.hard_below is None:
        return None
    return DifficultySettings(config.easy_above, config.hard_below, _resolved(config.rest_epochs))


def _replay(config: ReplayConfig) -> ReplaySettings | None:
    if config.fraction == 0:
        return None
    return ReplaySettings(config.fraction, _resolved(config.max_age), _resolved(config.times))


def _resolved(value: T | None) -> T:
    assert value is not None, "the config was resolved"
    return value


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "left at once, by a second signal"
    return f"{type(error).__name__}: {error}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, OutpaceError):
        return error.exit_code
    return EXIT_LEFT_AT_ONCE if isinstance(error, asyncio.CancelledError) else PartFailed.exit_code
