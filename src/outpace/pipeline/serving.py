"""The policy on its way to whoever samples from it: snapshots, loads, evaluations.

Publish ─▶ Published     LoadWeights ─▶ EngineLoaded     Evaluate ─▶ EvaluationDone
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from outpace import crash
from outpace.errors import CorruptData, PartLost
from outpace.pipeline import events as ev
from outpace.pipeline.caretaker import Caretaker
from outpace.pipeline.evaluation import Evaluation, Evaluator
from outpace.pipeline.recorder import Recorder
from outpace.pipeline.staff import Parts, Tell
from outpace.types import GroupOrder, GroupReport, LoadReport, Manifest, Version


class Serving:
    def __init__(
        self,
        parts: Parts,
        care: Caretaker,
        recorder: Recorder,
        evaluator: Evaluator,
        make: Callable[[GroupOrder], Awaitable[GroupReport]],
        moved: Callable[[], None],
        tell: Tell,
    ) -> None:
        """`make` has a worker carry out an order; `moved` is called whenever an evaluation gets on."""
        self._parts = parts
        self._care = care
        self._recorder = recorder
        self._evaluator = evaluator
        self._make = make
        self._moved = moved
        self._tell = tell
        self._manifests: dict[Version, Manifest] = {}

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

    async def load(self, action: ev.LoadWeights) -> None:
        with self._recorder.span(action.engine, f"load {action.version}"):
            try:
                report = await self._loaded(action.engine, self._manifests[action.version], pinned=False)
            except PartLost:
                return  # the core hears of it as EngineLost, and orders the next one when it is back
        crash.reached("controller.loaded")
        self._recorder.loaded(action.engine, report)
        self._tell(ev.EngineLoaded(action.engine, action.version))

    async def _loaded(self, engine: str, manifest: Manifest, pinned: bool) -> LoadReport:
        """A snapshot that does not match its checksums is read once more; the engine keeps its version meanwhile."""
        try:
            return await self._parts.engines[engine].load(manifest, pinned)
        except CorruptData:
            self._recorder.fault("corrupt_weights")
            return await self._parts.engines[engine].load(manifest, pinned)

    async def evaluate(self, action: ev.Evaluate) -> None:
        crash.reached("controller.evaluate")
        engine = next(iter(self._parts.engines))
        with self._recorder.span("evaluation", f"version {action.version}"):
            result = await self._measured(engine, self._manifests[action.version])
        self._recorder.evaluated(result)
        crash.reached("controller.evaluated")
        self._tell(ev.EvaluationDone(action.version))

    async def _measured(self, engine: str, manifest: Manifest) -> Evaluation:
        """An engine that is replaced meanwhile has lost the weights that were pinned: then all of it is done again."""
        while True:
            await self._care.ask(engine, lambda: self._loaded(engine, manifest, pinned=True))
            life = self._care.life(engine)
            result = await self._evaluator.run(manifest.version, self._make, progress=self._moved)
            await self._care.ask(engine, self._parts.engines[engine].release_pinned)
            if self._care.life(engine) == life:
                return result
