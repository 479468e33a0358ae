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

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from outpace.simulate.clock import Clock
from outpace.simulate.settings import EngineSettings
from outpace.types import Version

TOKEN_TOLERANCE = 1e-6
"""In tokens: an end this close counts as reached, so that rounding cannot leave a sequence waiting forever."""


class Request:
    """One completion to sample, after `prefill` prompt tokens that are not in the engine's cache."""

    __slots__ = ("began_integral", "began_work", "engine", "min_version", "oldest", "prefill", "ticket", "tokens")

    def __init__(self, tokens: float, prefill: float, min_version: Version) -> None:
        self.tokens = tokens
        self.prefill = prefill
        self.min_version = min_version
        self.engine: ModelledEngine | None = None  # None: waiting for an engine, or done
        self.ticket = 0  # identifies its slot on that engine; 0: no slot
        self.oldest: Version = -1  # version of its oldest token
        self.began_work = 0.0
        self.began_integral = 0.0


class ModelledEngine:
    """One simulated engine. It calls `done` with completed requests, and `done` may submit further ones."""

    def __init__(self, name: str, clock: Clock, settings: EngineSettings, slow: bool, done: Done) -> None:
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
        self._ends: list[tuple[float, int, Request]] = []
        self._tickets = 0
        self._running: dict[int, Request] = {}  # by ticket
        self._waiting: deque[Request] = deque()
        self._wake_at = inf

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def load(self) -> int:
        """The number of running and queued requests."""
        return len(self._running) + len(self._waiting)

    # ------------------------------------------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        self.count_up()
        request.engine = self
        self._waiting.append(request)
        self._fill_slots()
        self._schedule_wake()

    def withdraw(self, request: Request) -> float:
        """Cancel a request. Returns the tokens it had sampled."""
        self.count_up()
        sampled = self._remove(request)
        self._fill_slots()
        self._schedule_wake()
        return sampled

    def lose_everything(self) -> list[tuple[Request, float]]:
        """Fail the engine. Returns its requests, each with the tokens it had sampled."""
        self.count_up()
        lost = [(request, self._remove(request)) for request in [*self._running.values(), *self._waiting]]
        self._ends.clear()
        self.life += 1
        self.serves = False
        return lost

    def mean_version(self, request: Request) -> float:
        """Return the mean version over the tokens of a request that has just completed."""
        work = self._work - request.began_work
        return (self._integral - request.began_integral) / work if work > 0 else float(request.oldest)

    def _remove(self, request: Request) -> float:
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
        self.count_up()
        self.version = version
        self._block(self._settings.pause_s)
        self._schedule_wake()

    def _block(self, seconds: float) -> None:
        """Block decoding for some seconds."""
        self._since = max(self._since, self._clock.now) + seconds
        self.busy_s += seconds

    def count_up(self) -> None:
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

    def _is_current(self, end: tuple[float, int, Request]) -> bool:
        return end[2].engine is self and end[2].ticket == end[1]

    def _wake(self, moment: float) -> None:
        if moment != self._wake_at:
            return  # replaced by an earlier call
        self._wake_at = inf
        self.count_up()
        done: list[Request] = []
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


Done = Callable[[ModelledEngine, list[Request]], None]
"""Called with an engine and the requests it has completed."""
