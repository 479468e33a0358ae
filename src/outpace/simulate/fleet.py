"""MERGED"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from outpace.pipeline.events import EngineJoined, EngineLoaded, EngineLost
from outpace.pipeline.supervisor import GiveUp, Supervisor
from outpace.simulate.clock import Clock
from outpace.simulate.conductor import Tell
from outpace.simulate.engine import ModelledEngine, Request
from outpace.simulate.settings import SimulationSettings
from outpace.types import Version

GiveUpRun = Callable[[str], None]


class Client(Protocol):
    """Receives the results of its requests."""

    def answered(self, request: Request, engine: ModelledEngine) -> None: ...

    def lost(self, request: Request, tokens: float) -> None:
        """The engine failed, and the `tokens` sampled for this request are lost."""
        ...


class Buckets:
    """Serving engines, indexed by load."""

    def __init__(self) -> None:
        self._at: defaultdict[int, dict[ModelledEngine, None]] = defaultdict(dict)
        self._load: dict[ModelledEngine, int] = {}
        self._lowest = 0

    def place(self, engine: ModelledEngine) -> None:
        """Update the load of an engine."""
        self.remove(engine)
        load = self._load[engine] = engine.load
        self._at[load][engine] = None
        self._lowest = min(self._lowest, load)

    def remove(self, engine: ModelledEngine) -> None:
        if (load := self._load.pop(engine, None)) is not None:
            del self._at[load][engine]

    def least(self, min_version: Version) -> ModelledEngine | None:
        """Return the least loaded engine that serves this version or a newer one."""
        if not self._load:
            return None
        while not self._at[self._lowest]:
            del self._at[self._lowest]
            self._lowest += 1
        for engine in self._at[self._lowest]:
            if engine.version >= min_version:
                return engine
        fresh = [engine for engine in self._load if engine.version >= min_version]  # rare: an engine is behind
        return min(fresh, key=lambda engine: engine.load, default=None)


class Fleet:
    """All engines: routing of requests, weight loads, failures, preemptions and joins."""

    def __init__(
        self,
        settings: SimulationSettings,
        clock: Clock,
        supervisor: Supervisor,
        rng: random.Random,
        client: Client,
        give_up: GiveUpRun,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._supervisor = supervisor
        self._rng = rng
        self._client = client
        self._give_up = give_up
        self._tell: Tell = lambda _: None
        self._buckets = Buckets()
        self.homeless: dict[Request, None] = {}  # requests that no engine can serve yet
        self.engines: dict[str, ModelledEngine] = {}
        self.slots = settings.engine.slots  # per engine
        self.deaths = 0
        self.gone = 0  # preempted, not failed
        self._present = 0  # engines that have devices, up or not
        self._present_s = 0.0
        self._present_since = clock.now

    def start(self, count: int, version: Version) -> None:
        """Start `count` engines that serve `version`, and schedule their faults."""
        for _ in range(count):
            engine = self._new_engine()
            engine.version, engine.serves = version, True
            self._buckets.place(engine)
            self._schedule_failure(engine)
        self._schedule_preemption()
        for moment in self._settings.faults.join_at_s:
            if moment >= self._clock.now:
                self._clock.at(moment, lambda: self._up(self._new_engine()))

    def connect(self, tell: Tell) -> None:
        self._tell = tell

    def _new_engine(self) -> ModelledEngine:
        name = f"e{len(self.engines)}"
        slow = self._rng.random() < self._settings.engine.slow_share
        engine = self.engines[name] = ModelledEngine(name, self._clock, self._settings.engine, slow, self._done)
        self._count_present(+1)
        return engine

    def present_s(self) -> float:
        """Return the total engine-seconds during which engines had devices."""
        return self._present_s + self._present * (self._clock.now - self._present_since)

    def _count_present(self, change: int) -> None:
        self._present_s, self._present_since = self.present_s(), self._clock.now
        self._present += change

    # ------------------------------------------------------------------------------------------------------ requests

    def submit(self, request: Request, preferred: ModelledEngine | None = None) -> None:
        """Route a request. `preferred` has the prefix of the sequence in its cache."""
        fits = preferred is not None and preferred.serves and preferred.version >= request.min_version
        engine = preferred if fits else self._buckets.least(request.min_version)
        if engine is None:
            self.homeless[request] = None
            return
        engine.submit(request)
        self._buckets.place(engine)

    def withdraw(self, request: Request) -> float:
        """Cancel a request. Returns the tokens it had sampled."""
        engine = request.engine
        if engine is None:
            self.homeless.pop(request, None)
            return 0.0
        sampled = engine.withdraw(request)
        self._buckets.place(engine)
        return sampled

    def _done(self, engine: ModelledEngine, requests: list[Request]) -> None:
        self._buckets.place(engine)
        for request in requests:
            self._client.answered(request, engine)

    # ------------------------------------------------------------------------------------------------ loads and faults

    def load(self, name: str, version: Version) -> None:
        engine = self.engines[name]
        life, faults = engine.life, self._settings.faults
        slow = faults.slow_load_factor if self._rng.random() < faults.slow_load_share else 1.0
        seconds = self._settings.engine.load_s * engine.slowness * slow

        def loaded() -> None:
            if engine.life == life:
                self._loaded(engine, version)

        self._clock.after(seconds, loaded)

    def _loaded(self, engine: ModelledEngine, version: Version) -> None:
        engine.swap(version)
        engine.serves = True
        self._buckets.place(engine)
        waiting, self.homeless = self.homeless, {}
        for request in waiting:
            self.submit(request)
        self._tell(EngineLoaded(engine.name, version))

    def _schedule_failure(self, engine: ModelledEngine) -> None:
        mtbf, life = self._settings.faults.engine_mtbf_s, engine.life
        if mtbf is None:
            return

        def die() -> None:
            if engine.life == life:
                self.die(engine)

        self._clock.after(self._rng.expovariate(1 / mtbf), die)

    def die(self, engine: ModelledEngine) -> None:
        self.deaths += 1
        decision = self._supervisor.died(engine.name, "engine", self._clock.now)
        if isinstance(decision, GiveUp):
            self._give_up(f"engine {engine.name} died: {decision.reason}")
            return
        self._down(engine, decision.pause_s + self._settings.faults.restart_s)

    def _schedule_preemption(self) -> None:
        if (mean := self._settings.faults.leave_every_s) is not None:
            self._clock.after(self._rng.expovariate(1 / mean), self._preempt)

    def _preempt(self) -> None:
        """Remove a random serving engine for `away_s`."""
        serving = [engine for engine in self.engines.values() if engine.serves]
        if serving:
            self.gone += 1
            self._count_present(-1)
            self._down(self._rng.choice(serving), self._settings.faults.away_s)
            self._clock.after(self._settings.faults.away_s, lambda: self._count_present(+1))
        self._schedule_preemption()

    def _down(self, engine: ModelledEngine, seconds: float) -> None:
        lost = engine.lose_everything()
        self._buckets.remove(engine)
        self._clock.after(seconds, lambda: self._up(engine))
        for request, tokens in lost:
            self._client.lost(request, tokens)
        self._tell(EngineLost(engine.name))

    def _up(self, engine: ModelledEngine) -> None:
        self._schedule_failure(engine)
        self._tell(EngineJoined(engine.name))
