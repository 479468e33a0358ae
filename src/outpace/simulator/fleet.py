"""Simulated engines and the fleet that routes requests to them.

An engine is a processor-sharing queue: all running sequences decode at the same rate, which falls as their number
grows. All sequences advance alike, so a single number `work` counts the tokens that a sequence running since the start
would have. A sequence of L tokens that starts at work w ends at work w + L. Arrivals and departures change the rate at
which work grows, but no end has to be moved. A heap of ends makes every event O(log n).

The sampling version is integrated over work in the same way, so the mean version of a sequence's tokens is a single
subtraction, regardless of how many weight updates it saw.

The fleet sends a request to the engine with the fewest requests among those with fresh enough weights. If there is
none, the request waits until one loads them. Engines are kept in buckets by load, so routing does not depend on their
number.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from outpace.controller import events as ev
from outpace.controller.supervisor import GiveUp, RestartPolicy
from outpace.simulator.driver import SendEvent, VirtualClock
from outpace.simulator.settings import SimulatedEngineSettings, SimulationSettings
from outpace.types import Version

TOKEN_TOLERANCE = 1e-6
"""In tokens: an end this close counts as reached, so that rounding cannot leave a sequence waiting forever."""


class SimulatedRequest:
    """One completion to sample, after `prefill` prompt tokens that are not in the engine's cache."""

    __slots__ = ("began_integral", "began_work", "engine", "min_version", "oldest", "prefill", "ticket", "tokens")

    def __init__(self, tokens: float, prefill: float, min_version: Version) -> None:
        self.tokens = tokens
        self.prefill = prefill
        self.min_version = min_version
        self.engine: SimulatedEngine | None = None  # None: waiting for an engine, or done
        self.ticket = 0  # identifies its slot on that engine; 0: no slot
        self.oldest: Version = -1  # version of its oldest token
        self.began_work = 0.0
        self.began_integral = 0.0


class SimulatedEngine:
    """One simulated engine. It calls `done` with completed requests, and `done` may submit further ones."""

    def __init__(
        self, name: str, clock: VirtualClock, settings: SimulatedEngineSettings, slow: bool, done: OnDone
    ) -> None:
        self.name = name
        self.version: Version = -1
        self.life = 0  # number of failures so far; calls scheduled in an earlier life are ignored
        self.serves = False
        self.slowness = settings.slow_factor if slow else 1.0
        self.busy_s = 0.0
        self.slot_s = 0.0  # total slot-seconds in use
        self._clock = clock
        self._settings = settings
        self._done = done
        self._work = 0.0
        self._integral = 0.0  # integral of the version over work
        self._since = clock.now  # work is counted up to this time; in the future while the engine is blocked
        self._ends: list[tuple[float, int, SimulatedRequest]] = []
        self._tickets = 0
        self._running: dict[int, SimulatedRequest] = {}  # by ticket
        self._waiting: deque[SimulatedRequest] = deque()
        self._wake_at = inf

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def load(self) -> int:
        """The number of running and queued requests."""
        return len(self._running) + len(self._waiting)

    # ------------------------------------------------------------------------------------------------------ requests

    def submit(self, request: SimulatedRequest) -> None:
        self.update_work()
        request.engine = self
        self._waiting.append(request)
        self._fill_slots()
        self._schedule_wake()

    def withdraw(self, request: SimulatedRequest) -> float:
        """Cancel a request. Returns the tokens it had sampled."""
        self.update_work()
        sampled = self._remove(request)
        self._fill_slots()
        self._schedule_wake()
        return sampled

    def fail(self) -> list[tuple[SimulatedRequest, float]]:
        """Fail the engine. Returns its requests, each with the tokens it had sampled."""
        self.update_work()
        lost = [(request, self._remove(request)) for request in [*self._running.values(), *self._waiting]]
        self._ends.clear()
        self.life += 1
        self.serves = False
        return lost

    def mean_version(self, request: SimulatedRequest) -> float:
        """Return the mean version over the tokens of a request that has just completed."""
        work = self._work - request.began_work
        return (self._integral - request.began_integral) / work if work > 0 else float(request.oldest)

    def _remove(self, request: SimulatedRequest) -> float:
        ticket, request.engine, request.ticket = request.ticket, None, 0
        if ticket:
            del self._running[ticket]  # its end stays in the heap and is skipped
            return min(request.tokens, self._work - request.began_work)
        self._waiting.remove(request)
        return 0.0

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self._settings.slots:
            request = self._waiting.popleft()
            if request.prefill:
                self._block(request.prefill / self._settings.prefill_tok_s * self.slowness)
            request.began_work, request.began_integral, request.oldest = self._work, self._integral, self.version
            self._tickets = request.ticket = self._tickets + 1
            self._running[request.ticket] = request
            heappush(self._ends, (self._work + request.tokens, request.ticket, request))

    # ------------------------------------------------------------------------------------------------ weights and time

    def swap(self, version: Version) -> None:
        self.update_work()
        self.version = version
        self._block(self._settings.pause_s)
        self._schedule_wake()

    def _block(self, seconds: float) -> None:
        """Block decoding for some seconds."""
        self._since = max(self._since, self._clock.now) + seconds
        self.busy_s += seconds

    def update_work(self) -> None:
        """Bring the work counter up to the current time."""
        seconds = self._clock.now - self._since
        if seconds <= 0:
            return
        self._since = self._clock.now
        if running := len(self._running):
            work = seconds / self._token_s(running)
            self._work += work
            self._integral += work * self.version
            self.busy_s += seconds
            self.slot_s += seconds * running

    def _token_s(self, running: int) -> float:
        """Return the seconds per decode step."""
        return (self._settings.step_s + self._settings.sequence_s * running) * self.slowness

    def _schedule_wake(self) -> None:
        """Schedule a call for when the next sequence ends. A call that comes too early reschedules, so an arrival
        does not have to move it."""
        ends = self._ends
        while ends and not self._is_current(ends[0]):
            heappop(ends)
        if not ends:
            return
        moment = max(self._since, self._clock.now)
        moment += max(0.0, ends[0][0] - self._work) * self._token_s(len(self._running))
        if moment < self._wake_at:
            self._wake_at = moment
            self._clock.at(moment, lambda: self._wake(moment))

    def _is_current(self, end: tuple[float, int, SimulatedRequest]) -> bool:
        return end[2].engine is self and end[2].ticket == end[1]

    def _wake(self, moment: float) -> None:
        if moment != self._wake_at:
            return  # replaced by an earlier call
        self._wake_at = inf
        self.update_work()
        done: list[SimulatedRequest] = []
        while self._ends and self._ends[0][0] <= self._work + TOKEN_TOLERANCE:
            end = heappop(self._ends)
            if self._is_current(end):
                request = end[2]
                del self._running[request.ticket]
                request.engine, request.ticket = None, 0
                done.append(request)
        self._fill_slots()
        self._schedule_wake()
        if done:
            self._done(self, done)


OnDone = Callable[[SimulatedEngine, list[SimulatedRequest]], None]
"""Called with an engine and the requests it has completed."""


EndRun = Callable[[str], None]


class FleetClient(Protocol):
    """Receives the results of its requests."""

    def answered(self, request: SimulatedRequest, engine: SimulatedEngine) -> None: ...

    def lost(self, request: SimulatedRequest, tokens: float) -> None:
        """The engine failed, and the `tokens` sampled for this request are lost."""
        ...


class LoadBuckets:
    """Serving engines, indexed by load."""

    def __init__(self) -> None:
        self._at: defaultdict[int, dict[SimulatedEngine, None]] = defaultdict(dict)
        self._load: dict[SimulatedEngine, int] = {}
        self._lowest = 0

    def place(self, engine: SimulatedEngine) -> None:
        """Update the load of an engine."""
        self.remove(engine)
        load = self._load[engine] = engine.load
        self._at[load][engine] = None
        self._lowest = min(self._lowest, load)

    def remove(self, engine: SimulatedEngine) -> None:
        if (load := self._load.pop(engine, None)) is not None:
            del self._at[load][engine]

    def least(self, min_version: Version) -> SimulatedEngine | None:
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


class SimulatedFleet:
    """All engines: routing of requests, weight loads, failures, preemptions and joins."""

    def __init__(
        self,
        settings: SimulationSettings,
        clock: VirtualClock,
        supervisor: RestartPolicy,
        rng: random.Random,
        client: FleetClient,
        give_up: EndRun,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._supervisor = supervisor
        self._rng = rng
        self._client = client
        self._give_up = give_up
        self._send_event: SendEvent = lambda _: None
        self._buckets = LoadBuckets()
        self.unassigned: dict[SimulatedRequest, None] = {}  # requests that no engine can serve yet
        self.engines: dict[str, SimulatedEngine] = {}
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

    def connect(self, send_event: SendEvent) -> None:
        self._send_event = send_event

    def _new_engine(self) -> SimulatedEngine:
        name = f"e{len(self.engines)}"
        slow = self._rng.random() < self._settings.engine.slow_share
        engine = self.engines[name] = SimulatedEngine(name, self._clock, self._settings.engine, slow, self._done)
        self._count_present(+1)
        return engine

    def present_s(self) -> float:
        """Return the total engine-seconds during which engines had devices."""
        return self._present_s + self._present * (self._clock.now - self._present_since)

    def _count_present(self, change: int) -> None:
        self._present_s, self._present_since = self.present_s(), self._clock.now
        self._present += change

    # ------------------------------------------------------------------------------------------------------ requests

    def submit(self, request: SimulatedRequest, preferred: SimulatedEngine | None = None) -> None:
        """Route a request. `preferred` has the prefix of the sequence in its cache."""
        fits = preferred is not None and preferred.serves and preferred.version >= request.min_version
        engine = preferred if fits else self._buckets.least(request.min_version)
        if engine is None:
            self.unassigned[request] = None
            return
        engine.submit(request)
        self._buckets.place(engine)

    def withdraw(self, request: SimulatedRequest) -> float:
        """Cancel a request. Returns the tokens it had sampled."""
        engine = request.engine
        if engine is None:
            self.unassigned.pop(request, None)
            return 0.0
        sampled = engine.withdraw(request)
        self._buckets.place(engine)
        return sampled

    def _done(self, engine: SimulatedEngine, requests: list[SimulatedRequest]) -> None:
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

    def _loaded(self, engine: SimulatedEngine, version: Version) -> None:
        engine.swap(version)
        engine.serves = True
        self._buckets.place(engine)
        waiting, self.unassigned = self.unassigned, {}
        for request in waiting:
            self.submit(request)
        self._send_event(ev.EngineLoaded(engine.name, version))

    def _schedule_failure(self, engine: SimulatedEngine) -> None:
        mtbf, life = self._settings.faults.engine_mtbf_s, engine.life
        if mtbf is None:
            return

        def die() -> None:
            if engine.life == life:
                self.die(engine)

        self._clock.after(self._rng.expovariate(1 / mtbf), die)

    def die(self, engine: SimulatedEngine) -> None:
        self.deaths += 1
        pause_s = self._supervisor.died(engine.name, self._clock.now)
        if isinstance(pause_s, GiveUp):
            self._give_up(f"engine {engine.name} died: {pause_s.reason}")
            return
        self._down(engine, pause_s + self._settings.faults.restart_s)

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

    def _down(self, engine: SimulatedEngine, seconds: float) -> None:
        lost = engine.fail()
        self._buckets.remove(engine)
        self._clock.after(seconds, lambda: self._up(engine))
        for request, tokens in lost:
            self._client.lost(request, tokens)
        self._send_event(ev.EngineLost(engine.name))

    def _up(self, engine: SimulatedEngine) -> None:
        self._schedule_failure(engine)
        self._send_event(ev.EngineJoined(engine.name))
