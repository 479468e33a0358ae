"""One request on its way through a fleet, from one engine to the next until it is answered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from outpace.engines.continuing import Continued
from outpace.engines.fleet.router import Wish


@dataclass(eq=False)
class Flight:
    """`engine` is who has it, `unfit` those that cannot serve it at all, `causes` why it was moved. Until
    `rests_until` it is not sent to an engine that has just failed."""

    wish: Wish
    answer: Continued
    came_at: int  # how many updates of the members there had been
    engine: str | None = None
    aborted: bool = False
    landed: bool = False
    rests_until: float = 0.0
    unfit: set[str] = field(default_factory=set)
    causes: list[str] = field(default_factory=list)
    turned: asyncio.Event = field(default_factory=asyncio.Event)  # set when it gets to an engine, leaves it, or lands

    def at(self, engine: str | None) -> None:
        self.engine = engine
        self._turn()

    def land(self) -> None:
        self.landed = True
        self._turn()

    def _turn(self) -> None:
        self.turned.set()
        self.turned = asyncio.Event()
