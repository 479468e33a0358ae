"""MERGED"""

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
"""Polling interval for orders."""

LOOK_AT_LEAVING_S = 0.2
LOOK_AT_JOINING_S = 0.2

Recruit = Callable[[str], Awaitable[tuple[str, str, Engine]]]
"""Starts an engine for the server at this URL, or with a server of its own if ""; returns its name, socket and
proxy."""


class Enrolment:
    """Carries out orders to add or remove engines, and publishes the fleet's state for `outpace fleet`."""

    def __init__(
        self,
        run: Path,
        components: Parts,
        supervisor: Caretaker,
        registry: Roster,
        recruit: Recruit,
        post: Tell,
        report: Callable[[str], None],
        drain_s: float,
    ) -> None:
        """`drain_s`: how long a leaving engine may take to finish its requests."""
        self._components = components
        self._supervisor = supervisor
        self._registry = registry
        self._start_engine = recruit
        self._post = post
        self._report = report
        self._drain_s = drain_s
        self._orders = fleet.OrdersRead(run)
        self._file = fleet.FleetFile(run)
        self._shown: fleet.Fleet | None = None
        self._outcomes: dict[str, fleet.Outcome] = {}  # by order id
        self._joining: list[str] = []  # URLs

    async def watch(self) -> None:
        """Carry out orders for as long as the run lasts."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._show()
                    orders, unreadable = await asyncio.to_thread(self._orders.new)
                    for line in unreadable:
                        self._report(f"ignoring a fleet order that cannot be parsed: {line}")
                    for order in orders:
                        tasks.create_task(self._carry_out(order))
                    await asyncio.sleep(LOOK_S)
        finally:
            self._file.clear()

    async def _carry_out(self, order: fleet.Order) -> None:
        """Carry out an order. A failure is reported and leaves the run unaffected."""
        self._record_outcome(fleet.Outcome(order, "asked"))
        try:
            if order.add is not None:
                await self._add(order)
            if order.remove is not None:
                await self._remove(order)
        except (OutpaceError, OSError) as error:
            self._record_outcome(fleet.Outcome(order, "refused", one_line(error)))
            self._report(f"fleet order failed, the fleet is unchanged: {error}")

    def _record_outcome(self, outcome: fleet.Outcome) -> None:
        """Record the outcome for the sender of the order."""
        self._outcomes.pop(outcome.order.id, None)  # the latest change is kept longest
        self._outcomes[outcome.order.id] = outcome
        for oldest in list(self._outcomes)[: -fleet.KEPT_OUTCOMES]:
            del self._outcomes[oldest]

    # ------------------------------------------------------------------------------------------------ joining

    async def _add(self, order: fleet.Order) -> None:
        url = (order.add or "").rstrip("/")
        if url and self._has(url):
            raise OutpaceError(f"{url} is already an engine of this run")
        self._joining.append(url)
        try:
            name = await self._start(url)
        finally:
            self._joining.remove(url)
        self._record_outcome(fleet.Outcome(order, "asked", engine=name))
        if await self._serves(name):
            self._record_outcome(fleet.Outcome(order, "joined", engine=name))
            self._report(f"{name} has joined")
        else:
            self._record_outcome(fleet.Outcome(order, "refused", f"{name} left before it served", engine=name))

    def _has(self, url: str) -> bool:
        known = filter(None, (*self._joining, *self._components.urls.values()))
        return server_address(url) in map(server_address, known)

    async def _start(self, url: str) -> str:
        self._report(f"adding {url or 'an engine'}")
        name, socket, engine = await self._start_engine(url)
        self._components.engines[name] = engine
        self._components.sockets[name] = socket
        self._components.urls[name] = url
        self._supervisor.enter(name, "engine")
        self._registry.enter(name, socket)
        self._post(ev.EngineJoined(name))
        return name

    async def _serves(self, name: str) -> bool:
        """Return True once the engine has its first weights, False if it leaves before that."""
        while name in self._components.engines:
            if name in self._registry.serving:
                return True
            await asyncio.sleep(LOOK_AT_JOINING_S)
        return False

    # ------------------------------------------------------------------------------------------------ leaving

    async def _remove(self, order: fleet.Order) -> None:
        name = order.remove or ""
        if not self._supervisor.cares_for(name) or name not in self._components.engines:
            names = [member.name for member in self._registry.members if not member.leaving]
            raise OutpaceError(f"no engine {name}, or it is already leaving; engines: {', '.join(names)}")
        if not set(self._registry.serving) - {name}:
            raise OutpaceError(f"{name} cannot leave: no other engine serves; add one first")
        self._report(f"{name} leaves after finishing its requests")
        self._registry.leave(name)
        self._supervisor.leave(name, "has left the run")
        self._post(ev.EngineLost(name))
        await self._supervisor.called_off(name)
        await self._drain(name)
        await self._components.runtime.retire(name)
        for known in (self._components.engines, self._components.sockets, self._components.urls):
            known.pop(name, None)
        self._post(ev.EngineLeft(name))
        self._record_outcome(fleet.Outcome(order, "left", engine=name))
        self._report(f"{name} has left")

    async def _drain(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                while (await self._components.engines[name].stats()).running:  # noqa: ASYNC110 (state of another process)
                    await asyncio.sleep(LOOK_AT_LEAVING_S)
        except (TimeoutError, PartFailed) as error:
            self._report(f"{name} leaves with unfinished requests, which continue elsewhere: {error or 'timed out'}")

    # ------------------------------------------------------------------------------------------------ reporting

    async def _show(self) -> None:
        seats = [
            fleet.Seat(m.name, self._components.urls.get(m.name, ""), m.serves, m.version, m.leaving)
            for m in self._registry.members
        ]
        shown = fleet.Fleet(seats, list(self._outcomes.values()))
        if shown == self._shown:
            return
        try:
            await asyncio.to_thread(self._file.write, shown)
            self._shown = shown
        except OSError as error:  # retried; a full disk may recover
            self._report(f"{fleet.STATE} is out of date: {error.strerror}")
