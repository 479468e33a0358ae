"""Fleet: many engines behind one `Engine` interface, with failover.

                 ┌── no engine can serve it: wait ◀─┐
    request ─▶ choose ─▶ engine ─▶ result           │
                 ▲          ├─▶ interrupted ─▶ continue from there, on this engine
                 │          ├─▶ lost, with partial output ─▶ continue from there ─┐
                 │          └─▶ lost, with all its output ─▶ start again ─────────┤
                 └────────────────────────────────────────────────────────────────┘

Invariants
- Only the fleet continues requests. An engine's `generate` is a single attempt; if it is lost, the request continues
  from the tokens already received, on another engine or on the same one after it reconnects. No token is sampled twice;
  each keeps its logprob and version. The caller sees one result.
- A request interrupted for a weight update returns to its engine at once. This does not count as a failure.
- A request moves at most MAX_MOVES times, then fails with all causes: the request itself may be crashing the engines.
  Waiting for an engine is not a move. An error that a restart would not fix excludes the engine for this request, and
  is raised when no engine is left.
- An aborted request ends at once with the tokens received so far.
- There is no polling: waiting requests wake when the members change, a connection changes, or they are aborted. A
  request returns to an engine that has just failed only if no other is available, with exponential backoff.
- Connections to joining engines are opened in the background. This may take as long as a component start; until then,
  and while a connection is lost, the engine is unreachable.
- Everything runs on one event loop; state is consistent at every await.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from outpace.engines.generation import ContinuedGeneration, Decode
from outpace.engines.router import RequestNeeds, Router
from outpace.errors import (
    ComponentFailed,
    ComponentLost,
    ContextFull,
    EngineClosed,
    OutpaceError,
    RequestFailed,
    one_line,
    plural,
)
from outpace.protocols import Engine
from outpace.runtime.async_tools import backoff_s
from outpace.runtime.diagnostics import waiting
from outpace.runtime.reconnect import is_connected, on_connection_change
from outpace.runtime.rpc import close_proxy
from outpace.types import EngineStats, FleetMember, Generation, Ints, LoadReport, Manifest, Sampling, Version


@dataclass(eq=False)
class InFlightRequest:
    """A request in the fleet and the tokens received so far.

    engine: the engine that runs it now.
    interrupted_by: the engine that has just interrupted it and keeps a slot for it.
    excluded: engines that cannot serve it at all.
    causes: the reason for each move.
    retry_at: earliest time to send it to an engine that has just failed.
    """

    needs: RequestNeeds
    answer: ContinuedGeneration
    updates_at_arrival: int  # number of member updates when it arrived
    engine: str | None = None
    interrupted_by: str | None = None
    aborted: bool = False
    finished: bool = False
    retry_at: float = 0.0
    excluded: set[str] = field(default_factory=set)
    causes: list[str] = field(default_factory=list)
    _changed: asyncio.Event | None = None

    @property
    def changed(self) -> asyncio.Event:
        """Set when `engine` changes or the request finishes."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def set_engine(self, engine: str | None) -> None:
        self.engine = engine
        self._notify()

    def finish(self) -> None:
        self.finished = True
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


Connect = Callable[[FleetMember], Awaitable[Engine]]


async def refuse_connection(member: FleetMember) -> Engine:
    raise ComponentFailed(
        member.name, "is not one of the engines given to this process, and there is no way to connect"
    )


class Connections:
    """Connections to the engines of a fleet: opened in the background when an engine joins, kept while in use."""

    def __init__(self, engines: Mapping[str, Engine], connect: Connect, changed: Callable[[], None]) -> None:
        """`changed` is called whenever an engine becomes reachable or unreachable."""
        self._engines: dict[str, Engine] = {}
        self._connect = connect
        self._changed = changed
        self._connecting: dict[str, asyncio.Task[None]] = {}
        for name, engine in engines.items():
            self._add(name, engine)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def is_reachable(self, name: str) -> bool:
        return name in self._engines and is_connected(self._engines[name])

    def connect_new(self, members: Sequence[FleetMember]) -> None:
        """Start connecting to members without a connection."""
        for member in members:
            if member.name not in self._engines and member.name not in self._connecting:
                self._connecting[member.name] = asyncio.create_task(self._open(member), name=f"connect {member.name}")

    def keep_only(self, names: Collection[str]) -> None:
        for name in self._connecting.keys() - set(names):
            self._connecting.pop(name).cancel()
        for name in self._engines.keys() - set(names):
            close_proxy(self._engines.pop(name))

    def close(self) -> None:
        self.keep_only(())

    def _add(self, name: str, engine: Engine) -> None:
        self._engines[name] = engine
        on_connection_change(engine, self._changed)

    async def _open(self, member: FleetMember) -> None:
        try:
            self._add(member.name, await self._connect(member))
        except (OutpaceError, OSError) as error:
            message = "cannot connect to engine %s, will retry at the next member update: %s"
            logging.getLogger(__name__).warning(message, member.name, error)
        finally:
            if self._connecting.get(member.name) is asyncio.current_task():
                del self._connecting[member.name]
        self._changed()


log = logging.getLogger(__name__)

MAX_MOVES = 8
"""Number of engine failures that a request survives."""

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0
"""Backoff before a request returns to an engine that has just failed, when there is no other. The total over all
retries is long enough for the health check to detect a server that loses every request."""

ANY_VERSION: Version = sys.maxsize
"""Version of engines without member information: they check `min_version` themselves."""


class EngineFleet:
    """Implements the part of `outpace.protocols.Engine` that a rollout worker needs."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        members: Sequence[FleetMember] | None = None,
        connect: Connect = refuse_connection,
        decode: Decode | None = None,
    ) -> None:
        """Set up the fleet.

        engines: already connected engines; `connect` connects to those that join later.
        members: current members. If None, all of `engines` serve any version until the first `update`.
        decode: decodes token ids, to find stop strings that span two parts of a continued request.
        """
        self._connections = Connections(engines, connect, self._wake_waiting)
        default_members = [FleetMember(name, "", True, version=ANY_VERSION) for name in engines]
        self._router = Router(default_members if members is None else list(members))
        self._decode = decode
        self._in_flight: dict[str, InFlightRequest] = {}
        self._changed = asyncio.Event()
        self._updates = 0

    async def update(self, members: Sequence[FleetMember]) -> None:
        """Replace the member list. Engines that left finish their in-flight requests."""
        self._updates += 1
        self._router.update(members)
        self._connections.connect_new(members)
        self._close_unused()
        self._wake_waiting()

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        if request_id in self._in_flight:
            raise RequestFailed(f"request {request_id} is already in flight")
        needs = RequestNeeds(request_id, min_version, pinned)
        request = InFlightRequest(
            needs, ContinuedGeneration(token_ids, sampling, self._decode), updates_at_arrival=self._updates
        )
        self._in_flight[request_id] = request
        try:
            while (engine := await self._engine_for(request)) is not None:
                if (answer := await self._try_engine(request, engine)) is not None:
                    return answer
            return request.answer.generation("aborted")
        finally:
            del self._in_flight[request_id]
            request.finish()

    async def abort(self, request_ids: list[str]) -> None:
        at_engines: defaultdict[str, list[str]] = defaultdict(list)
        for request_id in request_ids:
            request = self._in_flight.get(request_id)
            if request is not None:
                request.aborted = True
                if request.engine is not None:
                    at_engines[request.engine].append(request_id)
        self._wake_waiting()
        await asyncio.gather(*(self._abort_at(engine, ids) for engine, ids in at_engines.items()))

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        request = self._in_flight.get(request_id)
        while request is not None and not request.finished:
            changed = request.changed
            known = request.answer.generation("lost").tokens[after:]
            found = known if len(known) else await self._stream_from(request, after - len(request.answer))
            if len(found):
                return found
            if changed is request.changed:  # this engine has no more tokens: the request moves or ends
                await changed.wait()
        return np.zeros(0, dtype=np.int32)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError("the controller loads each engine directly, not through the fleet")

    async def release_pinned(self) -> None:
        raise NotImplementedError("the controller loads each engine directly, not through the fleet")

    async def stats(self) -> EngineStats:
        raise NotImplementedError("the controller reads the stats of each engine directly, not through the fleet")

    async def close(self) -> None:
        self._connections.close()

    async def _engine_for(self, request: InFlightRequest) -> str | None:
        """Wait for an engine that can serve the request. Return None if it is aborted."""
        while not request.aborted:
            changed, names, is_reachable = self._changed, self._router.names, self._connections.is_reachable
            excluded = request.excluded.union([name for name in names if not is_reachable(name)])
            self._check_servable(request, names)
            now = time.monotonic()
            interrupted_by, request.interrupted_by = request.interrupted_by, None
            if interrupted_by is not None and self._router.accepts(interrupted_by, excluded):
                return interrupted_by
            engine = self._router.choose(request.needs, now, excluded)
            if engine is not None and (now >= request.retry_at or self._router.is_trusted(engine, now)):
                return engine
            with waiting(f"request {request.needs.request_id}: for an engine"):
                await _wait(changed, None if engine is None else request.retry_at - now)
        return None

    def _check_servable(self, request: InFlightRequest, names: set[str]) -> None:
        """Raise if no engine can ever serve the request: all failed it permanently, or none has its pinned version.

        The pinned version is checked only after a member update since the request arrived: the request may have
        overtaken the update that announces the version."""
        needs = request.needs
        if names and request.excluded >= names:
            causes = "; ".join(dict.fromkeys(request.causes))
            raise RequestFailed(f"request {needs.request_id}: no engine left that can serve it: {causes}")
        if self._updates > request.updates_at_arrival and self._router.can_never_serve(needs):
            raise RequestFailed(f"request {needs.request_id}: no engine has version {needs.pinned} pinned")

    async def _try_engine(self, request: InFlightRequest, engine: str) -> Generation | None:
        """Return the result, or None if the request has to continue on another engine."""
        needs, answer = request.needs, request.answer
        self._router.sent(engine, needs)
        request.set_engine(engine)
        try:
            part = await self._connections[engine].generate(
                needs.request_id, answer.prompt, answer.sampling, needs.min_version, needs.pinned
            )
        except ContextFull:
            if not len(answer):
                raise
            return answer.generation("length")  # filled by the earlier parts
        except EngineClosed as error:  # sent before this worker received the member update
            self._record_failure(request, engine, ComponentLost(engine, str(error)))
            return None
        except ComponentFailed as error:
            self._record_failure(request, engine, error)
            return None
        else:
            return self._add_part(request, engine, part)
        finally:
            request.set_engine(None)
            self._router.ended(engine)
            if engine not in self._router.load:  # it may have left
                self._close_unused()

    def _add_part(self, request: InFlightRequest, engine: str, part: Generation) -> Generation | None:
        answer, partial = request.answer, part.stop in ("interrupted", "lost")
        if not partial and not len(answer):
            return part
        answer.add(part)
        if not partial:
            return answer.generation("stop" if answer.ended == "stop" else part.stop)
        if answer.ended is not None:
            return answer.generation(answer.ended)
        if part.stop == "interrupted":
            request.interrupted_by = engine
        else:
            self._record_failure(request, engine, ComponentLost(engine, "lost the request"))
        return None

    def _record_failure(self, request: InFlightRequest, engine: str, error: ComponentFailed) -> None:
        """Record the failure. Raise if the request cannot continue."""
        if request.aborted:
            return
        self._router.failed(engine, time.monotonic())
        request.causes.append(one_line(error))
        if not isinstance(error, ComponentLost):
            request.excluded.add(engine)
            if request.excluded >= self._router.names:
                raise error
        request_id = request.needs.request_id
        if len(request.causes) > MAX_MOVES:
            causes = "; ".join(dict.fromkeys(request.causes))
            raise RequestFailed(
                f"request {request_id} was lost {plural(len(request.causes), 'time')}: {causes}"
            ) from error
        request.retry_at = time.monotonic() + backoff_s(len(request.causes), FIRST_BACKOFF_S, MAX_BACKOFF_S)
        log.info("request %s continues from token %d: %s", request_id, len(request.answer), error)

    async def _stream_from(self, request: InFlightRequest, after: int) -> Ints:
        """Return new tokens from the engine that runs the request; empty if there is none or it is lost."""
        try:
            if request.engine is not None:
                return await self._connections[request.engine].stream_tokens(request.needs.request_id, after)
        except OutpaceError as error:
            log.debug("cannot stream request %s: %s", request.needs.request_id, error)
        return np.zeros(0, dtype=np.int32)

    async def _abort_at(self, engine: str, request_ids: list[str]) -> None:
        try:
            if self._connections.is_reachable(engine):
                await self._connections[engine].abort(request_ids)
        except ComponentLost:  # its requests end with the tokens received so far
            log.info("engine %s was lost during an abort", engine)

    def _close_unused(self) -> None:
        self._connections.keep_only(self._router.names | self._router.load.keys())

    def _wake_waiting(self) -> None:
        """Wake all waiting requests."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for the event, at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
