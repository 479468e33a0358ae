"""A driver with fake components, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from outpace.config import Config
from outpace.config.sections import EvalConfig
from outpace.controller.driver import Driver
from outpace.controller.engine_registry import Components
from outpace.controller.evaluation import Evaluator
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recorder import Recorder
from outpace.controller.scheduler import Scheduler
from outpace.controller.training import ControllerState
from outpace.errors import ComponentFailed, ComponentLost, CorruptData, NotSaved, UpdateFailed, UpdateTorn
from outpace.hardware.cores import ComputeUnits
from outpace.monitoring.callbacks import CallbackRunner
from outpace.monitoring.console import ProgressConsole
from outpace.monitoring.run_directory import RunLog
from outpace.protocols import Producer
from outpace.runtime.components import ComponentKind, ComponentSpec, RestartSettings
from outpace.tasks.order import TaskOrder
from outpace.types import (
    ChunkReport,
    EngineStats,
    FleetMember,
    Generation,
    GroupOrder,
    GroupReport,
    Ints,
    JournalLocation,
    LearnerStats,
    LoadReport,
    Manifest,
    StepReport,
)


class FakeLearner:
    def __init__(self) -> None:
        self.version = 0
        self.calls: list[str] = []
        self.replayed: dict[int, list[JournalLocation]] = {}
        self.metrics: dict[str, float] = {}
        self.released: list[str] = []  # journal segments that were released

    async def chunk(self, version: int, places: list[JournalLocation], replayed: bool = False) -> ChunkReport:
        assert version == self.version
        assert not {place.segment for place in places} & set(self.released)
        self.calls.append(f"chunk {version}")
        count = len(places)
        if replayed:
            self.replayed[version] = places
            return ChunkReport(tokens=count, rows=count, loss_sum=0.0, replay_lag_counts={7: count})
        return ChunkReport(tokens=count, rows=count, loss_sum=0.0, lag_counts={0: count})

    async def step(self, version: int) -> StepReport:
        self.calls.append(f"step {version}")
        self.version += 1
        return StepReport(self.version, 0.0, 1, 0.0, 1e-3, metrics=self.metrics)

    async def publish(self, leased: list[int]) -> Manifest:
        self.calls.append(f"publish {self.version}")
        return Manifest("run", self.version, "/nowhere", [])

    async def save(self, directory: str, version: int) -> bool:
        return True

    async def load(self, directory: str) -> int:
        return 0

    async def stats(self) -> LearnerStats:
        return LearnerStats(self.version, 0.0, 0.0, 0, 1, 1)


class FakeEngine:
    def __init__(self) -> None:
        self.version = 0
        self.corrupt = 0  # number of loads still to fail their checksum
        self.torn = self.failing = 0  # number of loads still to fail, half-way or before they begin
        self.pinned: list[int] = []
        self.running = self.turns = 0

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        if self.corrupt:
            self.corrupt -= 1
            raise CorruptData("a flipped bit")
        if self.torn and not pinned:
            self.torn -= 1
            raise UpdateTorn("half-way")
        if self.failing and not pinned:
            self.failing -= 1
            raise UpdateFailed("no answer")
        if pinned:
            self.pinned.append(manifest.version)
        else:
            self.version = manifest.version
        return LoadReport(manifest.version, 0.0, 0.0, 0)

    async def release_pinned(self) -> None:
        self.pinned.append(-1)

    async def stats(self) -> EngineStats:
        self.turns += not self.pinned or self.pinned[-1] == -1  # during an evaluation, the test counts the turns
        return EngineStats(self.version, self.running, 0, 0, 0, 0, 0.0, 0.0, 0.0, 8, 1, self.turns)

    async def abort(self, request_ids: list[str]) -> None: ...

    async def generate(self, *_: Any) -> Generation:
        raise NotImplementedError


class FakeWorker:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.behave: Callable[[GroupOrder], Any] | None = None
        self.rewards = [1.0]
        self.released: list[str] = []
        self.recorded: dict[int, list[JournalLocation]] = {}
        self.fleets: list[list[FleetMember]] = []

    async def run(self, order: GroupOrder) -> GroupReport:
        if self.behave is not None and (result := await self.behave(order)) is not None:
            return result  # type: ignore[no-any-return]
        place = None if order.heldout else JournalLocation(f"w-{order.group // 10:05d}.journal", order.group, 1)
        version = max(self.engine.version, order.min_version)
        return GroupReport(
            order.group, f"t{order.task}", "finished", place=place, rewards=self.rewards, episodes=1, oldest=version
        )

    async def cancel(self, group: int) -> None: ...

    async def release(self, segments: list[str]) -> None:
        self.released += segments

    async def record_rollouts(self, step: int, places: list[JournalLocation]) -> None:
        self.recorded[step] = places

    async def rng(self) -> bytes:
        return b"{}"

    async def set_rng(self, state: bytes) -> None: ...

    async def fleet(self, members: list[FleetMember]) -> None:
        self.fleets.append(members)

    async def first_prompts(self, count: int) -> list[Ints]:
        return []


class FakeRuntime:
    """No component dies unless a test puts its death into `deaths`; a restarted component answers pings at once."""

    def __init__(self, restarts: int) -> None:
        self.restart_settings = RestartSettings(restarts, window_s=60)
        self.deaths: asyncio.Queue[ComponentFailed] = asyncio.Queue()
        self.restarted: list[str] = []
        self.killed: list[str] = []
        self.retired: list[str] = []
        self.silent: set[str] = set()
        self.restart_done = asyncio.Event()
        self.refusals = 0

    async def restart(self, name: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError("no more processes")
        self.restarted.append(name)
        self.restart_done.set()

    async def retire(self, name: str) -> None:
        self.retired.append(name)

    async def kill(self, name: str) -> None:
        self.killed.append(name)
        self.silent.discard(name)
        self.deaths.put_nowait(ComponentLost(name, "was killed by SIGKILL"))

    async def ping(self, name: str, deadline_s: float) -> bool:
        return name not in self.silent

    async def dump(self) -> str:
        return "everybody sleeps"

    async def start(self, *_: Any) -> Any:
        raise NotImplementedError

    def spec(self, name: str) -> ComponentSpec:
        if name == "learner":
            return ComponentSpec(name, "", "", kind="learner")
        kind: ComponentKind = "worker" if name.startswith("worker") else "engine"
        kind = "producer" if name == "producer" else kind
        return ComponentSpec(name, "", "", kind=kind, restart=self.restart_settings)

    async def stop(self) -> None: ...


SETTINGS = SchedulerSettings(
    groups_per_step=4, group_size=1, max_lag=2, depth=1.0, chunk_groups=2, max_running=64, on_stale="wait",
    warmup_steps=0, publish_every=1, update="inflight", deterministic=False, steps=6, epochs=None, tasks=10,
    eval_every=0, eval_enabled=True, checkpoint_every=0,
)  # fmt: skip


class Rig:
    """A driver with fake components and a real run directory."""

    def __init__(self, directory: Path, settings: SchedulerSettings = SETTINGS, stall_s: float = 20.0) -> None:
        self.log = RunLog.claim(directory)
        self.log.start("")
        self.recorder = Recorder(self.log, ProgressConsole(None, quiet=True), CallbackRunner([]), ComputeUnits(2), 0)
        self.learner, self.engine = FakeLearner(), FakeEngine()
        self.engines = {"e0": self.engine}
        self.worker = FakeWorker(self.engine)
        self.learner.released = self.worker.released
        self.saved: list[int] = []
        self.refused: list[int] = []  # versions whose checkpoint fails with `NotSaved`
        self.settings, self.stall_s = settings, stall_s
        self.restarts = 3
        self.start_engine: Callable[[str], tuple[str, str, FakeEngine]] | None = None
        self.producer: Producer | None = None

    async def run(self) -> str:
        self.runtime = FakeRuntime(self.restarts)
        sockets = {name: f"/{name}" for name in self.engines}
        components = Components(
            self.learner, self.engines, {"worker-0": self.worker}, self.runtime, sockets, producer=self.producer
        )
        config = Config.model_validate(
            {
                "run": {"stall_s": self.stall_s, "save_rollouts": 1},
                "rollout": {"group_size": 1},
                "pacing": {"max_failed": 3},
                "supervise": {"restarts": self.restarts, "window_s": 60, "probe_s": 0.02, "silent_s": 0.05},
            }
        )
        scheduler = Scheduler(self.settings, TaskOrder(self.settings.tasks, 0, not self.settings.streamed))
        driver = Driver(
            scheduler,
            components,
            self.recorder,
            Evaluator({"": 5}, EvalConfig(max_running=2)),
            self._save,
            config,
            start_engine=self.start_engine and self._start_engine,
        )
        return await driver.run(dict.fromkeys(self.engines, 0))

    async def _start_engine(self, url: str) -> tuple[str, str, FakeEngine]:
        assert self.start_engine is not None
        return self.start_engine(url)

    async def _save(self, version: int, collect_state: Callable[[], Awaitable[ControllerState | None]]) -> bool:
        if version in self.refused:
            raise NotSaved("no room")
        if await collect_state() is None:
            return False
        self.saved.append(version)
        return True


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (waits for a file, or for a list that the driver fills)
        await asyncio.sleep(0.002)
