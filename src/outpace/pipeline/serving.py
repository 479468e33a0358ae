"""The policy on its way to whoever samples from it: snapshots, loads, evaluations.

Publish ─▶ Published     LoadWeights ─▶ EngineLoaded | LoadFailed     Evaluate ─▶ EvaluationDone

A load that fails is told after a pause that grows while it keeps failing; an engine that takes none is replaced.
Neither holds up a publication, another engine's load, or the learner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from outpace import crash
from outpace.errors import CorruptData, PartFailed, PartLost, UpdateFailed, UpdateTorn
from outpace.pipeline import events as ev
from outpace.pipeline.caretaker import Caretaker, PartGone
from outpace.pipeline.evaluation import Evaluation, Evaluator
from outpace.pipeline.recorder import Recorder
from outpace.pipeline.roster import Roster
from outpace.pipeline.staff import Parts, Tell
from outpace.runtime.together import together
from outpace.types import GroupOrder, GroupReport, LoadReport, Manifest, Version

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
LATE_S = 5.0
LATE_TIMES = 4
"""A load is late after this many times as long as the longest that has succeeded, and not before LATE_S."""

MOST_FAILURES = 6
"""After so many failed loads in a row an engine is taken for broken, and replaced."""


class Serving:
    def __init__(
        self,
        parts: Parts,
        care: Caretaker,
        roster: Roster,
        recorder: Recorder,
        evaluator: Evaluator,
        make: Callable[[GroupOrder], Awaitable[GroupReport]],
        moved: Callable[[], None],
        tell: Tell,
        pins: bool,
    ) -> None:
        """`make` has a worker carry out an order; `moved` is called whenever an evaluation gets on. `pins`:
        engines have a second weight set for evaluation."""
        self._parts = parts
        self._care = care
        self._roster = roster
        self._recorder = recorder
        self._evaluator = evaluator
        self._make = make
        self._moved = moved
        self._tell = tell
        self._pins = pins
        self._manifests: dict[Version, Manifest] = {}
        self._failures: Counter[tuple[str, int]] = Counter()  # loads in a row, by engine and its life
        self._longest_s = 0.0  # of the loads that have succeeded

    async def publish(self, action: ev.Publish) -> None:
        with self._recorder.span("learner", f"publish {action.version}"):
            manifest = await self._parts.learner.publish(list(action.leased))
        crash.reached("controller.published")
        assert manifest.version == action.version, f"published {manifest.version}, not {action.version}"
        for version in list(self._manifests):
            if version not in action.leased:
                del self._manifests[version]
        self._manifests[action.version] = manifest
        self._recorder.published(manifest)
        self._tell(ev.Published(action.version))

    # -------------------------------------------------------------------------------------------------------- loads

    async def load(self, action: ev.LoadWeights) -> None:
        engine, version, life = action.engine, action.version, self._care.life(action.engine)
        if engine not in self._parts.engines:
            return  # it has left the run since the order; EngineLeft is in the queue
        with self._recorder.span(engine, f"load {version}"):
            late = asyncio.get_running_loop().call_later(
                max(LATE_S, LATE_TIMES * self._longest_s), self._late, action, life
            )
            try:
                report = await self._loaded(engine, self._manifests[version], pinned=False)
            except PartLost:
                return  # the core hears of it as EngineLost, and orders the next one when it is back
            except (UpdateFailed, CorruptData, PartFailed) as error:
                await self._failed(action, life, error)
                return
            finally:
                late.cancel()
        crash.reached("controller.loaded")
        if not self._care.lives_on(engine, life):
            return  # it died with its answer under way
        self._failures.pop((engine, life), None)
        self._longest_s = max(self._longest_s, report.seconds)
        self._recorder.loaded(engine, report)
        self._tell(ev.EngineLoaded(engine, version))

    async def _loaded(self, engine: str, manifest: Manifest, pinned: bool) -> LoadReport:
        """A snapshot that does not match its checksums is read once more; the engine keeps its version meanwhile."""
        try:
            return await self._parts.engines[engine].load(manifest, pinned)
        except CorruptData:
            self._recorder.fault("corrupt_weights")
            return await self._parts.engines[engine].load(manifest, pinned)

    def _late(self, action: ev.LoadWeights, life: int) -> None:
        if self._care.lives_on(action.engine, life):
            self._tell(ev.LoadLate(action.engine, action.version))

    async def _failed(self, action: ev.LoadWeights, life: int, error: Exception) -> None:
        """Nothing is told of an engine that is gone: its successor may be loading already."""
        engine, torn = action.engine, isinstance(error, UpdateTorn)
        if not self._care.lives_on(engine, life):
            return
        self._failures[engine, life] += 1
        self._recorder.fault("torn_loads" if torn else "failed_loads")
        self._recorder.console.status(f"{engine} did not take version {action.version}: {error}")
        if self._failures[engine, life] >= MOST_FAILURES:
            await self._parts.runtime.kill(engine)
            return
        if torn:
            self._roster.stands_still(engine)
        await asyncio.sleep(_pause_s(self._failures[engine, life]))
        if self._care.lives_on(engine, life):
            self._tell(ev.LoadFailed(engine, action.version, torn))

    # -------------------------------------------------------------------------------------------------- evaluations

    async def evaluate(self, action: ev.Evaluate) -> None:
        crash.reached("controller.evaluate")
        with self._recorder.span("evaluation", f"version {action.version}"):
            if self._pins:
                result = await self._measured(self._manifests[action.version])
            else:
                result = await self._evaluator.run(action.version, self._make, pinned=False, progress=self._moved)
        self._recorder.evaluated(result)
        crash.reached("controller.evaluated")
        self._tell(ev.EvaluationDone(action.version))

    async def _measured(self, manifest: Manifest) -> Evaluation:
        """By engines that hold this very version beside the one they serve. If one of them is replaced meanwhile, it
        has lost that: then all of it is done again."""
        while True:
            engines = await self._pinned(manifest)
            alive = [engine for engine, life in engines.items() if self._care.lives_on(engine, life)]
            self._roster.pin(alive, manifest.version)
            result = await self._evaluator.run(manifest.version, self._make, progress=self._moved)
            whole = self._roster.all_pinned(engines, manifest.version)
            self._roster.pin(engines, None)
            await self._of_all(engines, lambda engine: self._parts.engines[engine].release_pinned())
            if whole and all(self._care.lives_on(engine, life) for engine, life in engines.items()):
                return result

    async def _pinned(self, manifest: Manifest) -> dict[str, int]:
        """Those that have taken it, by their lives before that. One that does not take it is left out; where none does,
        it is tried again, and the last failure goes up."""
        failures: dict[str, Exception] = {}

        async def pin(name: str) -> None:
            try:
                await self._loaded(name, manifest, pinned=True)
            except (UpdateFailed, CorruptData) as error:
                failures[name] = error

        for attempt in range(1, MOST_FAILURES + 1):
            names = self._roster.serving or [member.name for member in self._roster.members][:1]
            lives = {name: self._care.life(name) for name in names}
            failures.clear()
            await self._of_all(names, pin)
            if taken := {name: life for name, life in lives.items() if name not in failures}:
                return taken
            self._recorder.fault("failed_pins")
            if attempt < MOST_FAILURES:
                await asyncio.sleep(_pause_s(attempt))
        raise next(iter(failures.values()))

    async def _of_all(self, engines: Iterable[str], call: Callable[[str], Awaitable[object]]) -> None:
        """Each of them, or whoever takes its place, has done it, unless it has left."""
        await together(*(self._of_one(engine, partial(call, engine)) for engine in engines))

    async def _of_one(self, engine: str, call: Callable[[], Awaitable[object]]) -> None:
        with contextlib.suppress(PartGone):
            await self._care.ask(engine, call)


def _pause_s(failures: int) -> float:
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)))
