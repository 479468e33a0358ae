"""What the loops of a door share: the server, how it is, what it holds, and the requests under way.

Whoever has seen or changed something calls `react`: requests that cannot go on end as lost, those that may begin do.
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
    name: str  # of the part
    incarnation: str  # of the run: prefixes of another start are not ours
    version: Version = 0  # that the server has from the start; STALE: nobody knows
    context: int | None = None  # longest sequence; None: the server knows
    retries: int = 2
    idle_s: float = 60.0
    control_s: float = 120.0
    probe_s: float = 5.0
    probe_deadline_s: float = 10.0
    kv: Literal["keep", "recompute"] = "keep"
    pins: bool = False  # whether a second version can be held for evaluation
    slots: int = 64
    threads: int = 0  # of the server, where we have started it without an accelerator; 0: the clock counts instead


@dataclass
class Tally:
    """Running totals. Tokens are those of training rollouts."""

    tokens: int = 0
    prefill_tokens: int = 0
    pieces: int = 0
    turns: int = 0
    retries: int = 0


class Desk:
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
        self.doubted = asyncio.Event()  # requests have failed: it is for a probe to say what that means
        self.closed = False
        self.held = False  # we have made the server hold still
        self.holds = 0  # how often

    @property
    def open(self) -> bool:
        """Whether requests may be sent. Not while the server holds still: they would be taken for older than they are,
        and find the prefixes of older weights."""
        return self.health.serves and not self.held

    @contextmanager
    def holding(self) -> Iterator[None]:
        """No request is blamed for the time in which the server holds still because we want it to."""
        self.held = True
        self.holds += 1
        try:
            yield
        finally:
            self.held = False
            now = asyncio.get_running_loop().time()
            for part in self.under_way.parts:
                part.heard = now

    def torn(self, why: str) -> None:
        """Nobody knows what the server holds: what runs there, or waits for it, had better go elsewhere."""
        self.shelf.tear()
        self.health.torn(why)
        self._end_all()
        self.react()

    def disown(self, why: str) -> None:
        """It has other weights than ours, and nobody knows since when: what is under way there is not ours either.

        The controller believes that this engine has what it was given, and would bring it nothing before the next
        version: so the engine ends here, and whoever takes its place is loaded."""
        for part in self.under_way.parts:
            part.void()
        self.health.ended(why)
        self.react()

    def react(self) -> None:
        if self.health.state in ("dead", "draining"):
            self.gate.end("lost")
        if not self.health.finishes:
            self._end_parts()
        if self.health.state == "suspect":
            self.doubted.set()
        if self.health.state == "dead":
            self.died.set()
        self.gate.turn()

    def _end_all(self) -> None:
        self._end_parts()
        self.gate.end("lost")

    def _end_parts(self) -> None:
        for part in self.under_way.parts:
            part.end("lost")
