"""State of one server engine: the server, its health, its loaded versions and its active requests.

    ActiveRequest    one `generate` call, across all the segments of its output
    RequestSegment   one HTTP request for it: the tokens that came back, and the weight versions that sampled them

After any change call `react`: it ends requests that cannot continue and admits those that can start.

Invariant: a sampled token is kept from the moment it arrives. An abort, an idle timeout or a crash ends a segment but
keeps its tokens. Only tokens sampled by foreign weights are discarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from outpace.engines.servers.door.gate import BusyClock, Gate
from outpace.engines.servers.door.health import HealthMachine
from outpace.engines.servers.door.limits import Limit
from outpace.engines.servers.door.running import UnderWay
from outpace.engines.servers.door.shelf import Shelf
from outpace.engines.servers.spec import Server
from outpace.types import Version


@dataclass(frozen=True)
class DoorSettings:
    name: str  # of the component
    incarnation: str  # of the run; keeps cached prefixes of another run apart
    version: Version = 0  # loaded at start; STALE: unknown
    context: int | None = None  # longest sequence; None: the server decides
    retries: int = 2
    idle_s: float = 60.0
    control_s: float = 120.0
    probe_s: float = 5.0
    probe_deadline_s: float = 10.0
    kv: Literal["keep", "recompute"] = "keep"
    pins: bool = False  # whether a second version can be loaded for evaluation
    slots: int = 64
    threads: int = 0  # CPU threads of a launched CPU server; 0: report wall-clock time instead of CPU time


@dataclass
class Tally:
    """Running totals. Token counts cover training rollouts only."""

    tokens: int = 0
    prefill_tokens: int = 0
    pieces: int = 0
    turns: int = 0
    retries: int = 0


class Desk:
    """State shared by RequestRunner, WeightUpdater and HealthMonitor. Call `react` after changing any of it."""

    def __init__(self, server: Server, health: HealthMachine, limit: Limit, settings: DoorSettings) -> None:
        self.server = server
        self.health = health
        self.limit = limit
        self.settings = settings
        self.shelf = Shelf(settings.version)
        self.gate = Gate(lambda: limit.value)
        self.under_way = UnderWay()
        self.tally = Tally()
        self.busy, self.eval_busy = BusyClock(), BusyClock()
        self.died = asyncio.Event()
        self.doubted = asyncio.Event()  # requests failed; probe soon to find out why
        self.closed = False
        self.held = False  # by a weight update of ours
        self.holds = 0  # number of pauses so far

    @property
    def open(self) -> bool:
        """Whether requests may be sent. Not during a pause: they would be labeled with the old version and could hit
        prefixes cached under the old weights."""
        return self.health.serves and not self.held

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Mark the server as paused by us. Paused time does not count towards the idle timeout of any request."""
        self.held = True
        self.holds += 1
        try:
            yield
        finally:
            self.held = False
            now = asyncio.get_running_loop().time()
            for segment in self.under_way.parts:
                segment.heard = now

    def torn(self, why: str) -> None:
        """The server's weights are unknown: end running and waiting requests as lost, so they continue elsewhere."""
        self.shelf.tear()
        self.health.torn(why)
        self._end_all()
        self.react()

    def disown(self, why: str) -> None:
        """The server has foreign weights, since an unknown time: discard the output of in-flight requests and die.

        Dying is required: the controller assumes this engine still has the version it loaded and would send nothing
        before the next one. The replacement engine gets a fresh load."""
        for segment in self.under_way.parts:
            segment.void()
        self.health.ended(why)
        self.react()

    def react(self) -> None:
        """Apply a state change: end requests that cannot continue, admit those that can start."""
        if self.health.state in ("dead", "draining"):
            self.gate.end("lost")
        if not self.health.finishes:
            self._end_segments()
        if self.health.state == "suspect":
            self.doubted.set()
        if self.health.state == "dead":
            self.died.set()
        self.gate.turn()

    def _end_all(self) -> None:
        self._end_segments()
        self.gate.end("lost")

    def _end_segments(self) -> None:
        for segment in self.under_way.parts:
            segment.end("lost")
