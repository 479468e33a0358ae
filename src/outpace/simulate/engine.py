"""One engine as a queue that all running sequences share: each gets the same rate, which falls as they get more.

Every sequence advances alike, so one number, `work`, tells how many tokens a sequence that ran all the time would have.
One that wants L tokens and starts at work w ends at work w + L: an arrival or a departure changes the rate at which
work grows, and no end has to be moved. A heap of ends makes every event O(log n).

The version under which tokens are sampled is integrated over work in the same way, so that the mean version of a
sequence's tokens is one subtraction, however many swaps it saw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from outpace.simulate.clock import Clock
from outpace.simulate.settings import EngineSettings
from outpace.types import Version

NEARLY = 1e-6
"""Tokens: an end this close has been reached. Rounding must not leave a sequence waiting for ever."""


class Request:
    """One answer to be sampled, after `prefill` prompt tokens that the engine has not read yet."""

    __slots__ = ("began_integral", "began_work", "engine", "min_version", "oldest", "prefill", "ticket", "tokens")

    def __init__(self, tokens: float, prefill: float, min_version: Version) -> None:
        self.tokens = tokens
        self.prefill = prefill
        self.min_version = min_version
        self.engine: ModelledEngine | None = None  # None: it waits for an engine, or is over
        self.ticket = 0  # of the slot it has on that engine; 0: none
        self.oldest: Version = -1  # of its tokens
        self.began_work = 0.0
        self.began_integral = 0.0


Done = Callable[["ModelledEngine", list[Request]], None]


class ModelledEngine:
    """`done` hears of requests that have been answered, and may submit others."""

    def __init__(self, name: str, clock: Clock, settings: EngineSettings, slow: bool, done: Done) -> None:
        self.name = name
        self.version: Version = -1
        self.life = 0  # how often it has gone: what was asked of an earlier life is void
        self.serves = False
        self.slowness = settings.slow_factor if slow else 1.0
        self.busy_s = 0.0
        self.slot_s = 0.0  # seconds of all its slots in use, added up
        self._clock = clock
        self._settings = settings
        self._done = done
        self._work = 0.0
        self._integral = 0.0  # of the version over work
        self._since = clock.now  # up to when work is counted; later than now while the engine is held up
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
        """Requests that run or wait in line."""
        return len(self._running) + len(self._waiting)

    # ------------------------------------------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        self.count_up()
        request.engine = self
        self._waiting.append(request)
        self._fill_slots()
        self._plan_waking()

    def withdraw(self, request: Request) -> float:
        """Nobody wants it any more; returns the tokens it had."""
        self.count_up()
        had = self._forget(request)
        self._fill_slots()
        self._plan_waking()
        return had

    def lose_everything(self) -> list[tuple[Request, float]]:
        """The engine has gone: its requests, and the tokens that each of them had."""
        self.count_up()
        lost = [(request, self._forget(request)) for request in [*self._running.values(), *self._waiting]]
        self._ends.clear()
        self.life += 1
        self.serves = False
        return lost

    def mean_version(self, request: Request) -> float:
        """Over the tokens of a request that has this moment been answered."""
        work = self._work - request.began_work
        return (self._integral - request.began_integral) / work if work > 0 else float(request.oldest)

    def _forget(self, request: Request) -> float:
        ticket, request.engine, request.ticket = request.ticket, None, 0
        if ticket:
            del self._running[ticket]  # its end stays in the heap and is passed over
            return min(request.tokens, self._work - request.began_work)
        self._waiting.remove(request)
        return 0.0

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self._settings.slots:
            request = self._waiting.popleft()
            if request.prefill:
                self._hold(request.prefill / self._settings.prefill_tok_s * self.slowness)
            request.began_work, request.began_integral, request.oldest = self._work, self._integral, self.version
            self._tickets = request.ticket = self._tickets + 1
            self._running[request.ticket] = request
            heappush(self._ends, (self._work + request.tokens, request.ticket, request))

    # ------------------------------------------------------------------------------------------------ weights and time

    def swap(self, version: Version) -> None:
        self.count_up()
        self.version = version
        self._hold(self._settings.pause_s)
        self._plan_waking()

    def _hold(self, seconds: float) -> None:
        """Nothing is decoded for so long."""
        self._since = max(self._since, self._clock.now) + seconds
        self.busy_s += seconds

    def count_up(self) -> None:
        """Bring work up to now."""
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
        """Seconds from one token of a sequence to its next."""
        return (self._settings.step_s + self._settings.sequence_s * running) * self.slowness

    def _plan_waking(self) -> None:
        """Be called when the next sequence ends. A call that comes too early asks again, so arrivals cost nothing."""
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
            return  # an earlier call took its place
        self._wake_at = inf
        self.count_up()
        done: list[Request] = []
        while self._ends and self._ends[0][0] <= self._work + NEARLY:
            end = heappop(self._ends)
            if self._is_current(end):
                request = end[2]
                del self._running[request.ticket]
                request.engine, request.ticket = None, 0
                done.append(request)
        self._fill_slots()
        self._plan_waking()
        if done:
            self._done(self, done)
