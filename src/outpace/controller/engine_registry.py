"""Engine registry and fleet membership: which engines sample, and how engines join and leave a running run.

    EngineLoaded, LoadFailed, EngineLost, EngineJoined, EngineLeft, pinned weights ─▶ EngineRegistry ─▶ Worker.fleet

`EngineRegistry` sends every change to all workers, in order, without blocking the driver. A restarted worker gets the
full list. A worker's view may be slightly stale, so engines reject or delay requests that they must not serve.

    add      requested ─▶ started or connected ─▶ EngineJoined: stale ─▶ first load ─▶ serves: joined
    remove   gets no new requests ─▶ finishes its requests, up to a timeout ─▶ stopped ─▶ EngineLeft

`FleetMembership` carries out these orders. Removing an engine interrupts only the requests that it cannot finish in
time; they continue on other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from outpace.config.engines import server_address
from outpace.controller import events as ev
from outpace.controller.supervisor import ComponentSupervisor
from outpace.errors import ComponentFailed, ComponentLost, OutpaceError, one_line
from outpace.monitoring import fleet_orders
from outpace.protocols import Engine, Learner, Producer, Worker
from outpace.runtime.components import Runtime
from outpace.types import FleetMember, Version


class EngineRegistry:
    """Tracks a run's engines and the version each serves, and keeps all workers up to date."""

    def __init__(self, sockets: Mapping[str, str], workers: Mapping[str, Worker | Producer]) -> None:
        """`sockets` maps each engine to the socket on which workers call it."""
        self._members = {name: FleetMember(name, socket, serves=False) for name, socket in sockets.items()}
        self._workers = workers
        self._updates = {name: asyncio.Event() for name in workers}
        self.notify_workers()

    @property
    def members(self) -> list[FleetMember]:
        return list(self._members.values())

    @property
    def serving(self) -> list[str]:
        return [member.name for member in self._members.values() if member.serves]

    def record(self, event: ev.Event, learner: Version) -> None:
        """Apply an event about the engines; `learner` is the learner's version."""
        match event:
            case ev.RunStarted(engines):
                for name, version in engines.items():
                    self._change(name, serves=version == learner, version=version)
            case ev.EngineLoaded(engine, version):
                self._change(engine, serves=not self._members[engine].leaving, version=version)
            case ev.LoadFailed(engine, _, torn) if torn:
                self._change(engine, serves=False)
            case ev.EngineLost(engine) | ev.EngineJoined(engine):
                self._change(engine, serves=False, pinned=None)
            case ev.EngineLeft(engine):
                self._members.pop(engine, None)
                self.notify_workers()

    def add(self, name: str, socket: str) -> None:
        """Add an engine that is about to join."""
        self._members[name] = FleetMember(name, socket, serves=False)

    def leave(self, name: str) -> None:
        """Mark an engine as leaving: it gets no new requests and finishes its current ones."""
        self._change(name, serves=False, leaving=True)

    def stop_serving(self, name: str) -> None:
        """Mark an engine as not serving until its next load."""
        self._change(name, serves=False)

    def pin(self, names: Iterable[str], version: Version | None) -> None:
        """Record that these engines hold `version` as their second weight set; None: they hold none."""
        for name in names:
            if name in self._members:
                self._change(name, pinned=version)

    def all_pinned(self, names: Iterable[str], version: Version) -> bool:
        """Return whether all of these engines still hold `version` pinned."""
        return {member.name for member in self._members.values() if member.pinned == version} >= set(names)

    def _change(self, name: str, **fields: object) -> None:
        if name in self._members:
            self._members[name] = msgspec.structs.replace(self._members[name], **fields)
            self.notify_workers()

    def notify_workers(self) -> None:
        """Schedule an update of all workers, after the fleet changed or a component was restarted."""
        for update in self._updates.values():
            update.set()

    # ------------------------------------------------------------------------------------------------------- workers

    async def keep_workers_updated(self) -> None:
        """Send changes to the workers, each at its own pace, until the run ends."""
        await asyncio.gather(*(self._keep_updated(name) for name in self._workers))

    async def _keep_updated(self, name: str) -> None:
        while True:
            await self._updates[name].wait()
            await self._send_fleet(name)

    async def _send_fleet(self, name: str) -> None:
        """Send the current fleet to this worker. If it is down, its replacement gets it."""
        self._updates[name].clear()
        with contextlib.suppress(ComponentLost):
            await self._workers[name].fleet(self.members)


LEARNER = "learner"
PRODUCER = "producer"

PostEvent = Callable[[ev.Event | BaseException], None]
"""Puts an event into the driver's queue, or the error that must end the run."""


@dataclass(frozen=True)
class Components:
    """The components of a running system."""

    learner: Learner
    engines: dict[str, Engine]
    workers: dict[str, Worker]
    runtime: Runtime
    sockets: dict[str, str] = field(default_factory=dict)  # by engine: where workers call it
    urls: dict[str, str] = field(default_factory=dict)  # by engine: its server, if it was already running
    producer: Producer | None = None
    learner_names: list[str] = field(default_factory=lambda: [LEARNER])  # one per rank

    @property
    def names(self) -> list[str]:
        return [*self.learner_names, *self.engines, *self.samplers]

    @property
    def samplers(self) -> dict[str, Worker | Producer]:
        """The components that call engines."""
        return {**self.workers, **({} if self.producer is None else {PRODUCER: self.producer})}


ORDER_POLL_S = 1.0
"""Polling interval for orders."""

DRAIN_S = 60.0
"""How long a leaving engine may take to finish its requests."""

DRAIN_POLL_S = 0.2
JOIN_POLL_S = 0.2

StartEngine = Callable[[str], Awaitable[tuple[str, str, Engine]]]
"""Starts an engine for the server at this URL, or with a new server if it is empty; returns its name, socket and
proxy."""


class FleetMembership:
    """Carries out orders to add or remove engines, and publishes the fleet's state for `outpace fleet`."""

    def __init__(
        self,
        run: Path,
        components: Components,
        supervisor: ComponentSupervisor,
        registry: EngineRegistry,
        start_engine: StartEngine,
        post: PostEvent,
        report: Callable[[str], None],
    ) -> None:
        self._components = components
        self._supervisor = supervisor
        self._registry = registry
        self._start_engine = start_engine
        self._post = post
        self._report = report
        self._orders = fleet_orders.OrderReader(run)
        self._file = fleet_orders.FleetFile(run)
        self._shown: fleet_orders.FleetState | None = None
        self._outcomes: dict[str, fleet_orders.OrderOutcome] = {}  # by order id
        self._joining: list[str] = []  # URLs

    async def watch(self) -> None:
        """Carry out orders until the run ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._show()
                    orders, unreadable = await asyncio.to_thread(self._orders.read_new)
                    for line in unreadable:
                        self._report(f"ignoring a fleet order that cannot be parsed: {line}")
                    for order in orders:
                        tasks.create_task(self._carry_out(order))
                    await asyncio.sleep(ORDER_POLL_S)
        finally:
            self._file.clear()

    async def _carry_out(self, order: fleet_orders.FleetOrder) -> None:
        """Carry out an order. A failure is reported and leaves the run unaffected."""
        self._record_outcome(fleet_orders.OrderOutcome(order, "asked"))
        try:
            if order.add is not None:
                await self._add(order)
            if order.remove is not None:
                await self._remove(order)
        except (OutpaceError, OSError) as error:
            self._record_outcome(fleet_orders.OrderOutcome(order, "refused", one_line(error)))
            self._report(f"fleet order failed, the fleet is unchanged: {error}")

    def _record_outcome(self, outcome: fleet_orders.OrderOutcome) -> None:
        """Record the outcome for the sender of the order."""
        self._outcomes.pop(outcome.order.id, None)  # re-inserted last, so that the oldest change is dropped first
        self._outcomes[outcome.order.id] = outcome
        for oldest in list(self._outcomes)[: -fleet_orders.KEPT_OUTCOMES]:
            del self._outcomes[oldest]

    # ------------------------------------------------------------------------------------------------ joining

    async def _add(self, order: fleet_orders.FleetOrder) -> None:
        url = (order.add or "").rstrip("/")
        if url and self._has(url):
            raise OutpaceError(f"{url} is already an engine of this run")
        self._joining.append(url)
        try:
            name = await self._start(url)
        finally:
            self._joining.remove(url)
        self._record_outcome(fleet_orders.OrderOutcome(order, "asked", engine=name))
        if await self._serves(name):
            self._record_outcome(fleet_orders.OrderOutcome(order, "joined", engine=name))
            self._report(f"{name} has joined")
        else:
            self._record_outcome(
                fleet_orders.OrderOutcome(order, "refused", f"{name} left before it served", engine=name)
            )

    def _has(self, url: str) -> bool:
        known = filter(None, (*self._joining, *self._components.urls.values()))
        return server_address(url) in map(server_address, known)

    async def _start(self, url: str) -> str:
        self._report(f"adding {url or 'an engine'}")
        name, socket, engine = await self._start_engine(url)
        self._components.engines[name] = engine
        self._components.sockets[name] = socket
        self._components.urls[name] = url
        self._supervisor.add(name)
        self._registry.add(name, socket)
        self._post(ev.EngineJoined(name))
        return name

    async def _serves(self, name: str) -> bool:
        """Return True once the engine has its first weights, False if it leaves before that."""
        while name in self._components.engines:
            if name in self._registry.serving:
                return True
            await asyncio.sleep(JOIN_POLL_S)
        return False

    # ------------------------------------------------------------------------------------------------ leaving

    async def _remove(self, order: fleet_orders.FleetOrder) -> None:
        name = order.remove or ""
        if not self._supervisor.supervises(name) or name not in self._components.engines:
            names = [member.name for member in self._registry.members if not member.leaving]
            raise OutpaceError(f"no engine {name}, or it is already leaving; engines: {', '.join(names)}")
        if not set(self._registry.serving) - {name}:
            raise OutpaceError(f"{name} cannot leave: no other engine serves; add one first")
        self._report(f"{name} leaves after finishing its requests")
        self._registry.leave(name)
        self._supervisor.leave(name, "has left the run")
        self._post(ev.EngineLost(name))
        await self._supervisor.wait_restart_cancelled(name)
        await self._drain(name)
        await self._components.runtime.retire(name)
        for known in (self._components.engines, self._components.sockets, self._components.urls):
            known.pop(name, None)
        self._post(ev.EngineLeft(name))
        self._record_outcome(fleet_orders.OrderOutcome(order, "left", engine=name))
        self._report(f"{name} has left")

    async def _drain(self, name: str) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                while (await self._components.engines[name].stats()).running:  # noqa: ASYNC110 (state of another process)
                    await asyncio.sleep(DRAIN_POLL_S)
        except (TimeoutError, ComponentFailed) as error:
            self._report(f"{name} leaves with unfinished requests, which continue elsewhere: {error or 'timed out'}")

    # ------------------------------------------------------------------------------------------------ reporting

    async def _show(self) -> None:
        seats = [
            fleet_orders.EngineStatus(m.name, self._components.urls.get(m.name, ""), m.serves, m.version, m.leaving)
            for m in self._registry.members
        ]
        shown = fleet_orders.FleetState(seats, list(self._outcomes.values()))
        if shown == self._shown:
            return
        try:
            await asyncio.to_thread(self._file.write, shown)
            self._shown = shown
        except OSError as error:  # retried; a full disk may recover
            self._report(f"{fleet_orders.STATE_FILE} is out of date: {error.strerror}")
