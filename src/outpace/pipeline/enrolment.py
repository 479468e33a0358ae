"""Engines that come and go while the run lasts, as people ask for it.

    add      asked ─▶ started or connected ─▶ EngineJoined: stale ─▶ its first load ─▶ serves: it has joined
    remove   gets nothing more ─▶ finishes what it has, within a bound ─▶ stopped ─▶ EngineLeft

Leaving costs nobody more than the requests that an engine could not finish in time: these are gone on with elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from outpace.config.urls import server_address
from outpace.errors import OutpaceError, PartFailed, one_line
from outpace.observe import fleet
from outpace.pipeline import events as ev
from outpace.pipeline.caretaker import Caretaker
from outpace.pipeline.roster import Roster
from outpace.pipeline.staff import Parts, Tell
from outpace.protocols import Engine

LOOK_S = 1.0
"""How often orders are looked for."""

LOOK_AT_LEAVING_S = 0.2
LOOK_AT_JOINING_S = 0.2

Recruit = Callable[[str], Awaitable[tuple[str, str, Engine]]]
"""Brings an engine to life over the server at this URL, or with one of its own: its name, its socket, and itself."""


class Enrolment:
    def __init__(
        self,
        run: Path,
        parts: Parts,
        care: Caretaker,
        roster: Roster,
        recruit: Recruit,
        tell: Tell,
        say: Callable[[str], None],
        patience_s: float,
    ) -> None:
        """`patience_s`: how long an engine that leaves may take to finish what it has."""
        self._parts = parts
        self._care = care
        self._roster = roster
        self._recruit = recruit
        self._tell = tell
        self._say = say
        self._patience_s = patience_s
        self._orders = fleet.OrdersRead(run)
        self._file = fleet.FleetFile(run)
        self._shown: fleet.Fleet | None = None
        self._outcomes: dict[str, fleet.Outcome] = {}  # by id of the order
        self._joining: list[str] = []  # URLs

    async def watch(self) -> None:
        """For as long as the run lasts."""
        try:
            async with asyncio.TaskGroup() as at_work:
                while True:
                    await self._show()
                    orders, rubbish = await asyncio.to_thread(self._orders.new)
                    for line in rubbish:
                        self._say(f"an order for the fleet cannot be read: {line}")
                    for order in orders:
                        at_work.create_task(self._carry_out(order))
                    await asyncio.sleep(LOOK_S)
        finally:
            self._file.clear()

    async def _carry_out(self, order: fleet.Order) -> None:
        """What cannot be done is said, and harms nobody."""
        self._note(fleet.Outcome(order, "asked"))
        try:
            if order.add is not None:
                await self._add(order)
            if order.remove is not None:
                await self._remove(order)
        except (OutpaceError, OSError) as error:
            self._note(fleet.Outcome(order, "refused", one_line(error)))
            self._say(f"the fleet stays as it is: {error}")

    def _note(self, outcome: fleet.Outcome) -> None:
        """For whoever gave the order."""
        self._outcomes.pop(outcome.order.id, None)  # what has changed last is kept longest
        self._outcomes[outcome.order.id] = outcome
        for oldest in list(self._outcomes)[: -fleet.KEPT_OUTCOMES]:
            del self._outcomes[oldest]

    # ------------------------------------------------------------------------------------------------ coming

    async def _add(self, order: fleet.Order) -> None:
        url = (order.add or "").rstrip("/")
        if url and self._has(url):
            raise OutpaceError(f"{url} is one of the engines already")
        self._joining.append(url)
        try:
            name = await self._let_in(url)
        finally:
            self._joining.remove(url)
        self._note(fleet.Outcome(order, "asked", engine=name))
        if await self._serves(name):
            self._note(fleet.Outcome(order, "joined", engine=name))
            self._say(f"{name} has joined")
        else:
            self._note(fleet.Outcome(order, "refused", f"{name} has left before it served", engine=name))

    def _has(self, url: str) -> bool:
        return server_address(url) in map(server_address, filter(None, (*self._joining, *self._parts.urls.values())))

    async def _let_in(self, url: str) -> str:
        self._say(f"asked to add {url or 'an engine'}")
        name, socket, engine = await self._recruit(url)
        self._parts.engines[name] = engine
        self._parts.sockets[name] = socket
        self._parts.urls[name] = url
        self._care.enter(name, "engine")
        self._roster.enter(name, socket)
        self._tell(ev.EngineJoined(name))
        return name

    async def _serves(self, name: str) -> bool:
        """Once it has its first weights; never, if it leaves before."""
        while name in self._parts.engines:
            if name in self._roster.serving:
                return True
            await asyncio.sleep(LOOK_AT_JOINING_S)
        return False

    # ------------------------------------------------------------------------------------------------ going

    async def _remove(self, order: fleet.Order) -> None:
        name = order.remove or ""
        if not self._care.cares_for(name) or name not in self._parts.engines:
            names = [member.name for member in self._roster.members if not member.leaving]
            raise OutpaceError(f"there is no engine {name}, or it leaves already; there are {', '.join(names)}")
        if not set(self._roster.serving) - {name}:
            raise OutpaceError(f"{name} cannot leave: nobody else serves")
        self._say(f"{name} leaves, when it has finished what it has")
        self._roster.leave(name)
        self._care.leave(name, "has left the run")
        self._tell(ev.EngineLost(name))
        await self._care.called_off(name)
        await self._idle(name)
        await self._parts.runtime.retire(name)
        for known in (self._parts.engines, self._parts.sockets, self._parts.urls):
            known.pop(name, None)
        self._tell(ev.EngineLeft(name))
        self._note(fleet.Outcome(order, "left", engine=name))
        self._say(f"{name} has left")

    async def _idle(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                while (await self._parts.engines[name].stats()).running:  # noqa: ASYNC110 (it is another process)
                    await asyncio.sleep(LOOK_AT_LEAVING_S)
        except (TimeoutError, PartFailed) as error:
            self._say(f"{name} leaves, and others go on with what it had: {error or 'it took too long'}")

    # ------------------------------------------------------------------------------------------------ for people

    async def _show(self) -> None:
        seats = [
            fleet.Seat(m.name, self._parts.urls.get(m.name, ""), m.serves, m.version, m.leaving)
            for m in self._roster.members
        ]
        shown = fleet.Fleet(seats, list(self._outcomes.values()))
        if shown == self._shown:
            return
        try:
            await asyncio.to_thread(self._file.write, shown)
            self._shown = shown
        except OSError as error:  # a full disk passes
            self._say(f"{fleet.STATE} is out of date: {error.strerror}")
