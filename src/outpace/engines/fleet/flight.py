"""MERGED"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from outpace.engines.continuing import Continued
from outpace.engines.fleet.router import Wish


@dataclass(eq=False)
class Flight:
    """A request in the fleet and the tokens received so far.

    engine: the engine that runs it now.
    excluded: engines that cannot serve it at all.
    causes: why it was moved.
    retry_at: before this time it is not sent to an engine that has just failed.
    """

    wish: Wish
    answer: Continued
    came_at: int  # number of member updates when it arrived
    engine: str | None = None
    aborted: bool = False
    landed: bool = False
    rests_until: float = 0.0
    unfit: set[str] = field(default_factory=set)
    causes: list[str] = field(default_factory=list)
    turned: asyncio.Event = field(default_factory=asyncio.Event)  # set when `engine` changes or the request finishes

    def at(self, engine: str | None) -> None:
        self.engine = engine
        self._notify()

    def land(self) -> None:
        self.landed = True
        self._notify()

    def _notify(self) -> None:
        self.turned.set()
        self.turned = asyncio.Event()
