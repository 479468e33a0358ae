"""Fleet: many engines behind one `Engine` interface, with failover.

                 ┌── no engine can serve it: wait ◀─┐
    request ─▶ choose ─▶ engine ─▶ result           │
                 ▲          ├─▶ lost, with partial output ─▶ continue from there ─┐
                 │          └─▶ lost, with all its output ─▶ start again ─────────┤
                 └────────────────────────────────────────────────────────────────┘

Invariants
- A request lost by an engine continues on another engine, or on the same one after it reconnects, from the tokens
  already received. No token is sampled twice; each keeps its logprob and version. The caller sees one result.
- A request moves at most MAX_MOVES times, then fails with all causes: the request itself may be crashing the engines.
  Waiting for an engine is not a move. An error that a restart would not fix moves the request to each other engine
  once, and is raised when none is left.
- An aborted request ends at once with the tokens received so far.
- There is no polling: waiting requests wake when the members change, a connection changes, or they are aborted. A
  request retries an engine that has just failed only if there is no other, with exponential backoff.
- Connections to engines that join are opened in the background, which may take as long as a component takes to start.
  Until then, and while a connection is lost, the engine is unreachable.
- Everything runs on one event loop; no state is inconsistent across an await.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from outpace.engines.continuing import Continued
from outpace.engines.embedded.stopping import Decode
from outpace.engines.fleet.flight import Flight
from outpace.engines.fleet.links import Connect, Links, no_way
from outpace.engines.fleet.router import Router, Wish
from outpace.errors import ContextFull, OutpaceError, PartFailed, PartLost, RequestFailed, one_line
from outpace.protocols import Engine
from outpace.runtime.waits import waiting
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Member, Sampling, Version
from outpace.wording import plural

log = logging.getLogger(__name__)

MAX_MOVES = 8
"""Number of engine failures that a request survives."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
"""Backoff before a request returns to an engine that has just failed, when there is no other. The total over all
retries is long enough for the health check to detect a server that loses every request."""

ANY_VERSION: Version = sys.maxsize
"""Version of engines without member information: they check `min_version` themselves."""


def pause_s(failures: int) -> float:
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S)


class Fleet:
    """Implements the part of `outpace.protocols.Engine` that a rollout worker needs."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        members: Sequence[Member] | None = None,
        connect: Connect = no_way,
        decode: Decode | None = None,
    ) -> None:
        """Set up the fleet.

        engines: already connected engines; `connect` connects to those that join later.
        members: current members. If None, all of `engines` serve any version until the first `update`.
        decode: decodes token ids, to find stop strings that span two parts of a continued request.
        """
        self._links = Links(engines, connect, self._wake_waiting)
        default_members = [Member(name, "", True, version=ANY_VERSION) for name in engines]
        self._router = Router(default_members if members is None else list(members))
        self._decode = decode
        self._in_flight: dict[str, Flight] = {}
        self._changed = asyncio.Event()
        self._updates = 0
        self.moves = 0  # number of times a request was continued after an engine lost it

    async def update(self, members: Sequence[Member]) -> None:
        """Replace the member list. Engines that left finish their in-flight requests."""
        self._updates += 1
        self._router.update(members)
        self._links.call(members)
        self._close_unused()
        self._wake_waiting()

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        if request_id in self._in_flight:
            raise RequestFailed(f"request {request_id} is already in flight")
        wish = Wish(request_id, min_version, pinned)
        request = Flight(wish, Continued(token_ids, sampling, self._decode), came_at=self._updates)
        self._in_flight[request_id] = request
        try:
            while (engine := await self._engine_for(request)) is not None:
                if (answer := await self._try_engine(request, engine)) is not None:
                    return answer
            return request.answer.generation("aborted")
        finally:
            del self._in_flight[request_id]
            request.land()

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

    async def peek(self, request_id: str, after: int) -> Ints:
        request = self._in_flight.get(request_id)
        while request is not None and not request.landed:
            turned = request.turned
            known = request.answer.generation("lost").tokens[after:]
            found = known if len(known) else await self._stream_from(request, after - len(request.answer))
            if len(found):
                return found
            if turned is request.turned:  # this engine has no more tokens: the request moves or ends
                await turned.wait()
        return np.zeros(0, dtype=np.int32)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError("the controller loads each engine directly, not through the fleet")

    async def release_pinned(self) -> None:
        raise NotImplementedError("the controller loads each engine directly, not through the fleet")

    async def stats(self) -> EngineStats:
        raise NotImplementedError("the controller reads the stats of each engine directly, not through the fleet")

    async def close(self) -> None:
        self._links.close()

    async def _engine_for(self, request: Flight) -> str | None:
        """Wait for an engine that can serve the request. Return None if it is aborted."""
        while not request.aborted:
            changed = self._changed
            names = {member.name for member in self._router.members}
            excluded = request.unfit | {name for name in names if not self._links.reaches(name)}
            self._check_servable(request, names)
            now = time.monotonic()
            engine = self._router.choose(request.wish, now, excluded)
            if engine is not None and (now >= request.rests_until or self._router.trusts(engine, now)):
                return engine
            with waiting(f"request {request.wish.request_id}: for an engine"):
                await _wait(changed, None if engine is None else request.rests_until - now)
        return None

    def _check_servable(self, request: Flight, names: set[str]) -> None:
        """Raise if no engine can ever serve the request: all failed it permanently, or none has its pinned version.

        The pinned version is checked only after a member update since the request arrived: the request may have
        overtaken the update that announces the version."""
        wish = request.wish
        if names and request.unfit >= names:
            causes = "; ".join(dict.fromkeys(request.causes))
            raise RequestFailed(f"request {wish.request_id}: no engine left that can serve it: {causes}")
        if self._updates > request.came_at and self._router.waits_in_vain(wish):
            raise RequestFailed(f"request {wish.request_id}: no engine has version {wish.pinned} pinned")

    async def _try_engine(self, request: Flight, engine: str) -> Generation | None:
        """Return the result, or None if the request has to continue on another engine."""
        wish, answer = request.wish, request.answer
        with self._running_at(request, engine):
            try:
                part = await self._links[engine].generate(
                    wish.request_id, answer.prompt, answer.sampling, wish.min_version, wish.pinned
                )
            except ContextFull:
                if not len(answer):
                    raise
                return answer.generation("length")  # filled by the earlier parts
            except PartFailed as error:
                self._record_failure(request, engine, error)
                return None
            return self._add_part(request, engine, part)

    def _add_part(self, request: Flight, engine: str, part: Generation) -> Generation | None:
        answer = request.answer
        if part.stop != "lost" and not len(answer):
            return part
        answer.add(part)
        ended = answer.ended
        if part.stop != "lost":
            return answer.generation("stop" if ended == "stop" else part.stop)
        if ended is not None:
            return answer.generation(ended)
        self._record_failure(request, engine, PartLost(engine, "lost the request"))
        return None

    def _record_failure(self, request: Flight, engine: str, error: PartFailed) -> None:
        """Record the failure. Raise if the request cannot continue."""
        if request.aborted:
            return
        self._router.failed(engine, time.monotonic())
        request.causes.append(one_line(error))
        if not isinstance(error, PartLost):
            request.unfit.add(engine)
            if request.unfit >= {member.name for member in self._router.members}:
                raise error
        request_id = request.wish.request_id
        if len(request.causes) > MAX_MOVES:
            causes = "; ".join(dict.fromkeys(request.causes))
            raise RequestFailed(
                f"request {request_id} was lost {plural(len(request.causes), 'time')}: {causes}"
            ) from error
        self.moves += 1
        request.rests_until = time.monotonic() + pause_s(len(request.causes))
        log.info("request %s continues from token %d: %s", request_id, len(request.answer), error)

    async def _stream_from(self, request: Flight, after: int) -> Ints:
        """Return new tokens from the engine that runs the request; empty if there is none or it is lost."""
        try:
            if request.engine is not None:
                return await self._links[request.engine].peek(request.wish.request_id, after)
        except OutpaceError as error:
            log.debug("cannot stream request %s: %s", request.wish.request_id, error)
        return np.zeros(0, dtype=np.int32)

    async def _abort_at(self, engine: str, request_ids: list[str]) -> None:
        try:
            if self._links.reaches(engine):
                await self._links[engine].abort(request_ids)
        except PartLost:  # its requests end with the tokens received so far
            log.info("engine %s was lost during an abort", engine)

    @contextmanager
    def _running_at(self, request: Flight, engine: str) -> Iterator[None]:
        self._router.sent(engine, request.wish)
        request.at(engine)
        try:
            yield
        finally:
            request.at(None)
            self._router.ended(engine)
            self._close_unused()

    def _close_unused(self) -> None:
        self._links.keep_only({member.name for member in self._router.members} | self._router.load.keys())

    def _wake_waiting(self) -> None:
        """Wake all waiting requests."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for the event, at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
