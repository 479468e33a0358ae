"""Policy versions in use: publish snapshots, load them into engines, and evaluate them.

    Publish ─▶ Published     LoadWeights ─▶ EngineLoaded | LoadFailed     Evaluate ─▶ EvaluationDone

A failed load is reported after an exponential backoff. An engine whose loads keep failing is killed and restarted.
Neither delays a publication, another engine's load, or the learner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from outpace.controller import events as ev
from outpace.controller.engine_registry import Components, EngineRegistry, PostEvent
from outpace.controller.evaluation import Evaluation, Evaluator
from outpace.controller.recorder import Recorder
from outpace.controller.supervisor import ComponentRemoved, ComponentSupervisor
from outpace.errors import ComponentFailed, ComponentLost, CorruptData, UpdateFailed, UpdateTorn
from outpace.monitoring.rollout_files import RolloutWriter
from outpace.runtime import diagnostics
from outpace.runtime.async_tools import backoff_s, gather_or_cancel
from outpace.types import GroupOrder, GroupReport, LoadReport, Manifest, Version

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
LATE_S = 5.0
LATE_FACTOR = 4
"""A load is late after this many times the longest successful load, but not before LATE_S."""

MAX_FAILURES = 6
"""Number of failed loads in a row after which an engine is killed and restarted."""


class PolicyVersions:
    """Carries out the scheduler's actions for publications, loads and evaluations."""

    def __init__(
        self,
        components: Components,
        supervisor: ComponentSupervisor,
        registry: EngineRegistry,
        recorder: Recorder,
        evaluator: Evaluator,
        run_order: Callable[[GroupOrder], Awaitable[GroupReport]],
        on_progress: Callable[[], None],
        post: PostEvent,
        pins: bool,
        completions: RolloutWriter,
    ) -> None:
        """`run_order` runs an order on a worker; `on_progress` is called as an evaluation advances. `pins`: engines
        have a second weight set for evaluation. `completions` saves evaluation rollouts."""
        self._components = components
        self._supervisor = supervisor
        self._registry = registry
        self._recorder = recorder
        self._evaluator = evaluator
        self._run_order = run_order
        self._on_progress = on_progress
        self._post = post
        self._pins = pins
        self._completions = completions
        self._manifests: dict[Version, Manifest] = {}
        self._failures: Counter[tuple[str, int]] = Counter()  # failed loads in a row, by engine and restart count
        self._longest_s = 0.0  # longest successful load

    async def publish(self, action: ev.Publish) -> None:
        with self._recorder.span("learner", f"publish {action.version}"):
            manifest = await self._components.learner.publish(list(action.leased))
        diagnostics.crash_point("controller.published")
        assert manifest.version == action.version, f"published {manifest.version}, not {action.version}"
        for version in list(self._manifests):
            if version not in action.leased:
                del self._manifests[version]
        self._manifests[action.version] = manifest
        self._recorder.published(manifest)
        self._post(ev.Published(action.version))

    # -------------------------------------------------------------------------------------------------------- loads

    async def load(self, action: ev.LoadWeights) -> None:
        engine, version, restarts = action.engine, action.version, self._supervisor.restart_count(action.engine)
        if engine not in self._components.engines:
            return  # the engine left after the order; EngineLeft is in the queue
        with self._recorder.span(engine, f"load {version}"):
            late = asyncio.get_running_loop().call_later(
                max(LATE_S, LATE_FACTOR * self._longest_s), self._report_late, action, restarts
            )
            try:
                report = await self._load(engine, self._manifests[version], pinned=False)
            except ComponentLost:
                return  # the scheduler gets EngineLost, and orders the next load when the engine is back
            except (UpdateFailed, CorruptData, ComponentFailed) as error:
                await self._load_failed(action, restarts, error)
                return
            finally:
                late.cancel()
        diagnostics.crash_point("controller.loaded")
        if not self._supervisor.is_current(engine, restarts):
            return  # the engine died while its reply was in flight
        self._failures.pop((engine, restarts), None)
        self._longest_s = max(self._longest_s, report.seconds)
        self._recorder.loaded(report)
        self._post(ev.EngineLoaded(engine, version))

    async def _load(self, engine: str, manifest: Manifest, pinned: bool) -> LoadReport:
        """Load a snapshot. On a checksum mismatch, retry once; the engine keeps its version meanwhile."""
        try:
            return await self._components.engines[engine].load(manifest, pinned)
        except CorruptData:
            self._recorder.fault("corrupt_weights")
            return await self._components.engines[engine].load(manifest, pinned)

    def _report_late(self, action: ev.LoadWeights, restarts: int) -> None:
        if self._supervisor.is_current(action.engine, restarts):
            self._post(ev.LoadLate(action.engine, action.version))

    async def _load_failed(self, action: ev.LoadWeights, restarts: int, error: Exception) -> None:
        """Report a failed load, unless the engine was replaced meanwhile: its successor may already be loading."""
        engine, torn = action.engine, isinstance(error, UpdateTorn)
        if not self._supervisor.is_current(engine, restarts):
            return
        self._failures[engine, restarts] += 1
        self._recorder.fault("torn_loads" if torn else "failed_loads")
        self._recorder.console.status(f"{engine} did not take version {action.version}: {error}")
        if self._failures[engine, restarts] >= MAX_FAILURES:
            await self._components.runtime.kill(engine)
            return
        if torn:
            self._registry.stop_serving(engine)
        await asyncio.sleep(backoff_s(self._failures[engine, restarts], FIRST_PAUSE_S, LONGEST_PAUSE_S))
        if self._supervisor.is_current(engine, restarts):
            self._post(ev.LoadFailed(engine, action.version, torn))

    # -------------------------------------------------------------------------------------------------- evaluations

    async def evaluate(self, action: ev.Evaluate) -> None:
        diagnostics.crash_point("controller.evaluate")
        with self._recorder.span("evaluation", f"version {action.version}"):
            if self._pins:
                result = await self._evaluate_pinned(self._manifests[action.version])
            else:
                result = await self._evaluator.run(
                    action.version, self._run_order, pinned=False, progress=self._on_progress
                )
        try:
            await asyncio.to_thread(self._completions.evaluation, action.version, result.views)
        except OSError as error:  # a full disk must not end the run
            self._recorder.console.status(f"cannot save the completions of version {action.version}: {error.strerror}")
        self._recorder.evaluated(result)
        diagnostics.crash_point("controller.evaluated")
        await self._recorder.callbacks.handled()
        self._post(ev.EvaluationDone(action.version))

    async def _evaluate_pinned(self, manifest: Manifest) -> Evaluation:
        """Evaluate on engines that hold this version beside the one they serve. If one of them is restarted
        meanwhile it has lost the pinned weights, and the whole evaluation is repeated."""
        while True:
            engines = await self._pin(manifest)
            alive = [engine for engine, restarts in engines.items() if self._supervisor.is_current(engine, restarts)]
            self._registry.pin(alive, manifest.version)
            result = await self._evaluator.run(manifest.version, self._run_order, progress=self._on_progress)
            complete = self._registry.all_pinned(engines, manifest.version)
            self._registry.pin(engines, None)
            await self._call_all(engines, lambda engine: self._components.engines[engine].release_pinned())
            if complete and all(self._supervisor.is_current(name, restarts) for name, restarts in engines.items()):
                return result

    async def _pin(self, manifest: Manifest) -> dict[str, int]:
        """Pin this version and return the engines that hold it, with their restart counts before the load.

        Engines that fail are left out. If all fail, retry; after `MAX_FAILURES` attempts raise the last error."""
        failures: dict[str, Exception] = {}

        async def pin(name: str) -> None:
            try:
                await self._load(name, manifest, pinned=True)
            except (UpdateFailed, CorruptData) as error:
                failures[name] = error

        for attempt in range(1, MAX_FAILURES + 1):
            names = self._registry.serving or [member.name for member in self._registry.members][:1]
            restart_counts = {name: self._supervisor.restart_count(name) for name in names}
            failures.clear()
            await self._call_all(names, pin)
            if pinned := {name: count for name, count in restart_counts.items() if name not in failures}:
                return pinned
            self._recorder.fault("failed_pins")
            if attempt < MAX_FAILURES:
                await asyncio.sleep(backoff_s(attempt, FIRST_PAUSE_S, LONGEST_PAUSE_S))
        raise next(iter(failures.values()))

    async def _call_all(self, engines: Iterable[str], call: Callable[[str], Awaitable[object]]) -> None:
        """Make a call to each of these engines, or to its replacement. Engines that left are skipped."""
        await gather_or_cancel(*(self._call_one(engine, partial(call, engine)) for engine in engines))

    async def _call_one(self, engine: str, call: Callable[[], Awaitable[object]]) -> None:
        with contextlib.suppress(ComponentRemoved):
            await self._supervisor.call(engine, call)
